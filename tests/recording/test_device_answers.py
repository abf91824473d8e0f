"""Code that asks where its tensors are is recorded with the answers of a GPU, and PyTorch itself with the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import real_steps  # noqa: E402
from recorded_programs import bases, graph_of, recorded  # noqa: E402

import staticmem  # noqa: E402
from staticmem.errors import ModelFileError  # noqa: E402
from staticmem.recording.record import record  # noqa: E402

pytestmark = pytest.mark.torch


class Asks(torch.nn.Module):  # type: ignore[misc]
    """Takes `exp` where the answer is that of a GPU, and `sin` elsewhere."""

    def __init__(self, ask: Callable[[Any], bool], longer: bool = False) -> None:
        super().__init__()
        self.ask, self.longer = ask, longer

    def forward(self, x: Any) -> Any:
        if self.longer:
            return torch.cat((x, x, x)) if self.ask(x) else x.sin()
        return x.exp() if self.ask(x) else x.sin()


QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "is_cuda": lambda x: bool(x.is_cuda) and not x.is_meta and not x.is_cpu,
    "device": lambda x: x.device.type == "cuda" and str(x.device) == "cuda:0" and x.device == x.exp().device,
    "get_device": lambda x: x.get_device() == torch.cuda.current_device() == 0,
    "cuda": lambda x: torch.cuda.is_available() and torch.cuda.device_count() == 1,
    "capability": lambda x: torch.cuda.get_device_capability(x.device) >= (8, 0),
}


@pytest.mark.parametrize("question", list(QUESTIONS))
def test_the_answers_are_those_of_a_gpu(question: str) -> None:
    module = Asks(QUESTIONS[question])
    for device in ("meta", "cpu"):
        assert bases(graph_of(recorded(module, torch.empty(2, 4, device=device))))[-1] == "exp"
    x = torch.empty(2)
    assert (x.is_cuda, x.device.type, x.get_device()) == (False, "cpu", -1)  # as it was


MAKERS: dict[str, Callable[[Any], Any]] = {
    "factory": lambda x: torch.ones(x.shape, device=x.device),
    "name": lambda x: torch.ones(x.shape, device="cuda"),
    "new": lambda x: x.new_ones(x.shape, device=x.device),
    "to": lambda x: torch.ones(x.shape).to(x.device),
    "cuda": lambda x: torch.ones(x.shape).cuda(),
    "pinned": lambda x: torch.ones(x.shape).pin_memory().to(x.device, non_blocking=True),
}


class Makes(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Any) -> Any:
        made = self.make(x)
        with torch.device(x.device), torch.cuda.device(x.device):
            torch.cuda.synchronize()
            return x * made + torch.zeros(x.shape)


@pytest.mark.parametrize("maker", list(MAKERS))
def test_what_the_code_puts_on_the_gpu_is_there(maker: str) -> None:
    """x, the factor, the product, zeros and the sum: five tensors of 4 KiB."""
    x = torch.empty(1024, device="meta")
    report = staticmem.analyze(Makes(MAKERS[maker]), (x,), mode="infer", outputs="dropped")
    assert report.peak.live_bytes == 5 * 4096


def test_what_only_a_running_gpu_knows_is_refused() -> None:
    module = Asks(lambda x: torch.cuda.mem_get_info()[0] > 1 << 30)
    with pytest.raises(ModelFileError, match="cannot be recorded") as error:
        record(module, (torch.empty(2, device="meta"),))
    assert error.value.code == "SM175"
    assert "only a running GPU knows (torch.cuda.mem_get_info)" in error.value.why


class Streams(torch.nn.Module):  # type: ignore[misc]
    """A product on another stream than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        if hidden.is_cuda:
            current, side = torch.cuda.current_stream(x.device), torch.cuda.Stream()
            done = torch.cuda.Event(enable_timing=True)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                hidden = self.doubled(hidden)
                done.record(side)
            current.wait_event(done)
            hidden.record_stream(current)
            side.synchronize()
        return self.last(hidden)

    def doubled(self, hidden: Any) -> Any:
        return hidden.exp() * 2


class WithoutStreams(Streams):
    def forward(self, x: Any) -> Any:
        return self.last(self.doubled(self.first(x)))


