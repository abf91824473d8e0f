"""Ops without a trace of their own: one extern call in the forward and one in the backward.

Inductor leaves many ops to their eager kernels (`fallback_handler` of torch/_inductor/lowering.py). Others it would
decompose, so that this says too much of them: they cannot be fused, nor computed again in the backward. What the calls
make and save is what the op's rule in `ops` says of eager code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from staticmem.eager.autograd import run_backward
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import Form
from staticmem.eager.tensor import Node as Recorded
from staticmem.eager.tensor import Owner, Storage, Tensor
from staticmem.ir import dtypes
from staticmem.ops.registry import Rule, kinds_of
from staticmem.ops.tags import LEFT_TO_ATEN
from staticmem.tracing.nodes import GETITEM, Node
from staticmem.tracing.tracer import Gradients, Tracer, form

# What `torch.compile` does not compile: the graph breaks in front of the op (torch/_dynamo/variables/nn_module.py and
# torch/_dynamo/config.py, `capture_dynamic_output_shape_ops` and `allow_rnn`)
_BREAKS = {
    "recurrent": "torch.compile leaves recurrent layers to eager code",
    "data_sized": "the size of its result is in the data, where torch.compile breaks the graph",
}


def call(t: Tracer, rule: Rule, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Node]:
    """The op as one extern call.

    Raises:
        ValueError: `torch.compile` leaves it to eager code.
    """
    base = target.split(".", 1)[0]
    for kind, reason in _BREAKS.items():
        if kind in kinds_of(base):
            raise ValueError(reason)
    run = _Run(t, rule, args, kwargs)
    given_back = {id(tensor): node for node, tensor in run.inputs.items()}
    if run.results and all(id(tensor) in given_back for tensor in run.results):  # `x.to(x.dtype)` is x
        return [given_back[id(tensor)] for tensor in run.results]
    if base not in LEFT_TO_ATEN:
        t.fallbacks[base] = t.fallbacks.get(base, 0) + 1
    results = run.results
    if not results:
        return []
    extra = [] if not run.differentiable else run.extra()
    given = tuple([_plain(arg) for arg in args])
    more = {name: _plain(value) for name, value in kwargs.items()}
    forms = [tensor.form for tensor in results] + [form((storage.nbytes,), dtypes.uint8) for storage in extra]
    nodes = _call(t, target, given, forms, more)
    outputs = nodes[: len(results)]
    if run.differentiable:
        run.record(f"{base}_backward", outputs, nodes[len(results) :])
    return outputs


def _call(t: Tracer, name: str, args: tuple[Any, ...], forms: Sequence[Form], kwargs: Mapping[str, Any]) -> list[Node]:
    """One node for each result; several come out of a tuple."""
    if len(forms) == 1:
        return [t.node(name, args, forms[0], kwargs)]
    call = t.node(name, args, tuple(forms), kwargs)
    return [t.node(GETITEM, (call, k), form) for k, form in enumerate(forms)]


def _plain(value: Any) -> Any:
    return tuple([_plain(v) for v in value]) if isinstance(value, (tuple, list)) else value


class _Run:
    """The rule of an op, run on tensors like its operands."""

    def __init__(self, t: Tracer, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.t = t
        self.inputs: dict[Node, Tensor] = {}
        self.e = e = Eager(training=t.training)
        e.grad_enabled = t.grad_enabled
        e.trace.begin("forward")
        given = [self._tensor(arg) for arg in args]
        named = {name: self._tensor(value) for name, value in kwargs.items()}
        e.open_scope()
        result = rule.function(e, *given, **named)
        listed = [result] if isinstance(result, Tensor) else list(result or ())
        self.results = [tensor for tensor in listed if isinstance(tensor, Tensor)]
        owner = Owner(Reason.OUTSIDE, "")
        for tensor in self.results:
            e.hold(tensor, owner)
        e.close_scope()
        self.differentiable = any(tensor.grad_fn is not None for tensor in self.results)

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple([self._tensor(v) for v in value])
        if not isinstance(value, Node):
            return value
        if value not in self.inputs:
            tensor = self.e.empty(value.shape, value.dtype, value.strides)
            tensor.requires_grad = self.t.grad_enabled and self.t.needs_grad(value)
            self.e.hold(tensor, Owner(Reason.OUTSIDE, ""))
            self.inputs[value] = tensor
        return self.inputs[value]

    def saved(self) -> list[Storage]:
        """Storages that the backward holds, in the order in which autograd finds them."""
        storages: dict[int, Storage] = {}
        seen: set[int] = set()
        stack: list[Recorded] = [tensor.grad_fn for tensor in self.results if tensor.grad_fn is not None]
        while stack:
            node = stack.pop()
            if id(node) not in seen:
                seen.add(id(node))
                storages.update({storage.id: storage for storage in node.saved if storage.nbytes})
                stack += [edge[0] for edge in node.edges if edge is not None]
        return list(storages.values())

    def extra(self) -> list[Storage]:
        """What is saved and is neither an operand nor a result: the forward call gives it as bytes."""
        own = {tensor.storage.id for tensor in (*self.inputs.values(), *self.results)}
        return [storage for storage in self.saved() if storage.id not in own]

    def record(self, name: str, outputs: Sequence[Node], extra: Sequence[Node]) -> None:
        t, e = self.t, self.e
        of_storage = {tensor.storage.id: node for node, tensor in self.inputs.items()}
        for tensor, node in zip(self.results, outputs, strict=True):
            of_storage.setdefault(tensor.storage.id, node)
        of_storage.update(zip([storage.id for storage in self.extra()], extra, strict=True))
        saved = tuple([of_storage[storage.id] for storage in self.saved()])
        leaves = [(node, tensor) for node, tensor in self.inputs.items() if tensor.requires_grad]
        recorded = [(n, r) for n, r in zip(outputs, self.results, strict=True) if r.grad_fn is not None]

        def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
            e.trace.begin("backward")
            e.grad_enabled = False
            given = [(root, grad) for (_, root), grad in zip(recorded, grads, strict=True) if grad is not None]
            roots = [e.empty(grad.shape, grad.dtype, grad.strides) for _, grad in given]
            for root in roots:
                e.hold(root, Owner(Reason.OUTSIDE, ""))
            gradients: dict[int, Tensor] = {}
            run_backward(e, [root for root, _ in given], roots, gradients)
            forms = [gradients[id(tensor)].form if id(tensor) in gradients else None for _, tensor in leaves]
            nodes = iter(_call(t, name, (*[g for _, g in given], *saved), [f for f in forms if f is not None], {}))
            return [None if f is None else next(nodes) for f in forms]

        t.record([node for node, _ in recorded], [node for node, _ in leaves], gradient)
