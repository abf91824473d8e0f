"""Autograd that the code runs: in the backward of a custom function, as reversible networks do, and in a forward.

Autograd's own ops run below the recorder. So a call of `torch.autograd.backward` or `torch.autograd.grad` is one op,
and the analysis runs the backward through the nodes that it has. With `create_graph=True` the gradients have a
history; then the ops of the backward are seen and recorded.

Source: torch/autograd/__init__.py (`Tensor.backward` calls `torch.autograd.backward`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from staticmem.frontends import recording_format as written
from staticmem.recording import gpu

if TYPE_CHECKING:
    from staticmem.recording.watch import Watch


@contextmanager
def recorded_autograd(watch: Watch) -> Iterator[None]:
    """Within it calls of autograd are recorded."""
    backward, grad = torch.autograd.backward, torch.autograd.grad

    def recorded_backward(
        tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False, *more: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        def call() -> None:
            backward(tensors, grad_tensors, retain_graph, create_graph, *more, **options)

        if watch.paused:
            return call()
        roots = _listed(tensors)
        if create_graph or more or options.get("inputs") is not None:
            raise NotImplementedError("a backward that makes a graph, or of some inputs alone")
        leaves = [leaf for leaf in _leaves(roots) if leaf.device.type == gpu.DEVICE]
        before = {id(leaf): leaf.grad for leaf in leaves}
        given = _given(watch, roots, grad_tensors, leaves)
        _paused(watch, roots[0], call)
        own = [leaf for leaf in leaves if not _owned(watch, leaf)]
        if any(before[id(leaf)] is not None for leaf in own):
            raise NotImplementedError("a backward that adds to a gradient")
        for leaf in leaves:
            if _owned(watch, leaf):
                leaf.grad = before[id(leaf)]
        given[2] = [ref for leaf, ref in zip(leaves, given[2], strict=True) if not _owned(watch, leaf)]
        _write(watch, written.BACKWARD, [*given, bool(retain_graph)], [leaf.grad for leaf in own])
        return None

    def recorded_grad(
        outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
        *more: Any, **options: Any,
    ) -> Any:  # fmt: skip
        def call() -> Any:
            return grad(outputs, inputs, grad_outputs, retain_graph, create_graph, *more, **options)

        if watch.paused or (create_graph and not watch.in_backward):
            return call()
        roots, asked = _listed(outputs), _listed(inputs)
        if create_graph or more or options.get("is_grads_batched") or not all(t.is_leaf for t in asked):
            raise gpu.UnrecordedGradientError("it takes gradients of tensors that are no leaves, or of a batch")
        given = _given(watch, roots, grad_outputs, asked)
        results = _paused(watch, roots[0], call)
        _write(watch, written.GRAD, [*given, bool(retain_graph)], results)
        return results

    with (
        mock.patch.object(torch.autograd, "backward", recorded_backward),
        mock.patch.object(torch.autograd, "grad", recorded_grad),
    ):
        yield


def _given(watch: Watch, roots: Sequence[Any], gradients: Any, leaves: Sequence[Any]) -> list[Any]:
    """The arguments of the op."""
    listed = _listed(gradients) if gradients is not None else [None] * len(roots)
    if any(root.device.type != gpu.DEVICE for root in roots):
        raise NotImplementedError("autograd on the CPU")
    return [watch.arg(roots), watch.arg(listed), watch.arg(list(leaves))]


def _write(watch: Watch, target: str, given: list[Any], results: Sequence[Any]) -> None:
    outputs = [watch.name(t) if isinstance(t, torch.Tensor) else -1 for t in results]
    watch.write(target, given, {}, outputs, written.NO_GRAD)


def _paused(watch: Watch, root: Any, call: Any) -> Any:
    """Runs it unseen. What autograd asks of sizes is no condition of the code."""
    watch.paused = True
    try:
        with root.fake_mode.shape_env.suppress_guards():
            return call()
    finally:
        watch.paused = False


def _owned(watch: Watch, leaf: torch.Tensor) -> bool:
    """Whether its gradient lives in the step: a parameter, or an input."""
    return watch.known_value(leaf) in watch.owned_values


def _leaves(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves of the graph, each once."""
    leaves: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(variable, torch.Tensor):
            leaves.setdefault(id(variable), variable)
        stack += [edge for edge, _ in node.next_functions]
    return list(leaves.values())


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
