"""Exports whose graph PyTorch cannot make: the recording alone, and what the user is told of sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import staticmem  # noqa: E402
from staticmem.errors import DimensionError, ModelFileError  # noqa: E402
from staticmem.frontends import open_model, traced_sizes  # noqa: E402
from staticmem.recording import NEITHER, NO_GRAPH  # noqa: E402
from staticmem.recording.export import ExportRequest, exported, graph_file  # noqa: E402
from staticmem.recording.told import lines_of  # noqa: E402

pytestmark = pytest.mark.torch


class Averaged(nn.Module):  # type: ignore[misc]
    """Weights that follow others: torch.export refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.k.weight.data = self.k.weight.data * 0.9 + self.q.weight.data * 0.1
        return (self.q(x) * self.k(x)).sum(-1)


class Breaks(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        raise RuntimeError("no luck")


class Rounds(nn.Module):  # type: ignore[misc]
    """`math.ceil` of an open size, which the format of a .pt2 does not have."""

    def forward(self, x: Any) -> Any:
        import math

        side = math.ceil(x.shape[2] / 2) * 2
        return functional.interpolate(x, (side, side)).relu()


class Straightens(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)

    def forward(self, x: Any) -> Any:
        theta = self.conv(x).mean((2, 3)).view(-1, 2, 3)
        grid = functional.affine_grid(theta, x.size(), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)


class Counts(nn.Module):  # type: ignore[misc]
    """The batch as a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        return y @ y.T - torch.eye(len(x), device=x.device)


class Branches(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x * 2 if x.shape[0] < 16 else (x * 2).relu() @ torch.ones(16, 16, device=x.device)


def made(module: Any, x: Any, path: Path) -> list[str]:
    data, lines = exported(ExportRequest(module, (x,), path.suffix))
    path.write_bytes(data)
    return lines


def test_a_file_with_a_recording_alone(tmp_path: Path) -> None:
    path, x = tmp_path / "net.pt2", torch.zeros(2, 16)
    lines = made(Averaged(), x, path)
    assert lines[0] == "Open sizes: batch"
    assert lines[-1].startswith(f"{NO_GRAPH}: torch.export cannot export Averaged")
    settings: list[dict[str, Any]] = [{"optimizer": "adam"}, {}, {"optimizer": "sgd", "amp": "bf16"}]
    for words in settings:
        own = staticmem.analyze(Averaged(), (torch.zeros(32, 16),), **words)
        assert staticmem.analyze(path, batch=32, **words).peak.live_bytes == own.peak.live_bytes
    with pytest.raises(ModelFileError, match="no graph") as error:
        open_model(str(path), recordings=False)
    assert error.value.code == "SM105"


def test_an_onnx_is_its_graph(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot export") as error:
        made(Averaged(), torch.zeros(2, 16), tmp_path / "net.onnx")
    assert "-o model.pt2" in error.value.hint


def test_neither_graph_nor_recording(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot export") as error:
        made(Breaks(), torch.zeros(2, 16), tmp_path / "net.pt2")
    assert NEITHER in error.value.why
    assert error.value.code == "SM171"


def test_sizes_that_the_format_cannot_have(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    lines = made(Rounds(), torch.zeros(2, 3, 32, 32), path)
    assert lines[0] == "Open sizes: batch, axis1, height, width"
    assert lines[-1].startswith("The graph beside it, for other tools: open sizes: batch")
    assert staticmem.analyze(path, batch=2, resolution=48).model.inputs[0].shape == (2, 3, 48, 48)


def test_the_smallest_size_is_no_limit(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    assert made(Straightens(), torch.zeros(2, 3, 32, 32), path)[0] == "Open sizes: batch, height, width"
    own = staticmem.analyze(Straightens(), (torch.zeros(8, 3, 32, 32),), optimizer="adam")
    assert staticmem.analyze(path, batch=8, optimizer="adam").peak.live_bytes == own.peak.live_bytes


def test_limits_are_told(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    assert made(Branches(), torch.zeros(2, 16), path)[0] == "Open sizes: batch (1 to 15), axis1"
    with pytest.raises(DimensionError, match="cannot be 64") as error:
        staticmem.analyze(path, batch=64)
    assert "1 to 15" in error.value.why
    assert "staticmem export MODULE:FACTORY --input 64x16 -o FILE" in error.value.hint


def test_conditions_are_told() -> None:
    document = {
        "symbols": {"batch": [1, None], "seq": [4, 512]},
        "sizes": {"example": {"batch": 2, "seq": 8, "width": 3}, "conditions": ["Le(seq,512)", "Eq(Mod(seq,4),0)"]},
        "training_conditions": ["Ne(batch,1)"],
        "inputs": [["x", "float32", ["batch", "seq", 3]]],
    }
    assert lines_of(document) == [
        "Open sizes: batch (not 1), seq (4 to 512)",
        "Fixed by the code: width = 3",
        "Recorded for sizes where seq % 4 == 0",
    ]


@pytest.mark.parametrize("module", [Counts, Branches])
def test_a_module_is_recorded_again_at_other_sizes(module: Any) -> None:
    example = (torch.zeros(2, 16),)
    for batch in (2, 8, 64):
        own = staticmem.analyze(module(), (torch.zeros(batch, 16),), optimizer="sgd", loss="sum")
        again = staticmem.analyze(module(), example, batch=batch, optimizer="sgd", loss="sum")
        assert again.peak.live_bytes == own.peak.live_bytes


def test_a_file_says_what_its_code_has_fixed(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    made(Counts(), torch.zeros(2, 16), path)
    with pytest.raises(DimensionError, match=r"x\[0\] = 2") as error:
        staticmem.analyze(path, batch=8)
    assert "--input 8x16" in error.value.hint


def test_names_are_those_of_the_code(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    report = staticmem.analyze(module, (torch.zeros(2, 3, 32, 32),), optimizer="sgd", loss="mean")
    assert report.model.outputs[0].name == "conv2d_1"
    assert {("relu", "1"), ("conv2d_1", "2")} <= {(row.name, row.module) for row in report.alive}


def test_a_recorded_loss_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    staticmem.export(nn.Linear(16, 4), (torch.zeros(2, 16),), path, loss=lambda y: y.square().mean())
    report = staticmem.analyze(path, batch=8, optimizer="sgd")
    assert report.scenario.loss == "recorded"
    assert "loss recorded" in " ".join(str(report).split())


def test_a_graph_has_the_names_of_the_export(tmp_path: Path) -> None:
    """Where a file has no recording, `--dim` takes the names that `staticmem export` says too."""
    path, x = tmp_path / "net.pt2", torch.zeros(2, 12, 16)
    data, lines = graph_file(ExportRequest(nn.Linear(16, 4), (x,), ".pt2"))
    path.write_bytes(data)
    assert lines[0] == "Open sizes: batch, axis1"
    report = staticmem.analyze(path, batch=4, dims={"axis1": 128})
    assert report.model.inputs[0].symbolic == ("batch", "axis1", 16)
    assert (
        report.peak.live_bytes
        == staticmem.analyze(nn.Linear(16, 4), (x,), batch=4, dims={"axis1": 128}).peak.live_bytes
    )
    assert torch.export.load(path).range_constraints  # the graph itself has the symbols of PyTorch


@pytest.mark.parametrize("names", [{"s1": "batch", "s2": "batch"}, {"s1": "s2", "s2": "x"}, {"s1": "a.b"}, {"x": "y"}])
def test_names_that_are_none(names: dict[str, str]) -> None:
    text = json.dumps({"example": {}, "least": {}, "conditions": [], "names": names})
    with pytest.raises(ModelFileError, match="damaged sizes"):
        traced_sizes.read(text, "net.pt2")


def test_progress_counts_modes_and_the_graph() -> None:
    told: list[tuple[int, int]] = []
    with torch.device("meta"):
        request = ExportRequest(nn.Linear(16, 4), (torch.zeros(2, 16),), ".pt2", progress=lambda *at: told.append(at))
    exported(request)
    assert told == [(done, 6) for done in range(6)]
