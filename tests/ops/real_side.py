"""What the CPU allocator and the real autograd engine do for a case, without a dispatch mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from observe import Case
from torch_side import group, make, op


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
        value = make(spec, "cpu")
        value.storage_offset()
        torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,)).fill_(1)
        storages.append(value.untyped_storage())
        flat.append(_Kept.apply(anchor, value, kept) if needs else value)
    del value
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = case.program(op, *group(case.inputs, flat))
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
    return steps_of(profile)


def _real_root(root: str, out: Any) -> Any:
    if root == "expanded":
        return torch.ones((), dtype=out.dtype).expand(out.shape)
    return torch.ones(out.shape, dtype=out.dtype) if root == "contiguous" else torch.ones_like(out)


def steps_of(profile: Any) -> dict[str, list[tuple[int, int]]]:
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
