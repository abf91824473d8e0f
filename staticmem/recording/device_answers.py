"""What code asks of devices, answered as on a machine with a GPU.

The tensors of a recording are on the meta device, which stands for the GPU (`recording.gpu`). Code that asks where a
tensor is, as `x.is_cuda` or `x.device`, is told that it is on `cuda:0`; PyTorch's own Python and this package are told
the truth, which they need to run at all. A CUDA device that the code then gives to an op becomes the meta device as the
op is called (`Watch.__torch_dispatch__`). Streams and events do nothing: what a step holds does not depend on them.

Under `torch.export` the device of the example inputs, as the CPU, stands for the GPU (`traced_on_gpu`).

What only a certain GPU could answer, such as how much memory is free, is refused: the code would do other things on
another GPU, or with another model beside it.

Sources: torch/_subclasses/fake_tensor.py (`FakeTensor.device`), torch/cuda/__init__.py and torch/cuda/memory.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from staticmem.recording import gpu

CUDA = torch.device("cuda", 0)
_INNER = ("torch", "staticmem")  # packages that are told the truth
_CUSTOM_CASTS = "torch.amp.autocast_mode"  # but for `custom_fwd(cast_inputs=...)`, which casts tensors on the GPU
_CAPABILITY = (9, 0)  # of the H100, for which a request without a GPU is answered
_NAME = "NVIDIA H100 80GB HBM3"
# asked of memory or of a certain GPU: no recording can know it
_UNKNOWN = (
    "mem_get_info", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "memory_stats", "memory_summary", "memory_snapshot", "get_device_properties", "utilization",
)  # fmt: skip
_NOTHING = (
    "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "ipc_collect", "_lazy_init", "set_stream",
)  # fmt: skip
_OF_PROFILERS = ("range_push", "range_pop", "mark")  # of torch.cuda.nvtx


class _Idle:
    """A stream or an event of CUDA in a recording, where nothing runs that could be waited for."""

    device = CUDA
    device_index = cuda_stream = stream_id = priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def do_nothing(self, *args: Any) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = do_nothing


class Event(_Idle):
    def elapsed_time(self, end_event: Any) -> float:
        raise NotImplementedError("it asks for what only a running GPU knows (torch.cuda.Event.elapsed_time)")


class Stream(_Idle):
    def record_event(self, event: Any = None) -> Any:
        return event or Event()


@contextmanager
def traced_on_gpu(args: Any) -> Iterator[None]:
    """Within it `torch.export` takes the way that the code of a module takes on a GPU. The device of the example inputs
    `args`, as the CPU, stands for the GPU."""
    device = next((t.device.type for t in tree_leaves(args) if isinstance(t, torch.Tensor)), "cpu")
    if device not in ("cpu", gpu.DEVICE):
        yield
        return
    with (
        as_on_gpu(device),
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        _InPlaceOfCuda(torch.device(device)),
    ):
        yield


class _InPlaceOfCuda(TorchFunctionMode):  # type: ignore[misc]
    """Gives another device in place of CUDA to what the code calls."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        if _is_cuda(named.get("device")):
            named["device"] = self.device
        if func is torch.Tensor.to or any(isinstance(arg, torch.device) for arg in args):
            args = tuple(self.device if _is_cuda(arg) else arg for arg in args)
        return func(*args, **named)


@contextmanager
def as_on_gpu(stands_for: str = gpu.DEVICE) -> Iterator[set[str]]:
    """Within it the code of a model gets the answers of a GPU of tensors on the device that stands for it. What it asks
    of the GPU's kind (`get_device_capability`) is in the set that this gives."""
    asked: set[str] = set()
    device: Any = FakeTensor.__dict__["device"]
    is_cuda, is_meta, index_of = (getattr(torch._C.TensorBase, n) for n in ("is_cuda", "is_meta", "get_device"))
    is_there = getattr(torch._C.TensorBase, f"is_{stands_for}")

    def device_of(self: torch.Tensor) -> torch.device:
        own: torch.device = device.__get__(self)
        return CUDA if own.type == stands_for and not _is_inner(sys._getframe(1)) else own

    def is_on_cuda(self: torch.Tensor) -> bool:
        return bool(is_cuda.__get__(self)) or (bool(is_there.__get__(self)) and not _is_inner(sys._getframe(1)))

    def is_on_meta(self: torch.Tensor) -> bool:
        return bool(is_meta.__get__(self)) and _is_inner(sys._getframe(1))

    def is_on_cpu(self: torch.Tensor) -> bool:
        is_cpu: Any = torch._C.TensorBase.is_cpu
        return bool(is_cpu.__get__(self)) and (stands_for != "cpu" or _is_inner(sys._getframe(1)))

    def index(self: torch.Tensor) -> int:
        return 0 if is_there.__get__(self) and not _is_inner(sys._getframe(1)) else int(index_of(self))

    answers = {
        "is_available": _answered(torch.cuda.is_available, True),
        "device_count": _answered(torch.cuda.device_count, 1),
        "current_device": _answered(torch.cuda.current_device, 0),
        "get_device_capability": _answered(torch.cuda.get_device_capability, _CAPABILITY, asked=asked),
        "get_device_name": _answered(torch.cuda.get_device_name, _NAME, asked=asked),
        "is_initialized": _answered(torch.cuda.is_initialized, True),
        **{name: _answered(getattr(torch.cuda, name), None) for name in _NOTHING},
        **{name: _refused(name) for name in _UNKNOWN},
        "is_current_stream_capturing": _answered(torch.cuda.is_current_stream_capturing, False),
        **dict.fromkeys(("current_stream", "default_stream"), Stream),
        **dict.fromkeys(("stream", "StreamContext"), nullcontext),
        **{cls.__name__: cls for cls in (Stream, Event)},
        # `with torch.cuda.device(x.device):`
        "_exchange_device": _answered(torch.cuda._exchange_device, 0, of_torch=True),
        "_maybe_exchange_device": _answered(torch.cuda._maybe_exchange_device, 0, of_torch=True),
    }
    patches: list[Any] = [
        mock.patch.object(FakeTensor, "device", property(device_of)),
        mock.patch.object(torch.Tensor, "is_cuda", property(is_on_cuda), create=True),
        mock.patch.object(torch.Tensor, "is_meta", property(is_on_meta), create=True),
        mock.patch.object(torch.Tensor, "is_cpu", property(is_on_cpu), create=True),
        mock.patch.object(torch.Tensor, "get_device", index, create=True),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: self.clone(), create=True),  # on the CPU
        mock.patch.object(torch.Tensor, "record_stream", create=True, return_value=None),
        *(mock.patch.object(torch.cuda, name, answer) for name, answer in answers.items()),
        *(mock.patch.object(torch.cuda.nvtx, name, return_value=0) for name in _OF_PROFILERS),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield asked


def _is_inner(frame: FrameType) -> bool:
    """Whether the Python that asks is PyTorch's or this package's."""
    name = str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] in _INNER and name != _CUSTOM_CASTS


def _answered(
    function: Callable[..., Any], answer: Any, of_torch: bool = False, asked: set[str] | None = None
) -> Callable[..., Any]:
    """The function with an answer for the code of a model, which is then among those `asked`; `of_torch`: for PyTorch's
    own, too."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        if of_torch or not _is_inner(sys._getframe(1)):
            if asked is not None:
                asked.add(function.__name__)
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
    if isinstance(arg, str):
        return arg.split(":")[0] == "cuda"
    return isinstance(arg, torch.device) and arg.type == "cuda"
