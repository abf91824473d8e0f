"""What PyTorch does for a case, on fake CUDA tensors: its dispatcher, its autograd nodes, no data and no GPU.

A CPU build has no device guard for CUDA, without which autograd refuses CUDA tensors; `enable_cuda` lends it the guard
of the meta device. The backward engine needs streams and stays out of reach: nodes are called one by one, in the
engine's order, with its accumulation and validation restated here (tests/eager compares those with the real engine).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import library_losses
import torch
from observe import Case, Observation, Spec, View
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_engine import run_nodes

from staticmem.eager.strides import MEMORY_FORMATS
from staticmem.ir.dtypes import DType

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META = 1, 14  # c10/core/DeviceType.h


def enable_cuda() -> bool:
    """Makes fake CUDA tensors differentiable in a build without CUDA; False where that does not work."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        registry = (ctypes.c_void_p * 20).in_dll(library, _REGISTRY)
    except (OSError, ValueError):
        return False
    if not registry[_CUDA]:
        registry[_CUDA] = registry[_META]
    return True


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Logs each new storage with the bytes alive after it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.labels: dict[int, str] = {}
        self.live = 0
        self.prefix = "new"
        self.steps: list[tuple[int, int]] = []
        self.ops: list[str] = []

    def label(self, tensor: Any) -> str:
        return self.labels[tensor.untyped_storage()._cdata]

    def name(self, tensor: Any, label: str) -> None:
        self.labels[tensor.untyped_storage()._cdata] = label

    def add(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.labels:
            return
        self.labels[key] = f"{self.prefix}{len(self.steps)}" if nbytes else "empty"
        weakref.finalize(storage, self._free, key, nbytes)
        if nbytes:
            self.live += nbytes
            self.steps.append((nbytes, self.live))
            self.ops.append(self.op)

    def _free(self, key: int, nbytes: int) -> None:
        self.labels.pop(key, None)
        self.live -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op = str(func)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                self.add(tensor)
        return out


class Source(torch.autograd.Function):  # type: ignore[misc]
    """The producer of an input that is not a leaf, in any layout."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, spec: Spec, device: str) -> Any:
        return make(spec, device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("sources are not run")


def torch_dtype(dtype: DType) -> Any:
    return getattr(torch, dtype.name)


def make(spec: Spec, device: str) -> Any:
    return torch.empty_strided(spec.shape, spec.layout, dtype=torch_dtype(spec.dtype), device=device)


def convert(value: Any, key: str = "") -> Any:
    if isinstance(value, DType):
        return torch_dtype(value)
    if isinstance(value, (tuple, list)):
        return [convert(v) for v in value]
    if key == "memory_format" or value in MEMORY_FORMATS:
        return getattr(torch, value)
    return value


def op(target: str, *args: Any, **kwargs: Any) -> Any:
    """Calls `aten::name` or `aten::name.overload`, or the function of a library that `staticmem::name` stands for.

    What takes no tensor is made on the GPU.
    """
    if target.startswith("staticmem::"):
        return getattr(library_losses, target.removeprefix("staticmem::"))(*args, **kwargs)
    name, _, overload = target.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, name)
    function = getattr(packet, overload) if overload else packet
    converted = [convert(a) for a in args]
    named = {k: convert(v, k) for k, v in kwargs.items()}
    if not any(isinstance(t, torch.Tensor) for t in tree_leaves([converted, named])):
        named["device"] = torch.device("cuda")
    return function(*converted, **named)


@contextlib.contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    """`torch.autocast("cuda", torch.bfloat16)` below its check that there is a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def run(case: Case, pattern: Sequence[bool], hooks: Any = None) -> Observation:
    """The observation of a case in which the inputs of `pattern` need gradients. `hooks`: a context of saved tensors;
    which those are is then not observed, because to ask for them unpacks them."""
    seen = Observation()
    log = Live(case.device)
    with FakeTensorMode():
        anchor = torch.empty((), device=case.device, requires_grad=True)
        flat = [
            Source.apply(anchor, spec, case.device) if needs else make(spec, case.device)
            for spec, needs in zip(case.flat, pattern, strict=True)
        ]
        sources = {id(t.grad_fn): (f"in{k}", t.grad_fn) for k, t in enumerate(flat) if t.grad_fn is not None}
        for k, tensor in enumerate(flat):
            log.name(tensor, f"in{k}")
        inputs = group(case.inputs, flat)
        storages = [t.untyped_storage() for t in flat]  # the caller keeps the inputs' memory, not their history
        flat.clear()
        with log:
            with _autocast(case.autocast), hooks or contextlib.nullcontext():
                result = case.program(op, *inputs)
            outputs = [result] if isinstance(result, torch.Tensor) else list(result or ())
            del result
            inputs.clear()
            seen.outputs = [_view(log, t) for t in outputs]
            seen.forward = list(log.steps)
            if hooks is None:
                seen.saved = sorted(_saved(log, outputs, sources, case.device))
            starts = _roots(case, log, outputs)
            seen.grads = {f"in{k}": None for k, needs in enumerate(pattern) if needs}
            outputs.clear()
            log.prefix, log.steps = "back", []
            run_nodes(starts, sources, lambda label, grad: seen.grads.update({label: _view(log, grad)}))
    seen.backward = log.steps
    del storages
    return seen


def group(inputs: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
    given = iter(flat)
    return [[next(given) for _ in spec] if isinstance(spec, tuple) else next(given) for spec in inputs]


def _view(log: Live, tensor: Any) -> View | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    return View.of(log.label(tensor), tensor.shape, tensor.stride(), str(tensor.dtype).removeprefix("torch."))


def _nodes(outputs: Sequence[Any], sources: dict[int, Any]) -> list[Any]:
    stack = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen: dict[int, Any] = {}
    while stack:
        node = stack.pop()
        if id(node) not in seen and id(node) not in sources:
            seen[id(node)] = node
            stack.extend(n for n, _ in node.next_functions if n is not None)
    return list(seen.values())


def _saved(log: Live, outputs: Sequence[Any], sources: dict[int, Any], device: str) -> set[str]:
    found = set()
    for node in _nodes(outputs, sources):
        for name in dir(node):
            if name.startswith("_saved_"):
                for tensor in tree_leaves(getattr(node, name)):
                    if isinstance(tensor, torch.Tensor) and tensor.device.type == device:
                        found.add(log.label(tensor))
    return found - {"empty"}


def _roots(case: Case, log: Live, outputs: Sequence[Any]) -> list[tuple[Any, int, Any]]:
    starts = []
    for k, out in enumerate(outputs):
        if not isinstance(out, torch.Tensor) or out.grad_fn is None or (case.roots is not None and k not in case.roots):
            continue
        if case.root == "expanded":
            grad = torch.empty((), dtype=out.dtype, device=case.device).expand(out.shape)
        elif case.root == "contiguous":
            grad = torch.empty(out.shape, dtype=out.dtype, device=case.device)
        else:
            grad = torch.empty_like(out.detach())
        log.live -= log.steps.pop()[0] if grad.numel() and grad.untyped_storage().nbytes() else 0
        log.name(grad, f"root{k}")
        starts.append((out.grad_fn, out.output_nr, grad))
    return starts
