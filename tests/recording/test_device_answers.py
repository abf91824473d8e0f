"""Code that asks where its tensors are is recorded with the answers of a GPU, and PyTorch itself with the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from recorded_programs import bases, graph_of, recorded  # noqa: E402

import staticmem  # noqa: E402
from staticmem.errors import ModelFileError  # noqa: E402
from staticmem.recording.record import record  # noqa: E402

pytestmark = pytest.mark.torch


class Asks(torch.nn.Module):  # type: ignore[misc]
    """Takes `exp` where the answer is that of a GPU, and `sin` elsewhere."""

    def __init__(self, ask: Callable[[Any], bool]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Any) -> Any:
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
