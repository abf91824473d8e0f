"""What PyTorch does for a case, on fake CUDA tensors: its dispatcher, its autograd nodes, no data and no GPU.

A CPU build has no device guard for CUDA, without which autograd refuses CUDA tensors; `enable_cuda` lends it the guard
of the meta device. The backward engine needs streams and stays out of reach: nodes are called one by one, in the
engine's order, with its accumulation and validation restated here (tests/eager compares those with the real engine).
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from observe import Case, Observation, Spec, View
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from staticmem.dtypes import DType

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
        return _make(spec, device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("sources are not run")


def torch_dtype(dtype: DType) -> Any:
    return getattr(torch, dtype.name)


def _make(spec: Spec, device: str) -> Any:
    return torch.empty_strided(spec.shape, spec.layout, dtype=torch_dtype(spec.dtype), device=device)


def _convert(value: Any, key: str = "") -> Any:
    if isinstance(value, DType):
        return torch_dtype(value)
    if isinstance(value, (tuple, list)):
        return [_convert(v) for v in value]
    if key == "memory_format":
        return getattr(torch, value)
    return value


def op(target: str, *args: Any, **kwargs: Any) -> Any:
    """Calls `aten::name` or `aten::name.overload`; what takes no tensor is made on the GPU."""
    name, _, overload = target.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, name)
    function = getattr(packet, overload) if overload else packet
    converted = [_convert(a) for a in args]
    named = {k: _convert(v, k) for k, v in kwargs.items()}
    if not any(isinstance(t, torch.Tensor) for t in tree_leaves([converted, named])):
        named["device"] = torch.device("cuda")
    return function(*converted, **named)


@contextlib.contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    """`torch.autocast("cuda", torch.bfloat16)` below its check that there is a GPU."""
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def run(case: Case, pattern: Sequence[bool]) -> Observation:
    """The observation of a case in which the inputs of `pattern` need gradients."""
    seen = Observation()
    log = Live(case.device)
    with FakeTensorMode():
        anchor = torch.empty((), device=case.device, requires_grad=True)
        flat = [
            Source.apply(anchor, spec, case.device) if needs else _make(spec, case.device)
            for spec, needs in zip(case.flat, pattern, strict=True)
        ]
        sources = {id(t.grad_fn): (f"in{k}", t.grad_fn) for k, t in enumerate(flat) if t.grad_fn is not None}
        for k, tensor in enumerate(flat):
            log.name(tensor, f"in{k}")
        inputs = _group(case.inputs, flat)
        storages = [t.untyped_storage() for t in flat]  # the caller keeps the inputs' memory, not their history
        flat.clear()
        with log:
            with _autocast(case.autocast):
                result = case.program(op, *inputs)
            outputs = [result] if isinstance(result, torch.Tensor) else list(result or ())
            del result
            inputs.clear()
            seen.outputs = [_view(log, t) for t in outputs]
            seen.forward = list(log.steps)
            seen.saved = sorted(_saved(log, outputs, sources, case.device))
            starts = _roots(case, log, outputs)
            seen.grads = {f"in{k}": None for k, needs in enumerate(pattern) if needs}
            outputs.clear()
            log.prefix, log.steps = "back", []
            _engine(log, starts, sources, seen)
    seen.backward = log.steps
    del storages
    return seen


def _group(inputs: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
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


def _engine(log: Live, starts: list[Any], sources: dict[int, Any], seen: Observation) -> None:
    """torch/csrc/autograd/engine.cpp over Python handles: highest sequence number first; `validate_outputs`; adding."""
    nodes: dict[int, Any] = {}
    waiting: dict[int, int] = {}
    stack = [fn for fn, _, _ in starts]
    for fn in stack:
        nodes.setdefault(id(fn), fn)
        waiting.setdefault(id(fn), 0)
    stack = list(nodes.values())
    while stack:
        fn = stack.pop()
        if id(fn) in sources:
            continue
        for child, _ in fn.next_functions:
            if child is not None:
                waiting[id(child)] = waiting.get(id(child), 0) + 1
                if id(child) not in nodes:
                    nodes[id(child)] = child
                    stack.append(child)
    buffers: dict[int, list[Any]] = {}
    roots = [grad for _, _, grad in starts]
    ready: list[tuple[int, int]] = []
    for fn, slot, grad in starts:
        _put(buffers, fn, slot, grad, roots)
    for fn in list(nodes.values()):
        if waiting[id(fn)] == 0:
            heapq.heappush(ready, (-_priority(fn), id(fn)))
    starts.clear()
    fn = child = grad = None
    while ready:
        _, key = heapq.heappop(ready)
        if key in sources:
            continue
        fn = nodes.pop(key)
        grads = buffers.pop(key, [])
        outs: list[Any] = [None] * len(fn.next_functions)
        if any(g is not None for g in grads):
            with torch.no_grad():
                made = fn(*grads)
            outs = list(made) if isinstance(made, tuple) else [made]
            del made
        edges = fn.next_functions
        _validate(outs, edges)
        del grads
        fn = None
        for k, (child, slot) in enumerate(edges):
            out, outs[k] = outs[k], None
            if child is None:
                continue
            if out is not None:
                _put(buffers, child, slot, out, [*roots, *outs])
            out = None
            waiting[id(child)] -= 1
            if waiting[id(child)] == 0:
                heapq.heappush(ready, (-_priority(child), id(child)))
        del edges
        child = None
    for key, (label, _) in sources.items():
        for grad in buffers.get(key, []):
            seen.grads[label] = _view(log, grad)


def _priority(fn: Any) -> int:
    return int(fn._sequence_nr())


def _validate(outs: list[Any], edges: Any) -> None:
    for k, (child, slot) in enumerate(edges):
        if child is None:
            outs[k] = None
        elif outs[k] is not None:
            meta = child._input_metadata[slot]
            with torch.no_grad():
                if tuple(outs[k].shape) != tuple(meta.shape):
                    outs[k] = outs[k].sum_to_size(tuple(meta.shape))
                if outs[k].dtype != meta.dtype:
                    outs[k] = outs[k].to(meta.dtype)


def _put(buffers: dict[int, list[Any]], fn: Any, slot: int, grad: Any, others: Sequence[Any]) -> None:
    buffer = buffers.setdefault(id(fn), [None] * len(fn._input_metadata))
    old = buffer[slot]
    if old is None:
        buffer[slot] = grad
        return
    shared = [t for b in buffers.values() for t in b if t is not None] + [t for t in others if t is not None]
    users = sum(t.untyped_storage()._cdata == old.untyped_storage()._cdata for t in shared)
    if users > 1 or not torch._prims_common.is_non_overlapping_and_dense_or_false(old):
        with torch.no_grad():
            buffer[slot] = old + grad


class _Kept(torch.autograd.Function):  # type: ignore[misc]
    """An input for the real engine: it keeps the gradient until the end."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, value: Any, kept: list[Any]) -> Any:
        ctx.kept = kept
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.kept.extend(grads)
        return None, None, None


