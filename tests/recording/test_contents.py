"""Code that asks what tensors hold is recorded as it runs on example inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.errors import ModelFileError
from staticmem.recording import contents

torch = pytest.importorskip("torch")
nn = torch.nn
WORDS: dict[str, Any] = {"optimizer": "sgd", "mode": "train"}


class Masked(nn.Module):  # type: ignore[misc, name-defined]
    """As models of transformers 4: a mask without padding is none."""

    def __init__(self, drops: bool | None = None) -> None:
        super().__init__()
        self.first, self.last, self.drops = nn.Linear(64, 256), nn.Linear(256, 64), drops

    def forward(self, x: Any, mask: Any) -> Any:
        drops = bool(torch.all(mask == 1)) if self.drops is None else self.drops
        hidden = self.first(x)
        if not drops:
            hidden = (hidden * mask[..., None]).exp()
        return self.last(hidden)


class Clipped(nn.Module):  # type: ignore[misc, name-defined]
    """Asks for what follows from weights, and scales by a number out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        x = self.layer(x)
        if x.abs().max() > 1000:
            x = x.sigmoid().exp()
        if torch.equal(x, x + 1):
            x = x.tanh()
        return x / x.norm().item()


class Cut(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.layer, self.length = nn.Linear(64, 64), length

    def forward(self, x: Any, lengths: Any) -> Any:
        return self.layer(x[:, : self.length or int(lengths.max())])


def peak_and_told(module: Any, *inputs: Any, **words: Any) -> tuple[int, list[str]]:
    report = staticmem.analyze(module, inputs, **{**WORDS, **words})
    return report.peak.live_bytes, [note.text for note in report.warnings if note.code == "SM387"]


@pytest.mark.parametrize("drops", [True, False])
def test_a_branch_goes_as_the_inputs_decide(drops: bool) -> None:
    x, mask = torch.randn(8, 16, 64), torch.ones(8, 16)
    mask[0, 9:] = float(drops)
    for words in ({}, {"mode": "infer", "optimizer": None}, {"amp": "bf16"}, {"batch": 32}):
        expected, silent = peak_and_told(Masked(drops), x, mask, **words)
        peak, (told,) = peak_and_told(Masked(), x, mask, **words)
        assert (peak, silent) == (expected, [])
        assert "test_contents.py:" in told
        assert f"(Masked.forward) had {drops}." in told
    assert peak_and_told(Masked(True), x, mask) != peak_and_told(Masked(False), x, mask)


def test_inputs_without_bytes_are_zeros() -> None:
    with torch.device("meta"):
        module, inputs = Masked(), (torch.zeros(8, 16, 64), torch.zeros(8, 16, dtype=torch.int64))
    assert "had False" in peak_and_told(module, *inputs)[1][0]


def test_what_follows_from_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(8, 64)
    _, (told,) = peak_and_told(Clipped(), x)
    assert told.count("had False") == 2
    with torch.device("meta"):
        module = Clipped()
    assert peak_and_told(module, x.to("meta"))[1] == [told]
    monkeypatch.setattr(contents, "MOST_WEIGHTS", 100)
    with pytest.raises(ModelFileError, match="data-dependent"):
        peak_and_told(Clipped(), x)


def test_an_integer_out_of_a_tensor() -> None:
    x = torch.zeros(8, 16, 64)
    peak, (told,) = peak_and_told(Cut(), x, torch.tensor([5, 9, 3, 1, 1, 1, 1, 1]))
    assert peak == peak_and_told(Cut(9), x, torch.zeros(8, dtype=torch.int64))[0]
    assert "(Cut.forward) had 9." in told


def test_an_export_says_the_branches(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from staticmem.recording.export import ExportRequest, exported

    x, mask = torch.randn(8, 16, 64), torch.ones(8, 16)
    data, lines = exported(ExportRequest(Masked(), (x, mask), ".pt2"))
    (line,) = [line for line in lines if line.startswith("Followed as it ran on the example inputs: ")]
    assert line.endswith("had True")
    (tmp_path / "net.pt2").write_bytes(data)
    report = staticmem.analyze(tmp_path / "net.pt2", batch=32, **WORDS)
    assert report.peak.live_bytes == peak_and_told(Masked(True), x, mask, batch=32)[0]
    assert [note.code for note in report.warnings if note.code == "SM387"] == ["SM387"]
