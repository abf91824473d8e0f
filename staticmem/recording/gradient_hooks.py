"""Hooks of gradients: `Tensor.register_hook`, `retain_grad()`, and backward hooks of modules.

A hook runs in the backward, which a recording has no ops of. So when the forward has returned, each hook runs once on a
gradient without data, the last one first, as a backward would come to them. What it computes, gives in place of the
gradient, and keeps is written down; the analysis runs it where the gradient arrives.

Sources: torch/utils/hooks.py (`BackwardHook`), torch/csrc/autograd/variable.cpp (`VariableHooks::retain_grad`: a
contiguous copy, while the tensor lives), torch/_tensor.py (`register_hook`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import BackwardHook

from staticmem.frontends import recording_format as written
from staticmem.recording import gpu

if TYPE_CHECKING:
    from staticmem.recording.watch import Program, Watch

Run = Callable[[tuple[Any, ...]], Any]  # the gradients -> those in their place, or None


@dataclass
class Hook:
    """A hook of tensors that one op made. `gradients` are examples; `closure` are values that its function holds."""

    name: str
    values: list[int]
    gradients: list[torch.Tensor]
    run: Run
    closure: list[int]
    is_there: Callable[[], bool]


@contextmanager
def watched_hooks(watch: Watch) -> Iterator[None]:
    """Within it hooks that the code registers are noted."""
    register, retain = torch.Tensor.register_hook, torch._C.TensorBase.retain_grad
    after_accumulation = torch.Tensor.register_post_accumulate_grad_hook
    apply = BackwardHook._apply_on_tensors

    def register_hook(self: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
        handle = register(self, hook)

        def is_there() -> bool:
            hooks = handle.hooks_dict_ref()
            return hooks is None or handle.id in hooks

        note(watch, [self], functools.partial(_run_tensor_hook, hook), hook, is_there)
        return handle

    def retain_grad(self: torch.Tensor) -> None:
        if not self.is_leaf and not self.retains_grad:
            tensor = weakref.ref(self)

            def retained_grad(grads: tuple[Any, ...]) -> None:
                of = tensor()
                if of is not None:
                    own = grads[0].clone(memory_format=torch.contiguous_format)
                    of.grad = own if _grad(of) is None else of.grad + own

            note(watch, [self], retained_grad, retained_grad)
        retain(self)

    def register_after_accumulation(self: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
        watch.not_recorded(written.HOOKS)
        return after_accumulation(self, hook)

    def apply_on_tensors(self: Any, function: Callable[[Any], None], args: Any) -> Any:
        node = _Node()
        results, index = apply(self, lambda _: function(node), args)
        tensors = [results[i] for i in index or ()]
        for hook in node.hooks:
            note(watch, tensors, functools.partial(_run_node_hook, hook), hook)
        return results, index

    patches: list[Any] = [
        mock.patch.object(torch.Tensor, "register_hook", register_hook),
        mock.patch.object(torch.Tensor, "retain_grad", retain_grad, create=True),
        mock.patch.object(torch.Tensor, "register_post_accumulate_grad_hook", register_after_accumulation),
        mock.patch.object(BackwardHook, "_apply_on_tensors", apply_on_tensors),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


class _Node:
    """Takes the hooks of a node: those of modules are of one that passes gradients on as they are."""

    def __init__(self) -> None:
        self.hooks: list[Callable[..., Any]] = []

    def register_hook(self, hook: Callable[..., Any]) -> None:
        self.hooks.append(hook)


def note_hooks_of_parameters(watch: Watch, hooked: Sequence[tuple[torch.Tensor, Any]]) -> None:
    """Notes the hooks that parameters had before the code ran, and hooks that no recording has."""
    for twin, own in hooked:
        for hook in (own._backward_hooks or {}).values():
            note(watch, [twin], functools.partial(_run_tensor_hook, hook), hook)
        if getattr(own, "_post_accumulate_grad_hooks", None):
            watch.not_recorded(written.HOOKS)
    if any(m._backward_hooks and m._is_full_backward_hook is False for m in watch.root.modules()):
        watch.not_recorded(written.HOOKS)


def note(
    watch: Watch, tensors: Sequence[torch.Tensor], run: Run, function: Any, is_there: Callable[[], bool] = lambda: True
) -> None:
    """Notes a hook of the gradients of tensors that one op made. `function` is what its tensors are looked for in."""
    if watch.paused or watch.in_backward or not all(t.device.type == gpu.DEVICE for t in tensors):
        return
    if any(end < 0 and reentrant for _, end, _, reentrant, *_ in watch.program.regions):
        watch.not_recorded(written.HOOKS)
        return
    values = [watch.value(t) for t in tensors]
    watch.paused = True
    with torch.no_grad():
        gradients = [torch.empty_like(t) for t in tensors]
    watch.paused = False
    closure = [watch.value(t) for t in _find_held_tensors(function) if t.device.type == gpu.DEVICE]
    name = getattr(function, "__qualname__", type(function).__qualname__)
    watch.hooks.append(Hook(name, values, gradients, run, list(dict.fromkeys(closure)), is_there))


def record_hooks(watch: Watch) -> None:
    """Runs the hooks that have been noted, and writes down what they do."""
    while watch.hooks:
        hook = watch.hooks.pop()
        if hook.is_there():
            _record(watch, hook)


def _record(watch: Watch, hook: Hook) -> None:
    outer = watch.program
    body: Program = type(outer)()
    first, grads = watch.values, tuple(hook.gradients)
    hook.gradients.clear()
    incoming = [watch.name(grad) for grad in grads]
    watch.program, within, watch.in_backward = body, watch.in_backward, True
    try:
        with torch.no_grad(), gpu.without_autocast():
            returned: Any = hook.run(grads)
        results = list(returned) if isinstance(returned, (list, tuple)) else []
        _check(grads, results)
        given = [watch.value(t) if isinstance(t, torch.Tensor) else -1 for t in results]
    except Exception:
        watch.program = outer
        watch.not_recorded(written.HOOKS)
        return
    finally:
        watch.in_backward = within
    del grads  # what the hook keeps of them lives on
    watch.program = type(body)()  # what it returns outlives it
    del returned, results
    watch.program = outer
    gradients = [-1 if new == old else new for new, old in zip(given or incoming, incoming, strict=True)]
    kept = [v for values in watch.by_storage.values() for v in watch.current(values) if v >= first]
    outer.functions.append(
        {
            "name": hook.name,
            "inputs": [],
            "results": hook.values,
            "saved": [],
            "attributes": hook.closure,
            "grads": incoming,
            "gradients": gradients,
            "backward": body,
            "kept": kept,
        }
    )
    refs = [f"{written.REF}{value}" for value in hook.values]
    watch.write(written.HOOK, [len(outer.functions) - 1, refs], {}, [], written.NO_GRAD)


def _check(gradients: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
    """As PyTorch does, which raises an error for a gradient of another dtype or shape."""
    for old, new in zip(gradients, results, strict=bool(results)):
        if isinstance(new, torch.Tensor) and (new.dtype is not old.dtype or str(new.shape) != str(old.shape)):
            raise TypeError(f"a hook has given {new.dtype} for a gradient in {old.dtype}")


def _run_tensor_hook(hook: Callable[[Any], Any], gradients: tuple[Any, ...]) -> Any:
    result = hook(gradients[0])
    return None if result is None else (result,)


def _run_node_hook(hook: Callable[..., Any], gradients: tuple[Any, ...]) -> Any:
    """One of a node that passes gradients on: it is given those of its inputs and those of its outputs."""
    return hook(gradients, gradients)


def _grad(tensor: torch.Tensor) -> Any:
    return torch._C.TensorBase.grad.__get__(tensor)


def _find_held_tensors(function: Any) -> list[torch.Tensor]:
    """Tensors that a function has beside its arguments."""
    held: list[Any] = []
    if isinstance(function, functools.partial):
        held += [function.args, function.keywords]
        function = function.func
    held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_set(cell)]
    held.append(getattr(function, "__defaults__", None))
    return [x for x in tree_leaves(held) if isinstance(x, torch.Tensor)]


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