@pytest.mark.parametrize("optimizer", ["adam", None])
def test_streams_change_nothing(optimizer: str | None) -> None:
    asked: dict[str, Any] = {"optimizer": optimizer, "loss": "mean"} if optimizer else {"mode": "infer"}
    report = staticmem.analyze(Streams(), (torch.empty(512, 8),), outputs="dropped", **asked)
    assert report.peak.live_bytes == real_steps.peak(WithoutStreams, [(512, 8)], optimizer=optimizer)
    assert "SM336" not in [note.code for note in report.warnings]


class Table(torch.nn.Module):  # type: ignore[misc]
    """Has a table that is no buffer, and stays on the CPU when the module is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)
        self.table = torch.randn(4096, 64)

    def forward(self, x: Any) -> Any:
        return self.last(self.added(self.first(x)).exp())

    def added(self, hidden: Any) -> Any:
        return hidden + self.table.to(hidden.device, copy=True)[: hidden.shape[0]]


class MultipliesWhole(Table):
    def added(self, hidden: Any) -> Any:
        table = self.table.to(hidden.device, copy=True)
        return hidden * table[: hidden.shape[0]]


class KeepsTable(Table):
    def added(self, hidden: Any) -> Any:
        self.table = self.table.to(hidden.device, copy=True)
        return hidden * self.table[: hidden.shape[0]]


class MovesNumber(Table):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(2.0)

    def added(self, hidden: Any) -> Any:
        return hidden * self.factor.to(hidden.device, copy=True)


@pytest.mark.parametrize("cls", [Table, MultipliesWhole, KeepsTable, MovesNumber])
@pytest.mark.parametrize("optimizer", ["adam", None])
def test_a_plain_tensor_on_the_cpu_stays_there(cls: Any, optimizer: str | None) -> None:
    asked: dict[str, Any] = {"optimizer": optimizer, "loss": "mean"} if optimizer else {"mode": "infer"}
    report = staticmem.analyze(cls(), (torch.empty(512, 8),), outputs="dropped", **asked)
    assert report.peak.live_bytes == real_steps.peak(cls, [(512, 8)], optimizer=optimizer)


class UsesTable(Table):
    """Reads the table as it is: whoever runs it on a GPU has moved it there."""

    def added(self, hidden: Any) -> Any:
        return hidden + self.table[: hidden.shape[0]]


def test_a_plain_tensor_that_is_not_moved_is_on_the_gpu() -> None:
    report = staticmem.analyze(UsesTable(), (torch.empty(512, 8),), mode="infer", outputs="dropped")
    assert report.peak.live_bytes == real_steps.peak(UsesTable, [(512, 8)])


def _refused(*_: Any, **__: Any) -> Any:
    raise ModelFileError("Net cannot be recorded", "It reads data.", "", code="SM175")


@pytest.mark.parametrize("question", list(QUESTIONS))
def test_the_graph_of_an_export_has_the_way_of_a_gpu(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """x of 4 KiB, and three times as much of the way of a GPU; the other way would have two of 4 KiB."""
    monkeypatch.setattr("staticmem.recording.record.record", _refused)
    module = Asks(QUESTIONS[question], longer=True)
    for device in ("meta", "cpu"):
        report = staticmem.analyze(module, (torch.empty(1024, device=device),), mode="infer", outputs="dropped")
        assert report.peak.live_bytes == 4 * 4096
        assert "SM336" in [note.code for note in report.warnings]


@pytest.mark.parametrize("maker", list(MAKERS))
def test_the_graph_of_an_export_has_what_the_code_puts_on_the_gpu(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staticmem.recording.record.record", _refused)
    for device in ("meta", "cpu"):
        x = torch.empty(1024, device=device)
        report = staticmem.analyze(Makes(MAKERS[maker]), (x,), mode="infer", outputs="dropped")
        assert report.peak.live_bytes == 5 * 4096, device


def test_a_report_for_another_gpu_says_that_the_code_asked() -> None:
    x = torch.empty(2, 4, device="meta")
    for question, gpu, is_said in (
        ("capability", "t4", True),
        ("capability", "h100-sxm-80gb", False),
        ("cuda", "t4", False),
    ):
        report = staticmem.analyze(Asks(QUESTIONS[question]), (x,), mode="infer", gpu=gpu)
        texts = [note.text for note in report.warnings if note.code == "SM389"]
        assert bool(texts) is is_said, (question, gpu)
        assert all("get_device_capability" in text and "(7.5)" in text for text in texts)
