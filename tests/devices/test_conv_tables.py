"""The workspace tables: their text, their agreement with answers of cuDNN that they were not made from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticmem.devices import conv_tables
from staticmem.devices.conv import BACKWARD_DATA, BACKWARD_FILTER, FORWARD, Convolution
from staticmem.devices.conv_tables import Form, form_bytes
from staticmem.devices.conv_workspace import stray_bounds, workspace
from staticmem.devices.cudnn import ARCHITECTURES
from staticmem.units import NOTHING

ROOT = Path(__file__).parents[2]
ANSWERS = sorted((ROOT / "tests" / "data" / "hardware").glob("conv_answers_*.json"))


def test_every_architecture_has_tables_of_every_version() -> None:
    assert conv_tables.versions()
    for version in conv_tables.versions():
        for architecture in ARCHITECTURES:
            assert conv_tables.tree(version, architecture, "float32 nchw forward") is not None
            assert (conv_tables.tree(version, architecture, "tf32 nchw forward") is None) == (
                architecture in conv_tables.WITHOUT_TF32
            )


def test_the_tables_are_small() -> None:
    total = sum(path.stat().st_size for path in conv_tables.FOLDER.rglob("*.json"))
    assert total < 500_000


def test_the_closest_version() -> None:
    first, last = conv_tables.versions()[0], conv_tables.versions()[-1]
    assert conv_tables.closest("9.1.0") == first
    assert conv_tables.closest("10.0.0") == last
    assert conv_tables.closest(last) == last


leaves = st.lists(st.sampled_from([Form("", 1, None), Form("xyw", 1, None), Form("x", 8, 3)]), min_size=1, max_size=3)


@given(leaves, leaves, leaves)
def test_a_tree_survives_its_text(a: list[Form], b: list[Form], c: list[Form]) -> None:
    tree = conv_tables.Tree(
        [0, 1, -1, -1, -1], [5, 7, 0, 0, 0], [4, 3, 0, 0, 0], [(), (), tuple(a), tuple(b), tuple(c)]
    )
    again = conv_tables.parse(*conv_tables.dump(tree))
    assert again.leaf == tree.leaf
    assert [again.find(v) for v in ((5, 7), (5, 8), (6, 0))] == [tuple(a), tuple(b), tuple(c)]


@pytest.mark.parametrize("nodes", ["", "0<5 0", "0<5 1<2 0 0"])
def test_a_tree_that_is_cut_off(nodes: str) -> None:
    with pytest.raises(ValueError, match="cut off"):
        conv_tables.parse(["0"], nodes)


def answers(document: dict[str, Any], sampling: ModuleType) -> Iterator[tuple[str, Convolution, int]]:
    """(architecture, convolution, bytes) of a recorded file: its sample is drawn again from its seed."""
    for precision, last, direction in sampling.cells(("tf32", "float32", "float16")):
        drawn = sampling.sample(document["seed"], precision, last, direction, document["count"])
        name = conv_tables.table_name(precision, last, direction)
        for architecture in ARCHITECTURES:
            found = document["answers"].get(f"{architecture} {name}", [])
            yield from ((architecture, conv, n) for conv, n in zip(drawn, found, strict=False) if n >= 0)


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_strays_hold_what_leaves_miss(path: Path, sampling: ModuleType) -> None:
    """Answers that lie outside of a leaf lie between nothing and the copies with partial sums in most cases."""
    document = json.loads(path.read_text(encoding="utf-8"))
    missed = held = 0
    for architecture, conv, nbytes in answers(document, sampling):
        band = workspace(conv, architecture, document["cudnn"])
        tolerance = max(2**20, 0.02 * nbytes)
        strays = stray_bounds(conv, architecture, band, document["cudnn"])
        if strays is None or band.low - tolerance <= nbytes <= band.high + tolerance:
            continue
        assert strays[0] <= band.low
        assert strays[1] >= band.high
        missed += 1
        held += nbytes <= strays[1] + tolerance
    assert missed > 50
    assert held / missed > 0.7


def test_what_does_not_stray() -> None:
    """Without TF32, and before there was TF32."""
    for conv, architecture in ((vgg(FORWARD, "float32"), "sm_80"), (vgg(FORWARD), "sm_75")):
        assert stray_bounds(conv, architecture, workspace(conv, architecture, "9.26.0"), "9.26.0") is None
    depthwise = Convolution(FORWARD, "tf32", False, (8, 64, 56, 56), (64, 1, 3, 3), (1, 1), (1, 1), (1, 1), 64)
    assert stray_bounds(depthwise, "sm_80", NOTHING, "9.26.0") is None


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_agreement_with_fresh_answers(path: Path, sampling: ModuleType) -> None:
    """A second seed's convolutions: within 1 MiB or 2 % of cuDNN's answer in most cases, in the band in nearly all."""
    document = json.loads(path.read_text(encoding="utf-8"))
    exact = in_band = total = 0
    for architecture, conv, nbytes in answers(document, sampling):
        sizes = [form_bytes(conv, form) for form in conv_tables.forms(conv, architecture, document["cudnn"])]
        tolerance = max(2**20, 0.02 * nbytes)
        total += 1
        exact += abs(sizes[0] - nbytes) <= tolerance
        in_band += min(sizes) - tolerance <= nbytes <= max(sizes) + tolerance
    assert total > 1000
    assert exact / total > 0.80
    assert in_band / total > 0.89


def vgg(direction: str, precision: str = "tf32") -> Convolution:
    """The second convolution of VGG at 32 x 224 x 224, whose copies are the largest of the network."""
    return Convolution(direction, precision, False, (32, 64, 224, 224), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD_DATA, BACKWARD_FILTER])
def test_the_largest_layer_of_vgg_on_an_a100(direction: str) -> None:
    """cuDNN 9.26 copies the input alone in the forward, both tensors in the two gradients."""
    one = 32 * 64 * 224 * 224 * 4
    band = workspace(vgg(direction), "sm_80", "9.26.0")
    assert band.low <= band.expected <= band.high
    assert band.expected // one == (1 if direction == FORWARD else 2)


def test_without_tf32_it_takes_next_to_nothing() -> None:
    assert workspace(vgg(BACKWARD_DATA, "float32"), "sm_80", "9.26.0").expected < 2**20


def test_a_t4_has_no_tf32() -> None:
    assert workspace(vgg(FORWARD), "sm_75", "9.26.0") == workspace(vgg(FORWARD, "float32"), "sm_75", "9.26.0")


def test_bfloat16_is_as_float16() -> None:
    assert workspace(vgg(FORWARD, "bfloat16"), "sm_90", "9.26.0") == workspace(
        vgg(FORWARD, "float16"), "sm_90", "9.26.0"
    )


def test_cudnn_7_may_transform_the_tensors() -> None:
    """Winograd's algorithm in parts: 36/16 of input and result, 36/9 of the weight; other windows are not known."""
    head = Convolution(FORWARD, "float32", False, (2, 2048, 64, 128), (512, 2048, 3, 3), (1, 1), (1, 1), (1, 1))
    low, high = stray_bounds(head, "sm_70", NOTHING, "7.6.5") or (-1, -1)
    x, y, w = 2 * 2048 * 64 * 128 * 4, 2 * 512 * 64 * 128 * 4, 512 * 2048 * 9 * 4
    assert (low, high) == (0, (x + y) * 36 // 16 + w * 36 // 9)
    assert stray_bounds(head, "sm_70", NOTHING, "8.5.0") is None
    point = replace(head, w=(512, 2048, 1, 1), padding=(0, 0))
    assert stray_bounds(point, "sm_70", NOTHING, "7.6.5") == (0, 0)