SCALAR = 8  # bytes: on a CPU, Python numbers become tensors of the same device; on CUDA they stay on the CPU


def real(case: Case, pattern: Sequence[bool]) -> dict[str, list[tuple[int, int]]]:
    """The steps of forward and backward as the CPU allocator and the real engine have them, without a dispatch mode.

    Blocks of up to 8 bytes are left out.
    """
    kept: list[Any] = []
    anchor = torch.empty((), requires_grad=True)
    flat, storages = [], []  # the caller keeps the inputs' memory, but not their autograd history
    for spec, needs in zip(case.flat, pattern, strict=True):
        value = _make(spec, "cpu")
        value.storage_offset()
        torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,)).fill_(1)
        storages.append(value.untyped_storage())
        flat.append(_Kept.apply(anchor, value, kept) if needs else value)
    del value
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = case.program(op, *_group(case.inputs, flat))
        outputs = [result] if isinstance(result, torch.Tensor) else list(result or ())
        edges, roots = [], []
        with torch.profiler.record_function("roots"):
            for k, out in enumerate(outputs):
                if out.grad_fn is not None and (case.roots is None or k in case.roots):
                    edges.append(torch.autograd.graph.get_gradient_edge(out))
                    roots.append(_real_root(case.root, out.detach()))
        flat.clear()
        outputs.clear()
        del result, out
        with torch.profiler.record_function("backward"):
            if edges:
                torch.autograd.backward(edges, roots)
    return _steps(profile)


def _real_root(root: str, out: Any) -> Any:
    if root == "expanded":
        return torch.ones((), dtype=out.dtype).expand(out.shape)
    return torch.ones(out.shape, dtype=out.dtype) if root == "contiguous" else torch.ones_like(out)


def _steps(profile: Any) -> dict[str, list[tuple[int, int]]]:
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in ("roots", "backward")}
    live = 0
    steps: dict[str, list[tuple[int, int]]] = {"forward": [], "backward": []}
    for event in events:
        nbytes, at = event.nbytes() if event.name() == "[memory]" else 0, event.start_ns()
        if abs(nbytes) <= SCALAR or spans["roots"][0] <= at <= spans["roots"][1]:
            continue
        live += nbytes
        if nbytes > 0:
            steps["forward" if at < spans["backward"][0] else "backward"].append((nbytes, live))
    return steps
