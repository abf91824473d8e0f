"""Custom `torch.autograd.Function`s: what their `ctx` keeps, and the ops of their backward.

The ops of `forward` run without a history and are recorded as such. The call itself is an op of its own,
`staticmem::function`, which gives its results the history: a node that saves what `ctx.save_for_backward` was given and
runs the recorded `backward`.

An op of `torch.library` with `register_autograd` is such a function too, which PyTorch makes and calls while the op
runs: there the op is written down first, and the call when it has returned (`Watch.after_op`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from staticmem.frontends import recording_format as written
from staticmem.recording import gpu

if TYPE_CHECKING:
    from staticmem.recording.watch import Program, Watch

OF_LIBRARY = "torch._library.autograd"  # the module of the functions that PyTorch makes for `register_autograd`


def recorded(watch: Watch, apply: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `apply` of a class and writes down the call, where its results have a history."""
    saved: list[tuple[list[Any], torch.Tensor]] = []  # what stands for a tensor, which lives until the node has it

    def pack(tensor: torch.Tensor) -> Any:
        saved.append((watch.pack(tensor), tensor))
        return saved[-1][0]

    pack.of_recorder = True  # type: ignore[attr-defined]  # `recording.patched` tells it from hooks of the code
    inputs = [watch.value(a) if _is_on_gpu(a) else -1 for a in args]
    with saved_tensors_hooks(pack, watch.unpack), _noted_settings() as unmaterialized:
        result = apply(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    ctx = next((t.grad_fn for t in results if _is_on_gpu(t) and isinstance(t.grad_fn, BackwardCFunction)), None)
    if ctx is None or watch.paused:
        return result
    if cls.__module__ == OF_LIBRARY:
        watch.after_op = partial(_write, watch, cls, ctx, inputs, results, saved, ctx not in unmaterialized)
    else:
        _write(watch, cls, ctx, inputs, results, saved, ctx not in unmaterialized)
    return result


@contextmanager
def _noted_settings() -> Iterator[list[Any]]:
    """The contexts of which `set_materialize_grads(False)` is called within it; PyTorch has no way to ask them."""
    unmaterialized: list[Any] = []
    original = FunctionCtx.set_materialize_grads

    def set_materialize_grads(self: Any, value: bool) -> None:
        if not value:
            unmaterialized.append(self)
        original(self, value)

    with mock.patch.object(FunctionCtx, "set_materialize_grads", set_materialize_grads):
        yield unmaterialized


def _write(
    watch: Watch, cls: Any, ctx: Any, inputs: list[int], results: Any, saved: list[tuple[list[Any], torch.Tensor]],
    materializes: bool,
) -> None:  # fmt: skip
    """Writes down a call that has returned."""
    for packed, tensor in saved:
        if packed[0] is None:  # a result of the op that has just been written
            packed[0] = watch.value(tensor)
    numbers = [watch.value(t) if _is_on_gpu(t) else -1 for t in results]
    kept = tree_leaves(list(vars(ctx).values()))  # a tuple of tensors too: `ctx.tensors = (A, B)` of bitsandbytes
    attributes = list(dict.fromkeys(watch.value(t) for t in kept if _is_on_gpu(t)))
    outer = watch.program
    body = type(outer)()
    grads, gradients = _backward(watch, body, cls, ctx, results)
    watch.program = outer
    outer.functions.append(
        {
            "name": f"{cls.__module__}.{cls.__qualname__}",
            "inputs": inputs,
            "results": numbers,
            "saved": [packed[0] for packed, _ in saved],
            "attributes": attributes,
            "grads": grads,
            "gradients": gradients,
            "backward": body if gradients is not None else None,
            "materializes": materializes,
        }
    )
    refs = [f"{written.REF}{v}" for v in (*inputs, *numbers) if v >= 0]
    named = [watch.name(t) if _is_on_gpu(t) else -1 for t in results]
    watch.write(written.FUNCTION, [len(outer.functions) - 1, refs], {}, named, 0)
    saved.clear()


def _backward(watch: Watch, body: Program, cls: Any, ctx: Any, results: Any) -> tuple[list[int], list[int] | None]:
    """Runs the backward of a call into `body`; the values of its incoming gradients and of those that it returns.

    None where it cannot run without data, or runs autograd in a way that `inner_autograd` does not record.
    """
    watch.paused = True
    with torch.no_grad():
        grads = [torch.empty_like(t) if _is_on_gpu(t) else None for t in results]
    watch.paused = False
    values = [-1 if g is None else watch.name(g) for g in grads]
    watch.program, within, watch.in_backward = body, watch.in_backward, True
    try:
        with torch.no_grad(), gpu.without_autocast():  # `loss.backward()` is called outside of it
            returned = cls.backward(ctx, *grads)
    except Exception:
        return values, None
    finally:
        watch.in_backward = within
    gradients = returned if isinstance(returned, (tuple, list)) else (returned,)
    watch.program = type(body)()  # what it returns outlives it
    return values, [watch.value(g) if _is_on_gpu(g) else -1 for g in gradients]


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == gpu.DEVICE
