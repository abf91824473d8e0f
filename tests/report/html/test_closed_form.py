"""The closed form of the peak: what it is derived from, by hand and at random, and against whole analyses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from html_pages import MODELS, study_of
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import staticmem
from staticmem.eager.trace import Buffer, Kernel, Kernels, Trace, round_up
from staticmem.ir import dtypes
from staticmem.liveness import Lifetimes
from staticmem.report.html.closed_form import NotAffineError, closed_form
from staticmem.report.html.page import esc
from staticmem.studies.page import page, what_if


def step(lines: list[tuple[int, int, int, int]], ticks: int, batch: int) -> Lifetimes:
    """A step whose buffers are (base, slope, born, died)."""
    trace = Trace(kernels=Kernels([Kernel("aten.k.default", "forward", -1)]), ticks=ticks, phases=[("forward", 0)])
    for index, (base, slope, born, died) in enumerate(lines):
        nbytes = base + slope * batch
        trace.buffers.append(Buffer(index, nbytes, (nbytes,), dtypes.uint8, "activation", "", 0, born, died))
    return Lifetimes(trace)


def test_two_moments_take_turns() -> None:
    """600 fixed bytes against 100 a sample, never alive together: 1024 against 512, 512, ... 1024 from batch 6 on."""
    lines = [(600, 0, 0, 1), (0, 100, 2, 3)]
    form = closed_form({batch: step(lines, 4, batch) for batch in (1, 2, 40)}, 1, 40)
    assert [form.peak(batch) for batch in (1, 5, 6, 10, 11, 40)] == [1024, 1024, 1024, 1024, 1536, 4096]
    assert len(form.moments) == 2


def test_what_is_never_the_largest_is_left_out() -> None:
    lines = [(512, 0, 0, 1), (512, 512, 2, 3), (1024, 512, 4, 5)]
    form = closed_form({batch: step(lines, 6, batch) for batch in (1, 2, 8)}, 1, 8)
    assert [moment.tick for moment in form.moments] == [4]
    assert form.peak(8) == 1024 + 8 * 512


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[tuple[int, int, int, int]], int]:
    """Buffers with an event of their own for every birth and death."""
    count = draw(st.integers(1, 12))
    order = draw(st.permutations([i for i in range(count) for _ in range(2)]))
    seen: dict[int, int] = {}
    lines = [(0, 0, 0, 0)] * count
    numbers = draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 1500)), min_size=count, max_size=count))
    for tick, index in enumerate(order):
        if index in seen:
            lines[index] = (*numbers[index], seen[index], tick)
        else:
            seen[index] = tick
    return sorted(lines, key=lambda line: line[2]), 2 * count


@given(schedules(), st.integers(4, 25))
def test_it_is_the_peak_of_every_batch(schedule: tuple[list[tuple[int, int, int, int]], int], high: int) -> None:
    lines, ticks = schedule
    form = closed_form({batch: step(lines, ticks, batch) for batch in (1, 3, high)}, 1, high)
    for batch in range(1, high + 1):
        assert form.peak(batch) == step(lines, ticks, batch).peak_bytes


def test_steps_that_differ_have_none() -> None:
    short, long = [(512, 0, 0, 1), (512, 8, 2, 4)], [(512, 0, 0, 3), (512, 8, 2, 4)]
    with pytest.raises(NotAffineError, match="other things than the one at 1"):
        closed_form({1: step(short, 5, 1), 2: step(short, 5, 2), 9: step(long, 5, 9)}, 1, 9)


def test_sizes_that_are_not_on_a_line_have_none() -> None:
    steps = {batch: step([(batch * batch, 0, 0, 1)], 2, batch) for batch in (1, 2, 9)}
    with pytest.raises(NotAffineError, match="does not grow evenly"):
        closed_form(steps, 1, 9)


def test_a_batch_outside_is_refused() -> None:
    form = closed_form({batch: step([(0, 8, 0, 1)], 2, batch) for batch in (2, 3, 9)}, 2, 9)
    with pytest.raises(ValueError, match="batch 1 is not in 2 to 9"):
        form.peak(1)
    assert round_up(72) == form.peak(9)


REAL: list[tuple[Path, dict[str, Any]]] = [
    (MODELS / "resnet18.pt2", {"batch": 8, "optimizer": "adam"}),
    (MODELS / "vgg16_hw.pt2", {"batch": 4, "optimizer": "sgd", "resolution": (160, 192)}),
    (MODELS / "mobilenet_v2.onnx", {"batch": 16, "mode": "infer"}),
]


@pytest.mark.parametrize(("path", "words"), REAL, ids=[path.name for path, _ in REAL])
def test_it_says_what_analyze_says(path: Path, words: dict[str, Any]) -> None:
    """Batches between and beyond those that were traced, in every setting that is not left out."""
    found = what_if(study_of(path, **words))
    assert found.settings
    checked = 0
    for number, setting in enumerate(found.settings[:: max(len(found.settings) // 4, 1)]):
        form = setting.form
        assert form is not None
        for batch in {form.low, 17 + number} - set(form.traced):
            asked = {"mode": words["mode"]} if "mode" in words else {}
            report = staticmem.analyze(
                path, batch=batch, resolution=setting.resolution if setting.sized else words.get("resolution"),
                optimizer=setting.optimizer, momentum=setting.momentum, dtype=setting.dtype, amp=setting.amp, **asked,
            )  # fmt: skip
            assert form.peak(batch) == report.peak.live_bytes, (setting.options, batch)
            checked += 1
    assert checked >= 3


def test_without_a_batch_it_says_why() -> None:
    study = study_of(MODELS / "vgg16.pt2", batch=2, dtype="bf16", amp=None)
    assert what_if(study).settings[0].precision_words == "bfloat16 model"


def test_a_batch_that_is_fixed_in_the_file_is_the_reason(tmp_path: Path) -> None:
    """A reshape to the batch of the export: no other batch can be traced."""
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [2, 6])
    nodes = [
        helper.make_node("Constant", [], ["s"], "c", value=shape),
        helper.make_node("Reshape", ["x", "s"], ["y"], "the_reshape"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6])
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), tmp_path / "fixed.onnx")
    study = study_of(tmp_path / "fixed.onnx", batch=2)
    found = what_if(study)
    assert found.settings == ()
    assert "steps at other batches could not be compared" in found.reason
    assert "the_reshape" in found.reason
    assert esc(found.reason) in page(study)


def test_a_single_sample_that_takes_another_way_has_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form begins at batch 2 where a step of one sample does something else: it says nothing of batch 1."""

    def from_two(traced: Any, low: int, high: int) -> Any:
        if low == 1:
            raise NotAffineError("another way")
        return closed_form(traced, low, high)

    monkeypatch.setattr("staticmem.studies.page.closed_form", from_two)
    found = what_if(study_of(MODELS / "seed.pt2", batch=1))
    assert not found.settings
    assert "other batches" in found.reason
    assert what_if(study_of(MODELS / "seed.pt2", batch=4)).settings
