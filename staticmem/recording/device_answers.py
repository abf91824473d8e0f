"""What code asks of devices, answered as on a machine with a GPU.

The tensors of a recording are on the meta device, which stands for the GPU (`recording.gpu`). Code that asks where a
tensor is, as `x.is_cuda` or `x.device`, is told that it is on `cuda:0`; PyTorch's own Python and this package are told
the truth, which they need to run at all. A CUDA device that the code then gives to an op becomes the meta device as the
op is called (`Watch.__torch_dispatch__`).

What only a certain GPU could answer, such as how much memory is free, is refused: the code would do other things on
another GPU, or with another model beside it.

Sources: torch/_subclasses/fake_tensor.py (`FakeTensor.device`), torch/cuda/__init__.py and torch/cuda/memory.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from staticmem.recording import gpu

CUDA = torch.device("cuda", 0)
_INNER = ("torch", "staticmem")  # packages that are told the truth
_CAPABILITY = (9, 0)  # of the H100, for which a request without a GPU is answered
_NAME = "NVIDIA H100 80GB HBM3"
# asked of memory or of a certain GPU: no recording can know it
_UNKNOWN = (
    "mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_stats", "memory_summary", "memory_snapshot", "get_device_properties", "utilization",
)  # fmt: skip
_NOTHING = ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "ipc_collect", "_lazy_init")


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within it the code of a model gets the answers of a GPU."""
    device: Any = FakeTensor.__dict__["device"]
    is_cuda, is_meta, index_of = (getattr(torch._C.TensorBase, n) for n in ("is_cuda", "is_meta", "get_device"))

    def device_of(self: torch.Tensor) -> torch.device:
        own: torch.device = device.__get__(self)
        return CUDA if own.type == gpu.DEVICE and not _is_inner(sys._getframe(1)) else own

    def is_on_cuda(self: torch.Tensor) -> bool:
        return bool(is_cuda.__get__(self)) or (bool(is_meta.__get__(self)) and not _is_inner(sys._getframe(1)))

    def is_on_meta(self: torch.Tensor) -> bool:
        return bool(is_meta.__get__(self)) and _is_inner(sys._getframe(1))

    def index(self: torch.Tensor) -> int:
        return 0 if is_meta.__get__(self) and not _is_inner(sys._getframe(1)) else int(index_of(self))

    answers = {
        "is_available": _answered(torch.cuda.is_available, True),
        "device_count": _answered(torch.cuda.device_count, 1),
        "current_device": _answered(torch.cuda.current_device, 0),
        "get_device_capability": _answered(torch.cuda.get_device_capability, _CAPABILITY),
        "get_device_name": _answered(torch.cuda.get_device_name, _NAME),
        "is_initialized": _answered(torch.cuda.is_initialized, True),
        **{name: _answered(getattr(torch.cuda, name), None) for name in _NOTHING},
        **{name: _refused(name) for name in _UNKNOWN},
        # `with torch.cuda.device(x.device):`
        "_exchange_device": _answered(torch.cuda._exchange_device, 0, of_torch=True),
        "_maybe_exchange_device": _answered(torch.cuda._maybe_exchange_device, 0, of_torch=True),
    }
    patches: list[Any] = [
        mock.patch.object(FakeTensor, "device", property(device_of)),
        mock.patch.object(torch.Tensor, "is_cuda", property(is_on_cuda), create=True),
        mock.patch.object(torch.Tensor, "is_meta", property(is_on_meta), create=True),
        mock.patch.object(torch.Tensor, "get_device", index, create=True),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: self.clone(), create=True),  # on the CPU
        *(mock.patch.object(torch.cuda, name, answer) for name, answer in answers.items()),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _is_inner(frame: FrameType) -> bool:
    """Whether the Python that asks is PyTorch's or this package's."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _INNER


def _answered(function: Callable[..., Any], answer: Any, of_torch: bool = False) -> Callable[..., Any]:
    """The function with an answer for the code of a model; `of_torch`: for PyTorch's own, too."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        if of_torch or not _is_inner(sys._getframe(1)):
            return answer
        return function(*args, **kwargs)

    return ask


def _refused(name: str) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"it asks for what only a running GPU knows (torch.cuda.{name})")

    return ask


def on_meta(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an op, whose CUDA device is the meta device."""
    if _is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": torch.device(gpu.DEVICE)}
    if any(isinstance(arg, torch.device) for arg in args):
        args = tuple(torch.device(gpu.DEVICE) if _is_cuda(arg) else arg for arg in args)
    return args, kwargs


def _is_cuda(arg: Any) -> bool:
    return isinstance(arg, torch.device) and arg.type == CUDA.type
