"""Files without weights: what other tools say of them, and the TorchScript exporter on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.frontends import traced_sizes
from staticmem.recording import tracing, writing

torch: Any = pytest.importorskip("torch")
onnx: Any = pytest.importorskip("onnx")
from torch import nn  # noqa: E402

pytestmark = pytest.mark.torch


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.same, self.even = nn.Conv2d(8, 8, 3, padding="same"), nn.Conv2d(8, 8, 2, padding="same")
        self.up, self.drop, self.head = nn.ConvTranspose2d(8, 8, 2, 2), nn.Dropout(0.1), nn.Linear(8, 40)
        self.tied = nn.Linear(8, 40)
        self.tied.weight = self.head.weight

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.up(self.even(self.same(self.stem(x)))))
        y = nn.functional.max_pool2d(y, 3, 2, padding=1)
        y = torch.flatten(nn.functional.adaptive_avg_pool2d(torch.relu_(self.same(y) + y), 1), 1)
        y = self.drop(y)
        return self.head(y) + self.tied(y)


def exported(path: Path, exporter: str, device: str = "meta", *, train: bool = True, size: int = 32) -> Path:
    with torch.device(device):
        net, x = Net().train(train), torch.zeros(1, 3, size, size)
    traced = tracing.trace(net, (x,), as_given=False)
    text = traced_sizes.write(traced.named_sizes if exporter == "torchscript" else traced.sizes)
    extra = {traced_sizes.NAME: text}
    if exporter == "torchscript":
        data = writing.torchscript_bytes(net, (x,), traced.axes, train=train, extra=extra)
    else:
        pytest.importorskip("onnxscript")
        data = writing.onnx_bytes(traced.program, stack_traces=False, extra=extra)
    path.write_bytes(data)
    return path


EXPORTERS = ("dynamo", "torchscript")


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_the_device_changes_nothing(tmp_path: Path, exporter: str, device: str) -> None:
    meta = onnx.load(exported(tmp_path / "a.onnx", exporter), load_external_data=False)
    other = onnx.load(exported(tmp_path / "b.onnx", exporter, device), load_external_data=False)
    ops = [[(node.op_type, list(node.input), list(node.output)) for node in m.graph.node] for m in (meta, other)]
    assert ops[0] == ops[1]
    assert [i.name for i in meta.graph.initializer] == [i.name for i in other.graph.initializer]
    assert (tmp_path / "b.onnx").stat().st_size < 40_000


@pytest.mark.parametrize("sizes", [{"batch": 1}, {"batch": 4}, {"batch": 3, "resolution": (48, 40)}])
@pytest.mark.parametrize("mode", [{"optimizer": "adam"}, {}])
def test_torchscript_gives_the_figures_of_dynamo(tmp_path: Path, sizes: dict[str, Any], mode: dict[str, Any]) -> None:
    reports = [staticmem.analyze(exported(tmp_path / f"{e}.onnx", e), **sizes, **mode) for e in EXPORTERS]
    assert reports[0].peak.live_bytes == reports[1].peak.live_bytes
    assert reports[0].parameters.bytes == reports[1].parameters.bytes


def test_node_names_of_torchscript_have_the_modules(tmp_path: Path) -> None:
    model = onnx.load(exported(tmp_path / "m.onnx", "torchscript"), load_external_data=False)
    names = {node.op_type: node.name for node in model.graph.node}
    assert names["BatchNormalization"] == "/stem/stem.1/BatchNormalization"
    assert names["ConvTranspose"] == "/up/ConvTranspose"
    (norm,) = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert {a.name: a.i for a in norm.attribute}["training_mode"] == 1
    assert [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [
        "batch", 3, "height", "width",
    ]  # fmt: skip


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_other_tools_read_the_files(tmp_path: Path, exporter: str) -> None:
    """As of any model with external data, once the data file exists."""
    file = exported(tmp_path / "m.onnx", exporter, train=False)
    model = onnx.load(file, load_external_data=False)
    onnx.shape_inference.infer_shapes(model, strict_mode=True)
    runtime = pytest.importorskip("onnxruntime")
    longest = max(4 * torch.Size(tensor.dims).numel() for tensor in model.graph.initializer)
    (tmp_path / writing.EXTERNAL).write_bytes(bytes(longest))  # every tensor starts at its first byte
    onnx.checker.check_model(str(file), full_check=True)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for batch, size in ((1, 32), (3, 48)):
        (result,) = session.run(None, {"x": torch.zeros(batch, 3, size, size).numpy()})
        assert result.shape == (batch, 40)
