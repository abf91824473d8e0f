"""Code that asks what tensors hold is recorded as it runs on example inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.errors import ModelFileError
from staticmem.recording import contents, record

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
    monkeypatch.setattr(record, "MOST_WEIGHTS", 100)
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


class Summed(Cut):
    """Reads a number that grows with the batch."""

    def forward(self, x: Any, lengths: Any) -> Any:
        return self.layer(x[:, : self.length or int(lengths.sum())])


def test_what_is_read_of_a_batch_of_one_is_that_of_the_example() -> None:
    """It is recorded as 2, whose sum would be 10."""
    x = torch.zeros(1, 16, 64)
    peak, (told,) = peak_and_told(Summed(), x, torch.tensor([5]))
    assert "(Summed.forward) had 5." in told
    assert peak == peak_and_told(Summed(5), x, torch.tensor([0]))[0]


class Stepped(nn.Module):  # type: ignore[misc, name-defined]
    """Counts its calls in a buffer, and in what it is given; makes noise; branches in the third call, or says when."""

    def __init__(self, third: bool | None = None) -> None:
        super().__init__()
        self.layer, self.third = nn.Linear(64, 64), third
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any, steps: Any) -> Any:
        self.calls += 1
        steps += 1
        x = self.norm(x + torch.randn_like(x))
        third = bool(self.third)
        if self.third is None:
            third = bool(self.calls > 2)
            third = bool(steps.max() > 2) or third
        return self.layer(x).exp().sigmoid() if third else self.layer(x)


def test_a_recording_changes_nothing_of_the_user_and_each_mode_begins_anew() -> None:
    module, steps = Stepped(), torch.zeros(8, dtype=torch.int64)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    for words in ({}, {"amp": "bf16"}, {"dtype": "bf16"}):
        random = torch.get_rng_state()
        peak, (told,) = peak_and_told(module, torch.ones(8, 64), steps, **words)
        assert torch.equal(torch.get_rng_state(), random)
        assert peak == peak_and_told(Stepped(False), torch.ones(8, 64), steps, **words)[0]
        assert told.count("had False") == 2
    assert not steps.any()
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_a_step_that_a_buffer_counts_is_the_second() -> None:
    class Second(Stepped):
        def forward(self, x: Any, steps: Any) -> Any:
            self.calls += 1
            second = bool(self.calls > 1) if self.third is None else self.third
            return self.layer(x).exp().sigmoid() if second else self.layer(x)

    inputs = torch.zeros(4096, 64), torch.zeros(8)
    peak, (told,) = peak_and_told(Second(), *inputs)
    assert peak == peak_and_told(Second(True), *inputs)[0] > peak_and_told(Second(False), *inputs)[0]
    assert told.count("had False, then True") == 1


@pytest.fixture
def library() -> Any:
    with torch.library._scoped_library("contents", "DEF") as library:
        library.define("fill(Tensor(a!) x) -> ()")
        library.impl("fill", lambda x: None, "Meta")
        yield library


def test_what_an_unknown_op_writes_is_not_known(library: Any) -> None:
    """What was there before it would take the other branch."""

    class Filled(Masked):
        def forward(self, x: Any, mask: Any) -> Any:
            mask = mask.clone()
            if mask.sum() > 1000:
                x = x * 2
            torch.ops.contents.fill(mask[1:])
            return super().forward(x, mask)

    with pytest.raises(ModelFileError, match="data-dependent"):
        peak_and_told(Filled(), torch.randn(8, 16, 64), torch.ones(8, 16))
    library.impl("fill", lambda x: (x.zero_(), None)[1], "CPU")
    assert "had False" in peak_and_told(Filled(), torch.randn(8, 16, 64), torch.ones(8, 16))[1][0]


LIMITS = torch.tensor([3.0, 4.0])


class Limited(nn.Module):  # type: ignore[misc, name-defined]
    """Compares with constants: of its own, and of a file; asks in a loop."""

    def forward(self, x: Any) -> Any:
        for part in x.unbind(1):
            if part.max() > torch.tensor(3.0) and part.max() > LIMITS[1].to(x.device):
                x = x.exp()
        return x


def test_constants_of_the_code_and_all_answers_of_a_line() -> None:
    x = torch.zeros(8, 2, 64)
    assert "had False." in peak_and_told(Limited(), x, mode="infer", optimizer=None)[1][0]
    x[:, 1] = 5
    assert "had False, then True." in peak_and_told(Limited(), x, mode="infer", optimizer=None)[1][0]
    x[:, 1] = 3.5  # the first is true, the second is not
    assert "had False, then True." in peak_and_told(Limited(), x, mode="infer", optimizer=None)[1][0]
    assert LIMITS.tolist() == [3, 4]


def test_contents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(8, 64)
    peak_and_told(Clipped(), x)
    monkeypatch.setattr(contents, "MOST_HELD", 8 << 10)  # x has 2 KiB, the weights 16
    with pytest.raises(ModelFileError, match="data-dependent"):
        peak_and_told(Clipped(), x)


def test_a_version_of_pytorch_that_takes_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "can_follow", lambda: False)
    with pytest.raises(ModelFileError, match="data-dependent"):
        peak_and_told(Clipped(), torch.zeros(8, 64))


def test_inputs_at_other_sizes_hold_what_the_example_holds() -> None:
    """A module in memory is recorded again at sizes at which its code takes another way."""

    class Looped(Masked):
        def forward(self, x: Any, mask: Any) -> Any:
            return torch.stack([super(Looped, self).forward(part, mask) for part in x.unbind(1)])

    module, inputs = Looped(), (torch.randn(8, 2, 16, 64), torch.ones(8, 16))
    for words in ({}, {"dims": {"x[1]": 3}}):
        assert "had True." in peak_and_told(module, *inputs, **words)[1][0]


class Picked(nn.Module):  # type: ignore[misc, name-defined]
    """Takes the rows that a tensor names, or makes numbers of their places, which asks for nothing."""

    def __init__(self, takes: bool) -> None:
        super().__init__()
        self.layer, self.takes = nn.Linear(64, 256), takes

    def forward(self, x: Any, keep: Any) -> Any:
        rows = keep.nonzero()
        return self.layer(x[rows.squeeze(-1)]) if self.takes else rows * 2


def test_rows_that_the_data_picks_have_a_band() -> None:
    """Expected are all of them; at the least there are as many as in the example, or one where nobody knows."""
    x, keep = torch.zeros(512, 64), torch.arange(512) % 4 == 0
    for takes, rows, told in ((True, 128, "; the example has 128 of 512"), (False, 1, "")):
        report = staticmem.analyze(Picked(takes), (x, keep), mode="infer")
        (text,) = [note.text for note in report.assumptions if note.code == "SM326"]
        assert text.endswith(f"sets it){told}")
        assert "may need as little as" in str(report)
        least = staticmem.analyze(Picked(takes), (x, keep), mode="infer", dims={text.split()[0]: rows})
        assert "may need as little as" not in str(least)
        assert not [note for note in least.assumptions if note.code == "SM326"]
        band = report.peak.bands["live"]
        assert (band.low, band.high) == (least.peak.live_bytes, report.peak.live_bytes)
        assert band.high - band.low >= (512 - rows) * (256 * 4 if takes else 2 * 8)
