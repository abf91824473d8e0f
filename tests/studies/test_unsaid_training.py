"""What a file does not say of training, and where the band begins for it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.studies import Request, Study

MODELS = Path(__file__).parents[2] / "models"


def codes(report: staticmem.Report) -> set[str]:
    return {note.code for note in (*report.assumptions, *report.warnings)}


def test_an_onnx_file_may_have_all_but_one_parameter_frozen() -> None:
    """The least is what a step has whose only trained parameter is the bias of the last layer, or less."""
    options: dict[str, Any] = {"batch": 8, "optimizer": "adam", "loss": "cross-entropy"}
    peak = staticmem.analyze(MODELS / "resnet18.onnx", **options).peak
    frozen = staticmem.analyze(MODELS / "resnet18.onnx", **options, freeze=r"^(?!fc\.bias)").peak
    assert peak.bands["live"].low <= frozen.live_bytes < peak.live_bytes
    assert peak.bands["live"].high == peak.live_bytes


def test_to_say_that_nothing_is_frozen_settles_it() -> None:
    report = staticmem.analyze(MODELS / "resnet18.onnx", batch=8, optimizer="adam", freeze="none", checkpoint="none")
    assert report.peak.bands["live"].low == report.peak.bands["live"].high == report.peak.live_bytes
    assert codes(report).isdisjoint(("SM310", "SM334"))


def test_the_least_grows_with_the_batch_as_steps_do() -> None:
    request = Request(batch=8, optimizer="adam")
    lows = []
    for batch in (8, 16, 24):
        band = Study.open(MODELS / "resnet18.onnx", Request(batch=batch, optimizer=request.optimizer)).live_band
        assert band is not None
        lows.append(band[0])
    assert lows[2] - lows[1] == lows[1] - lows[0] > 0


torch = pytest.importorskip("torch")


class Block(torch.nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Blocks(torch.nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(64) for _ in range(6))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


def without_lines(path: Path) -> Path:
    """The file without its stack traces."""

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            value.pop("stack_trace", None)
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(each)

    bare = path.with_name("bare.pt2")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(bare, "w") as copy:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith("models/model.json"):
                document = json.loads(data)
                walk(document)
                data = json.dumps(document).encode()
            copy.writestr(name, data)
    return bare


@pytest.mark.torch
def test_without_lines_all_code_may_run_in_checkpoints(tmp_path: Path) -> None:
    """With lines the checkpoints are seen; without, the band holds that peak, and --checkpoint settles it."""
    path = tmp_path / "m.pt2"
    program = torch.export.export(Blocks().train(), (torch.zeros(64, 128, 64),))
    torch.export.save(program, path)
    options: dict[str, Any] = {"optimizer": "adam", "loss": "mean", "outputs": "dropped"}
    seen = staticmem.analyze(path, **options)
    assert "SM316" in codes(seen)
    bare = without_lines(path)
    report = staticmem.analyze(bare, **options)
    assert "SM386" in codes(report)
    assert report.peak.bands["live"].low <= seen.peak.live_bytes < 0.7 * report.peak.live_bytes
    told = staticmem.analyze(bare, **options, checkpoint="Block")
    assert told.peak.live_bytes == seen.peak.live_bytes
    assert "SM386" not in codes(told)


class Segments(torch.nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(7)])

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint_sequential(self.features, 3, x, use_reentrant=False)


@pytest.mark.torch
def test_segments_hold_their_input_in_inference(tmp_path: Path) -> None:
    """As the recording of the code says; without lines the band has it."""
    inputs = (torch.zeros(64, 128, 64),)
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(Segments().eval(), inputs), path)
    recorded = staticmem.analyze(Segments(), inputs=inputs, mode="infer").peak.live_bytes
    plain = staticmem.analyze(path, mode="infer").peak
    assert plain.live_bytes == recorded
    bare = staticmem.analyze(without_lines(path), mode="infer").peak
    assert bare.live_bytes < recorded <= bare.bands["live"].high


class Method(Segments):
    def body(self, x: Any) -> Any:
        for layer in self.features:
            x = layer(x)
        return x

    def forward(self, x: Any) -> Any:
        x = torch.relu(x)
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.torch
def test_a_checkpoint_holds_its_arguments_in_inference(tmp_path: Path) -> None:
    """That of a method: a module holds its own."""
    inputs = (torch.zeros(64, 128, 64),)
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(Method().eval(), inputs), path)
    recorded = staticmem.analyze(Method(), inputs=inputs, mode="infer").peak.live_bytes
    assert staticmem.analyze(path, mode="infer").peak.live_bytes == recorded


@pytest.mark.torch
def test_what_a_fused_layer_does_not_make_is_in_the_band(tmp_path: Path) -> None:
    """The ops of an encoder layer may be one in evaluation mode (SM342)."""
    path = tmp_path / "m.pt2"
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    torch.export.save(torch.export.export(layer.eval(), (torch.zeros(8, 64, 64),)), path)
    report = staticmem.analyze(path, mode="infer")
    assert "SM342" in codes(report)
    assert report.peak.bands["live"].low < report.peak.live_bytes
