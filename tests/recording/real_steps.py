"""What a step holds when PyTorch runs it: storages of fake CPU tensors, counted from outside.

Python, the dispatcher, autograd and the optimizer are the real ones; no data exists. The device is the CPU, so models
that are compared keep to ops whose autograd is the same on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRANULE = 512  # bytes: what the caching allocator rounds to

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, foreach=True),
}


class Meter(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that are alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0
        self.backward = self.stepping = False
        self.summed: int | None = None  # the storage that autograd would have added a gradient into

    def see(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or (self.stepping and not tensor.dim()):
            return  # counters of steps are on the CPU in reality too
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = -(-storage.nbytes() // GRANULE) * GRANULE
            self.now += self.alive[key]
            weakref.finalize(storage, self.gone, key)

    def gone(self, key: int) -> None:
        self.now -= self.alive.pop(key)

    def settle(self) -> None:
        """Autograd adds a second gradient in place; under a dispatch mode, out of place. That sum does not count while
        the gradient that it replaces is still there, unless something else holds this one."""
        if self.summed is None or self.summed in self.alive:
            self.peak = max(self.peak, self.now)
        self.summed = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self.see(tensor)
        sums = func is torch.ops.aten.add.Tensor and isinstance(args[1], torch.Tensor)
        if self.backward and sums and args[0].shape == args[1].shape and not args[0]._is_view():
            self.summed = args[0].untyped_storage()._cdata
        else:
            self.peak = max(self.peak, self.now)
        return result


def peak(
    build: Callable[[], Any],
    shapes: Sequence[Sequence[int]],
    *,
    optimizer: str | None = None,
    loss: Callable[[Any], Any] = torch.mean,
    outputs: str = "dropped",
    dtype: torch.dtype = torch.float32,
    calls: int = 2,
) -> int:
    """The peak of the second step of training with an optimizer, of two forwards without: what the module keeps from
    the first is there in the second, and its result where the loop holds the `outputs`. `dtype` is that of inputs;
    `calls`: another step than the second, and so many forwards."""
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build().train(optimizer is not None)
        inputs = [torch.empty(list(shape), dtype=dtype) for shape in shapes]
        for tensor in (*model.parameters(), *model.buffers(), *inputs):
            meter.see(tensor)
        if optimizer is None:
            with meter, torch.no_grad():
                for _ in range(calls):
                    result = model(*inputs)
                    if outputs == "dropped":
                        del result
        else:
            _train(meter, model, inputs, optimizer, loss, outputs == "held", calls)
        meter.settle()
    return meter.peak


def _train(
    meter: Meter, model: Any, inputs: Sequence[Any], optimizer: str, loss: Callable[[Any], Any], held: bool, calls: int
) -> None:
    with meter:
        steps = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
        for _ in range(calls):
            meter.peak = meter.now
            steps.zero_grad()
            if held:
                outputs = model(*inputs)
                value = loss(outputs)
            else:
                value = loss(model(*inputs))
            meter.backward = True
            value.backward()
            meter.backward = False
            meter.stepping = True
            steps.step()
            meter.stepping = False
