"""Models in memory give the report that their files give."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.errors import ModelFileError
from staticmem.report.json import dumps
from staticmem.report.model import Report

torch: Any = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"


def network(name: str) -> Any:
    sys.path.insert(0, str(MODELS))
    try:
        from architectures import ARCHITECTURES  # type: ignore[import-not-found,unused-ignore]
    finally:
        sys.path.remove(str(MODELS))
    with torch.device("meta"):
        return ARCHITECTURES[name]().train()


def image(batch: int) -> Any:
    return torch.empty(batch, 3, 224, 224, device="meta")


PHASES = ("forward", "backward", "optimizer")


def figures(report: Report) -> Any:
    """What does not depend on where the graph came from."""
    phases = replace(report.phases, **{n: replace(p, node=None) for n in PHASES if (p := getattr(report.phases, n))})
    return report.peak.live_bytes, report.peak.by_category, phases, report.parameters, report.multipliers


@pytest.mark.parametrize("words", [{"optimizer": "adam"}, {"optimizer": "sgd", "amp": "bf16"}, {"mode": "train"}])
def test_a_module_is_its_export(words: dict[str, Any]) -> None:
    ours = staticmem.analyze(network("resnet18"), (image(4),), **words)
    assert figures(ours) == figures(staticmem.analyze(MODELS / "resnet18.pt2", batch=4, **words))
    assert ours.model.path == "<ResNet>"
    assert ours.scenario.batch == 4


@pytest.mark.parametrize("example", [1, 2, 3])
def test_batch_may_be_another(example: int) -> None:
    ours = staticmem.analyze(network("resnet18"), (image(example),), batch=8, optimizer="adam")
    assert figures(ours) == figures(staticmem.analyze(MODELS / "resnet18.pt2", batch=8, optimizer="adam"))


def test_nothing_is_allocated_and_the_module_stays() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    staticmem.analyze(module, (torch.randn(4, 64),), optimizer="adam")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.device.type == "cpu"
    assert all(p.grad is None for p in module.parameters())
    huge = 10**13  # bytes; the module is on the meta device and nothing else can hold it
    with torch.device("meta"):
        wide = torch.nn.Linear(huge // 4 // 1000, 1000, bias=False)
    report = staticmem.analyze(wide, (torch.empty(2, huge // 4 // 1000, device="meta"),))
    assert report.parameters.bytes == huge


def test_an_exported_program_and_a_proto() -> None:
    import onnx

    program = torch.export.load(MODELS / "resnet18.pt2")
    ours = staticmem.analyze(program, batch=4, optimizer="adam")
    file = staticmem.analyze(MODELS / "resnet18.pt2", batch=4, optimizer="adam")
    assert figures(ours) == figures(file)
    proto = onnx.load(MODELS / "resnet18.onnx", load_external_data=False)
    ours = staticmem.analyze(proto, batch=4, optimizer="adam")
    file = staticmem.analyze(MODELS / "resnet18.onnx", batch=4, optimizer="adam")
    model = replace(file.model, path=ours.model.path, file_bytes=0, sha256=None)
    assert dumps(ours).replace("annotate FILE.onnx", "annotate resnet18.onnx") == dumps(replace(file, model=model))


def test_graph_modules() -> None:
    module = network("resnet18")
    traced = torch.fx.symbolic_trace(module)
    ours = staticmem.analyze(traced, (image(4),), optimizer="adam")
    assert ours.peak.live_bytes == staticmem.analyze(module, (image(4),), optimizer="adam").peak.live_bytes
    from torch.fx.experimental.proxy_tensor import make_fx

    made = make_fx(lambda x: torch.relu(x @ x), tracing_mode="fake")(torch.empty(64, 64))
    report = staticmem.analyze(made, outputs="dropped")
    assert report.peak.live_bytes == 3 * 64 * 64 * 4  # x, the product, its relu


def test_modules_with_other_inputs() -> None:
    class Two(torch.nn.Module):  # type: ignore[misc]
        def forward(self, ids: Any, scale: Any, factor: float = 2.0) -> Any:
            return (ids.float() * scale * factor).sum()

    ids, scale = torch.zeros(3, 4, dtype=torch.int64), torch.ones(4)
    assert staticmem.analyze(Two(), (ids, scale)).model.inputs[0].shape == (3, 4)
    assert staticmem.analyze(Two(), [ids, scale, 3.0]).model.inputs[1].shape == (4,)
    assert staticmem.analyze(torch.nn.ReLU(), torch.empty(5, 4)).model.inputs[0].shape == (5, 4)


def error_of(*args: Any, **words: Any) -> staticmem.StaticmemError:
    with pytest.raises(staticmem.StaticmemError) as caught:
        staticmem.analyze(*args, **words)
    assert caught.value.what
    assert caught.value.why
    assert caught.value.hint
    return caught.value


def test_a_module_that_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ModelFileError("Net cannot be recorded", "It reads data.", "", code="SM175")

    monkeypatch.setattr("staticmem.recording.record.record", refused)
    report = staticmem.analyze(network("resnet18"), inputs=(image(2),), mode="infer")
    (note,) = [note for note in report.warnings if note.code == "SM336"]
    assert note.text.endswith("the graph of torch.export was taken in its place. It reads data.")


def test_errors() -> None:
    assert "int is not a model" in error_of(3).what
    assert error_of(torch.nn.ReLU).hint == "Example: ReLU(...)"  # the class in place of an object
    assert "without inputs" in error_of(torch.nn.ReLU()).what
    assert "inputs are given with a file" in error_of(MODELS / "resnet18.pt2", (image(2),)).what
    program = torch.export.load(MODELS / "resnet18.pt2")
    assert "inputs do not apply to ExportedProgram" in error_of(program, (image(2),)).what

    class Wild(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x * float(x.numpy().sum())

    failed = error_of(Wild(), (torch.empty(2, 2),))
    assert "torch.export cannot export Wild" in failed.what
    assert "\n" not in failed.why
    assert failed.hint.startswith("Call the model once with inputs of these sizes")


@pytest.mark.parametrize("other", [torch.zeros(()), torch.zeros(1, 8), torch.zeros(64, 8)], ids=lambda x: str(x.dim()))
def test_the_batch_of_inputs_in_containers_and_beside_others(other: Any) -> None:
    """A dictionary, and a tensor that has no batch or broadcasts over it."""

    class Net(torch.nn.Module):  # type: ignore[misc]
        def forward(self, given: Any, other: Any) -> Any:
            return given["x"] + other

    report = staticmem.analyze(Net(), ({"x": torch.empty(64, 8)}, other), mode="infer")
    assert report.scenario.batch == 64
    assert report.model.inputs[0].shape == (64, 8)


class Running(torch.nn.Module):  # type: ignore[misc]
    """A buffer that each call in training changes with a history."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        self.seen += y.sum(0)
        return y * self.seen


def test_a_buffer_with_a_history_is_recorded() -> None:
    report = staticmem.analyze(Running(), (torch.empty(64, 8),), mode="infer")
    assert not [note for note in report.warnings if note.code == "SM336"]
