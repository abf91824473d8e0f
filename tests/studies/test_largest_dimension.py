"""The largest size of an open dimension: N fits and the next size does not, by analyses of their own."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.frontends import open_model
from staticmem.ir.model_file import ModelFile, TracedSizes
from staticmem.studies import Request, Study
from staticmem.studies.bench import Bench
from staticmem.studies.largest import largest_size
from staticmem.studies.sizing_search import GrownSize

CARD = "2GiB"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two products over tokens [batch, seq, 256], and the scores of all pairs of tokens."""
    onnx = pytest.importorskip("onnx")
    helper, proto = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"], "query"),
        helper.make_node("Transpose", ["q"], ["k"], "turned", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "k"], ["s"], "scores"),
        helper.make_node("Softmax", ["s"], ["y"], "softmax", axis=-1),
    ]
    graph = helper.make_graph(
        nodes, "tokens", [helper.make_tensor_value_info("x", proto.FLOAT, ["batch", "seq", 256])],
        [helper.make_tensor_value_info("y", proto.FLOAT, ["batch", "seq", "seq"])],
        [helper.make_tensor("w", proto.FLOAT, [256, 256], [0.0] * (256 * 256))],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tokens") / "tokens.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return str(path)


def test_n_fits_and_the_next_does_not(tokens: str) -> None:
    found = staticmem.max_dim(tokens, CARD, "seq", batch=2, optimizer="sgd")
    assert (found.dim, found.next_size) == ("seq", found.size + 1)

    def need(seq: int) -> tuple[int, int, int]:
        report = staticmem.analyze(tokens, batch=2, dims={"seq": seq}, optimizer="sgd", gpu=CARD)
        assert report.gpu is not None
        return report.peak.device_bytes or 0, report.gpu.usable_bytes, report.peak.bands["device"].high

    here, usable, _ = need(found.size)
    behind, _, _ = need(found.next_size)
    assert here <= usable < behind
    assert (found.device_bytes, found.next_device_bytes) == (here, behind)
    assert 1 < found.safe_size <= found.size <= found.live_size

    def alive(seq: int) -> int:
        report = staticmem.analyze(tokens, batch=2, dims={"seq": seq}, optimizer="sgd", gpu=CARD)
        return report.peak.live_bytes + (report.peak.context_bytes or 0)

    assert alive(found.live_size) <= 2 << 30 < alive(found.live_size + 1)  # bytes grow with the square of the size
    assert need(found.safe_size)[2] <= 0.95 * usable < need(found.safe_size + 1)[2]


def test_the_size_of_the_request_plays_no_part(tokens: str) -> None:
    study = Study.open(tokens, Request(batch=2, optimizer="sgd"))
    for dims in (None, {"seq": 64}):
        found = largest_size(Bench(study.ask(replace(study.request, dims=dims))), CARD, GrownSize("seq"))
        assert found == largest_size(Bench(study), CARD, GrownSize("seq"))


def test_a_dimension_named_batch_is_the_batch(tokens: str) -> None:
    words = {"optimizer": "sgd", "dims": {"seq": 128}}
    by_name = staticmem.max_dim(tokens, CARD, "batch", **words)  # type: ignore[arg-type]
    assert by_name.as_batch() == staticmem.max_batch(tokens, CARD, **words)  # type: ignore[arg-type]


def conditional(path: str, condition: str, example: int) -> ModelFile:
    """The model as if its code had asked this of its sizes."""
    model = copy.copy(open_model(path))  # the one that was opened is kept for those who open it again
    model.sizes = TracedSizes({"seq": example}, {}, (condition,))
    return model


@pytest.mark.parametrize(
    ("condition", "example", "allowed"),
    [
        ("Eq(Mod(seq,32),0)", 128, lambda n: n % 32 == 0),
        ("Gt(seq,1)", 128, lambda n: n > 1),
        ("Le(seq,1000)", 128, lambda n: n <= 1000),
        ("Gt(seq,500)", 512, lambda n: n > 500),
    ],
)
def test_sizes_that_the_code_does_not_take_are_passed_over(
    tokens: str, condition: str, example: int, allowed: Callable[[int], bool]
) -> None:
    free = largest_size(Bench(Study.open(tokens, Request(batch=2, optimizer="sgd"))), CARD, GrownSize("seq"))
    model = conditional(tokens, condition, example)
    found = largest_size(Bench(Study(model, Request(batch=2, optimizer="sgd"))), CARD, GrownSize("seq"))
    assert found.size == max(n for n in range(1, free.size + 1) if allowed(n))
    taken = [n for n in range(found.size + 1, found.size + 100) if allowed(n)]
    assert (found.next_device_bytes is not None) == bool(taken)
    if taken:
        assert found.next_size == taken[0]


def test_a_dimension_that_the_model_lacks(tokens: str) -> None:
    with pytest.raises(UsageError, match=r"no open dimension 'sequence'.*") as error:
        staticmem.max_dim(tokens, CARD, "sequence", batch=2)
    assert error.value.code == "SM111"
    assert "batch, seq" in error.value.why


def test_in_every_verb(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = [tokens, "--no-config", "--batch", "2", "--optimizer", "sgd", "--gpu", CARD]
    found = staticmem.max_dim(tokens, CARD, "seq", batch=2, optimizer="sgd")
    assert main(["analyze", *step, "--max-dim", "seq"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"The largest seq that fits is {found.size:,} (" in out
    assert f"{found.next_size:,} needs" in out
    assert main(["sweep", *step, "--dim", "seq=64", "--max-dim", "seq", "-f", "csv"]) == 0
    heads, row = (line.split(",") for line in capsys.readouterr().out.splitlines())
    cells = dict(zip(heads, row, strict=True))
    assert cells["max_dim_dim[2gib]"] == "seq"
    assert int(cells["max_dim_size[2gib]"]) == found.size
    assert main(["size", *step, "--dim", "seq=64", "--max-dim", "seq", "-f", "csv"]) == 0
    heads, row = csv.reader(capsys.readouterr().out.splitlines())
    cells = dict(zip(heads, row, strict=True))
    assert [cells[name] for name in ("max_batch", "safe_batch")] == ["", ""]
    assert [int(cells[name]) for name in ("max_size", "safe_size")] == [found.size, found.safe_size]
    assert main(["size", *step, "--dim", "seq=64", "--max-dim", "seq", "-f", "md"]) == 0
    assert "| max seq | safe seq |" in capsys.readouterr().out


def test_what_cannot_be_asked(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", tokens, "--no-config", "--batch", "2", "--max-dim", "seq"]) == 2
    assert "--max-dim needs a GPU" in capsys.readouterr().err
    assert main(["analyze", tokens, "--no-config", "--gpu", CARD, "--max-dim", "seq", "--max-batch"]) == 2
    assert "--max-batch and --max-dim are both given" in capsys.readouterr().err
    step = [tokens, "--no-config", "--dim", "seq=64", "--optimizer", "sgd", "--gpu", CARD, "--max-dim", "seq"]
    for other in (["--no-batches"], ["--global-batch", "8"]):
        assert main(["size", *step, *other]) == 2
        assert f"--max-dim with {other[0]}" in capsys.readouterr().err
    step[step.index("--max-dim") + 1] = "sequence"
    assert main(["size", *step, "--batch", "2"]) == 2
    assert "no open dimension 'sequence'" in capsys.readouterr().err


def test_least_size_is_one_that_the_ops_take() -> None:
    """Five poolings halve an image of 31 to nothing. A recording says only that its width is open."""
    model = Path(__file__).parents[2] / "models" / "vgg16_hw.pt2"
    study = Study.open(model, Request(batch=1, dims={"height": 224}))
    _, limits = GrownSize("width").tried(study)
    assert limits is not None
    assert limits[0] == 32
