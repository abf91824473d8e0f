"""torch/csrc/autograd/engine.cpp over Python handles: highest sequence number first, `validate_outputs`, adding.

For fake CUDA tensors, which the real engine refuses without a GPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch


def run_nodes(starts: list[Any], sources: dict[int, Any], arrived: Callable[[str, Any], None]) -> None:
    """Runs the graph below `starts` (node, slot, gradient); gradients that reach a source are given to `arrived`."""
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
                made = (fn if callable(fn) else fn.apply)(*grads)
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
            arrived(label, grad)


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
