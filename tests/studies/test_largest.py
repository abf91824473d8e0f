"""The largest batch: N fits and N + 1 does not, by analyses of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.errors import UsageError
from staticmem.studies import Request, Study
from staticmem.studies.bench import Bench
from staticmem.studies.largest import largest_batch

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.parametrize(
    ("name", "gpu", "words"),
    [
        ("seed.pt2", "3GiB", {"optimizer": "adam"}),
        ("resnet18.pt2", "3GiB", {"optimizer": "sgd", "accumulate": 2}),
        ("resnet18.pt2", "3GiB", {"optimizer": "adam", "checkpoint": ("BasicBlock",)}),
        ("mobilenet_v2.onnx", "4GiB", {"optimizer": "adamw", "amp": "bf16"}),
        ("vgg16_hw.pt2", "8GiB", {"resolution": 128, "optimizer": "sgd"}),
        ("resnet18.onnx", "2GiB", {}),
    ],
)
def test_n_fits_and_the_next_does_not(name: str, gpu: str, words: dict[str, Any]) -> None:
    path = MODELS / name
    found = largest_batch(Bench(Study.open(path, Request(**words))), gpu)
    assert found.batch >= 1

    def need(batch: int) -> tuple[int, int, int]:
        report = staticmem.analyze(path, batch=batch, gpu=gpu, **words)
        assert report.gpu is not None
        return report.peak.device_bytes or 0, report.gpu.usable_bytes, report.peak.bands["device"].high

    here, usable, _ = need(found.batch)
    behind, _, _ = need(found.batch + 1)
    assert here <= usable < behind
    assert (found.device_bytes, found.next_device_bytes) == (here, behind)
    assert found.safe_batch <= found.batch <= found.live_batch
    if found.safe_batch:
        assert need(found.safe_batch)[2] <= 0.95 * usable
    assert need(found.safe_batch + 1)[2] > 0.95 * usable


def test_the_batch_that_live_memory_allows() -> None:
    """Against runs at that batch and the next: live tensors and the context, nothing else."""
    path = MODELS / "resnet18.pt2"
    found = largest_batch(Bench(Study.open(path, Request(optimizer="adam"))), "3GiB")

    def need(batch: int) -> int:
        report = staticmem.analyze(path, batch=batch, optimizer="adam", gpu="3GiB")
        return report.peak.live_bytes + (report.peak.context_bytes or 0)

    assert need(found.live_batch) <= 3 << 30 < need(found.live_batch + 1)


def test_no_batch_fits() -> None:
    found = largest_batch(Bench(Study.open(MODELS / "resnet18.pt2", Request(optimizer="adam"))), "300MiB")
    assert (found.batch, found.safe_batch, found.live_batch, found.device_bytes) == (0, 0, 0, None)
    assert (found.next_device_bytes or 0) > 300 << 20


def test_a_fixed_batch_is_told_with_the_node(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, proto = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Constant", [], ["s"], "c", value=helper.make_tensor("v", proto.INT64, [2], [2, 6])),
        helper.make_node("Reshape", ["x", "s"], ["r"], "the_reshape"),
        helper.make_node("MatMul", ["r", "w"], ["y"], "mm"),
    ]
    graph = helper.make_graph(
        nodes, "tiny", [helper.make_tensor_value_info("x", proto.FLOAT, ["n", 2, 3])],
        [helper.make_tensor_value_info("y", proto.FLOAT, [2, 6])],
        [helper.make_tensor("w", proto.FLOAT, [6, 6], [0.0] * 36)],
    )  # fmt: skip
    path = tmp_path / "fixed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    with pytest.raises(UsageError) as caught:
        largest_batch(Bench(Study.open(path, Request())), "24GB")
    assert caught.value.what == "the batch of this model is fixed"
    assert "the_reshape" in caught.value.why


def test_a_model_without_a_batch_has_no_largest(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, proto = onnx.helper, onnx.TensorProto
    weight = helper.make_tensor("w", proto.FLOAT, [6, 6], [0.0] * 36)
    output = helper.make_tensor_value_info("y", proto.FLOAT, [6, 6])
    graph = helper.make_graph([helper.make_node("Abs", ["w"], ["y"])], "constant", [], [output], [weight])
    path = tmp_path / "constant.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    with pytest.raises(UsageError, match="the batch of this model is fixed"):
        largest_batch(Bench(Study.open(path, Request())), "24GB")


def test_in_a_sweep() -> None:
    from staticmem.config.config import Config
    from staticmem.studies.points import points
    from staticmem.studies.sizing_search import GrownSize
    from staticmem.studies.sweep import with_largest

    made = points(Config(), str(MODELS / "seed.pt2"), {}, {"batch": (1, 2, 3), "optimizer": ("sgd", "adam")})
    found = with_largest(made, ("3GiB",), GrownSize())
    assert [row.settings["optimizer"] for row in found.rows] == ["sgd", "adam"]
    sgd, adam = (row.cards[0].max_batch for row in found.rows)
    assert sgd is not None
    assert adam is not None
    assert sgd.batch >= adam.batch > 0
    with pytest.raises(UsageError, match="needs a GPU"):
        with_largest(made, (), GrownSize())


def test_from_python() -> None:
    path = MODELS / "resnet18.pt2"
    found = staticmem.max_batch(path, "2GiB", optimizer="sgd")
    assert found == largest_batch(Bench(Study.open(path, Request(optimizer="sgd"))), "2GiB")
