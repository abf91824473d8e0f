"""`staticmem export`: code in, a file without weights out, which gives the figures of the module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main

torch: Any = pytest.importorskip("torch")

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50_000, 256)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(256, 10)
        self.norm = nn.BatchNorm1d(10)

    def forward(self, ids, mask):
        x = self.embed(ids).masked_fill(mask[..., None], 0).mean(1)
        return self.norm(self.head(self.drop(x)))

def with_inputs():
    return Net(), (torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.bool))

def broken():
    raise RuntimeError("no luck")

def nothing():
    return 3

def reads():
    net = Net()
    assert net.head.weight.mean().item() < 1e9
    return net

class Asks(Net):
    def forward(self, ids, mask):
        x = super().forward(ids, mask)
        return x + 1 if self.head.weight.abs().sum() > 0 else x

class Mixes(Net):
    def forward(self, ids, mask):
        return super().forward(ids, mask) + torch.arange(10)

value = 1
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return str(path)


INPUTS = ("--input", "2x16:int64", "--input", "2x16:bool")


@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_round_trip(script: str, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    file = tmp_path / f"net.{suffix}"
    assert main(["export", f"{script}:Net", *INPUTS, "-o", str(file)]) == 0
    assert "training mode, no weights" in capsys.readouterr().err
    assert file.stat().st_size < 200_000  # the embedding alone has 51 MB
    from net import Net  # type: ignore[import-not-found]

    inputs = (torch.zeros(8, 16, dtype=torch.int64), torch.zeros(8, 16, dtype=torch.bool))
    direct = staticmem.analyze(Net().train(), inputs, optimizer="adam")
    ours = staticmem.analyze(file, batch=8, optimizer="adam")
    assert ours.peak.live_bytes == direct.peak.live_bytes
    assert ours.parameters == direct.parameters
    assert b"net.py" not in file.read_bytes()


def test_what_stays_open_is_told(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of 1 is no constant, but nn.BatchNorm1d asks for it in training and refuses 1 value per channel."""
    file = tmp_path / "net.pt2"
    assert main(["export", f"{script}:Net", "--input", "1x16:int64", "--input", "1x16:bool", "-o", str(file)]) == 0
    assert "Open sizes: batch (not 1), axis1" in capsys.readouterr().err
    report = staticmem.analyze(file, batch=4, dims={"ids[1]": 32})
    assert [value.shape for value in report.model.inputs] == [(4, 32), (4, 32)]
    with pytest.raises(staticmem.StaticmemError, match="another way"):
        staticmem.analyze(file, batch=1, optimizer="sgd")
    assert staticmem.analyze(file, batch=1).model.inputs[0].shape == (1, 16)


def test_the_factory_may_give_inputs(script: str, tmp_path: Path) -> None:
    file = tmp_path / "net.pt2"
    assert main(["export", f"{script}:with_inputs", "--eval", "-o", str(file)]) == 0
    report = staticmem.analyze(file, batch=4)
    assert report.model.inputs[0].shape == (4, 16)


def test_source_lines_on_request(script: str, tmp_path: Path) -> None:
    import zipfile

    file = tmp_path / "net.pt2"
    assert main(["export", f"{script}:with_inputs", "--stack-traces", "-o", str(file)]) == 0
    with zipfile.ZipFile(file) as archive:
        assert any(b"masked_fill(mask" in archive.read(name) for name in archive.namelist())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{}:Net"], "gives no inputs"),
        (["{}:Gone", *INPUTS], "has no 'Gone'"),
        (["{}:value", *INPUTS], "is not a function or class"),
        (["{}:nothing", *INPUTS], "returns int"),
        (["{}:broken", *INPUTS], "no luck"),
        (["{}:reads", *INPUTS], "--device cpu"),
        (["{}:Mixes", *INPUTS], "try --device cpu"),
        (["{}:Net", *INPUTS, "--exporter", "torchscript"], "--exporter is for .onnx"),
        (["{}", *INPUTS], "is not MODULE:FACTORY"),
        (["none.py:Net", *INPUTS], "none.py does not exist"),
        (["no.such.module:Net", *INPUTS], "cannot be imported"),
        (["{}:Net", "--input", "2y3"], "is not a shape"),
        (["{}:Net", "--input", "2x3:float3"], "no dtype 'float3'"),
        (["{}:Net", "--input", "2x16:float32", "--input", "2x16"], "cannot export"),
    ],
)
def test_errors(script: str, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.replace("{}", script) for word in words]
    assert main(["export", *words, "-o", str(tmp_path / "m.pt2")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*.pt2"))


def test_existing_files_and_other_suffixes(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.pt2"
    file.write_text("mine")
    assert main(["export", f"{script}:with_inputs", "-o", str(file)]) == 2
    assert file.read_text() == "mine"
    assert main(["export", f"{script}:with_inputs", "-o", str(tmp_path / "net.bin")]) == 2
    assert ".pt2 or .onnx" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_weights_may_be_read_on_the_cpu(script: str, tmp_path: Path) -> None:
    assert main(["export", f"{script}:reads", *INPUTS, "--device", "cpu", "-o", str(tmp_path / "n.pt2")]) == 0
    assert main(["export", f"{script}:Mixes", *INPUTS, "--device", "cpu", "-o", str(tmp_path / "m.pt2")]) == 0
    assert main(["export", f"{script}:Mixes", *INPUTS, "--device", "cpu", "-o", str(tmp_path / "m.onnx")]) == 0


def test_torchscript(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the meta device as dynamo; on the CPU the code may also read values."""
    words = [*INPUTS, "--exporter", "torchscript"]
    assert main(["export", f"{script}:Net", *words, "-o", str(tmp_path / "m.onnx")]) == 0
    assert "Open sizes: batch (not 1), axis1" in capsys.readouterr().err
    assert main(["export", f"{script}:Net", *INPUTS, "-o", str(tmp_path / "m.pt2")]) == 0
    ours, other = (staticmem.analyze(tmp_path / f"m.{s}", batch=8, optimizer="adam") for s in ("onnx", "pt2"))
    assert ours.peak.live_bytes == other.peak.live_bytes
    assert ours.model.inputs[1].shape == (8, 16)
    assert main(["export", f"{script}:Asks", *words, "-o", str(tmp_path / "a.onnx")]) == 2
    assert "write the recording with -o model.pt2" in capsys.readouterr().err
    assert main(["export", f"{script}:Asks", *words, "--device", "cpu", "-o", str(tmp_path / "a.onnx")]) == 0
    assert "torch.export fails on it" in capsys.readouterr().err
