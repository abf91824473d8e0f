"""Calls of custom `torch.autograd.Function`s, of which a recording has the forward and the backward.

The forward's ops have run without a history when the call comes. It gives the results a node that saves what
`ctx.save_for_backward` was given; the backward runs the recorded ops. Attributes of `ctx` live as long as the graph of
autograd: the loss holds it until the next step assigns another loss.

Source: torch/csrc/autograd/python_function.cpp (`PyNode::apply`, `process_outputs`), torch/autograd/function.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from staticmem.eager.autograd import inner_backward
from staticmem.eager.evaluate import apply
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Formula, Grads, Owner, TakingNode, Tensor, attributes_of_ctx
from staticmem.errors import ModelFileError
from staticmem.frontends import fields
from staticmem.frontends import recording_format as written
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import FUNCTION, GRAD, REQUIRES_GRAD, REQUIRES_NO_GRAD, RUN_AUTOGRAD, CustomFunction, Graph, Ref
from staticmem.ops import lookup
from staticmem.ops.dispatch import call, fallback

if TYPE_CHECKING:
    from staticmem.eager.context import Eager

COMPILED_HOOKS = "compiled hooks"


def with_history(e: Eager, function: CustomFunction, env: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The results of a call with their history, and the tensors that live as long as it.

    Raises:
        ModelFileError: the backward of the function could not be recorded.
    """
    results = [env[name] for name in function.results if name]
    named = [Tensor(t.storage, t.shape, t.strides, t.dtype) for t in results]
    inputs = [env[name] for name in function.inputs if name]
    if not e.needs_grad(*inputs):
        return named, []
    if function.backward is None:
        raise _not_recorded(function.name)
    saved = [env[name] for name in dict.fromkeys(function.saved) if name]
    name = f"{function.name} backward"
    node = _FunctionNode(name, e.sequence, e.trace.op)
    e.sequence += 1
    e.record(name, named, inputs, [_formula(e, function, inputs, named, env)], saved, node)
    return named, [env[name] for name in function.attributes]


class _FunctionNode(TakingNode):
    """What comes to it ends with its Python, before its results are summed or cast (seen with 2.13)."""

    __slots__ = ()

    def run(self, e: Eager, waiting: Owner, slots: Grads, retain_graph: bool) -> list[Tensor | None]:
        e.open_scope()
        outputs = apply(e, self, slots)
        e.leave_all_to_scope(waiting)
        e.close_scope(keep=[output for output in outputs if output is not None])
        return outputs


def _not_recorded(name: str) -> ModelFileError:
    return _no_training(
        f"{name[:80]} has a backward that was not recorded",
        "It needs data, or runs autograd with create_graph=True or for tensors that are no leaves.",
        "A file of torch.export.export or torch.onnx.export without a recording has a peak with a band.",
    )


def _without_gradient(name: str) -> ModelFileError:
    return _no_training(
        f"a result of {name[:80]} gets no gradient",
        "It calls ctx.set_materialize_grads(False), and its backward was recorded with gradients of all results.",
        "Analyse the model without set_materialize_grads. Inference can be predicted as it is.",
    )


def _no_training(reason: str, why: str, hint: str) -> ModelFileError:
    return ModelFileError(f"the training step of this model cannot be predicted: {reason}", why, hint, code="SM176")


def unpredictable(what: str) -> ModelFileError:
    """The error for training of a model whose code changes autograd. `what`: an argument of NOT_RECORDED."""
    reasons = {
        written.INNER: "its code differentiates gradients of an op that keeps more than its results (dropout)",
        written.SAVED_HOOKS: "its code changes what autograd saves (torch.autograd.graph.saved_tensors_hooks)",
        written.HOOKS: "its code has hooks of gradients that could not be recorded",
        COMPILED_HOOKS: "its code has hooks of gradients, and a part of it is compiled",
        written.SELECTIVE: "its checkpoints recompute some ops alone (context_fn, selective checkpointing)",
        written.SCRIPTED: "gradients go through code of torch.jit.script or torch.jit.trace",
    }
    reason = reasons.get(what, "its code changes autograd in a way that this version does not know")
    hint = "Analyse the model without that; with it the peak is usually lower. Inference can be predicted as it is."
    if what == written.SELECTIVE:
        hint = "Export the model without it, and ask for it with --checkpoint CLASS --checkpoint-save OP (mm, sdpa)."
    why = "The recording does not say what is saved instead of the tensors, and when it comes back."
    if what in (written.HOOKS, COMPILED_HOOKS):
        why = "The recording does not say what they do in the backward."
    if what == written.SCRIPTED:
        why = "TorchScript writes its own backward for it and fuses ops, which no recording says."
        hint = "Set PYTORCH_JIT=0, in the step too, or take the decorator away. Inference can be predicted as it is."
    return _no_training(reason, why, hint)


def _formula(
    e: Eager, function: CustomFunction, inputs: Sequence[Tensor], results: Sequence[Tensor], env: dict[str, Any]
) -> Formula:
    body = function.backward
    assert body is not None
    amp = e.autocast  # that of the step, which `torch.amp.custom_bwd` has too
    of_inputs = [g for name, g in zip(function.inputs, function.gradients, strict=False) if name]
    # what the backward reads of the forward: saved tensors, attributes, parameters
    reads = {n: env[n] for op in body.ops for n in op.refs() if n in env}

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        incoming = [name for name in function.incoming if name]
        values = dict(reads)
        for name, grad, result in zip(incoming, grads, results, strict=False):
            if grad is None and not function.materializes:
                raise _without_gradient(function.name)
            if grad is None:  # a result that the loss does not depend on (torch/csrc/autograd/python_function.cpp)
                grad = e.empty(result.shape, result.dtype, kernel="aten.zeros.default")
            values[name] = grad
        try:
            returned = run_body(e, body, values, amp)
        except fields.MALFORMED as error:
            raise written.damaged("the file", f"the backward of {function.name[:60]}: {error!r}") from error
        return [returned.get(name) if wanted and name else None for name, wanted in zip(of_inputs, need, strict=True)]

    return Formula(tuple(range(len(inputs))), gradients)


def run_body(e: Eager, body: Graph, values: dict[str, Any], amp: DType | None = None) -> dict[str, Tensor]:
    """Runs the ops of a backward over `values`, and gives the tensors that it returns. `amp` is the autocast of the
    forward.

    Autograd that the backward runs accumulates the gradients of parameters itself: their nodes are others than those
    that the running backward waits for.
    """
    leaves = {t: t.accumulate for t in values.values() if isinstance(t, Tensor) and t.accumulate is not None}
    state = e.grad_enabled, e.autocast, e.autocast_cache, e.autocast_owner
    e.autocast_cache, e.autocast_owner = {}, Owner(Reason.AUTOCAST, "weight cache")
    for leaf in leaves:
        leaf.accumulate = None
    try:
        return _run_ops(e, body, values, amp)
    finally:
        e.release(e.autocast_owner)
        e.grad_enabled, e.autocast, e.autocast_cache, e.autocast_owner = state
        for leaf, node in leaves.items():
            leaf.accumulate = node


def _run_ops(e: Eager, body: Graph, values: dict[str, Any], amp: DType | None) -> dict[str, Tensor]:
    assert body.recorded is not None
    last_held = body.recorded.last_held
    ends: dict[int, list[str]] = {}
    for name, index in last_held.items():
        ends.setdefault(index, []).append(name)
    holds: dict[str, tuple[Tensor, int]] = {}
    attributes = attributes_of_ctx()
    for index, op in enumerate(body.ops):
        e.open_scope()
        args = [_filled(a, values) for a in op.args]
        kwargs = {k: _filled(v, values) for k, v in op.kwargs.items()}
        rule = lookup(op.target)
        e.grad_enabled = op.grad
        e.autocast = amp if op.amp is True else op.amp or None
        if e.autocast is None and e.autocast_cache and not body.marks_autocast:
            e.clear_autocast_cache()  # copies of weights are kept until the region ends
        result: Any
        if op.base == FUNCTION:
            result, of_autograd = with_history(e, body.recorded.functions[op.name], values)
            for tensor in of_autograd:
                e.hold(tensor, attributes)
        elif op.target in RUN_AUTOGRAD:
            result = run_autograd(e, op.target, args)
        elif rule is None:
            described = [body.values[n] for n in op.outputs if n in body.values]
            result = fallback(e, op.target, [*args, *kwargs.values()], described)
        else:
            result = call(e, rule, args, kwargs)
        results = [result] if isinstance(result, Tensor) else list(result or ())
        for name, tensor in zip(op.outputs, results, strict=False):
            if name and isinstance(tensor, Tensor):
                values[name] = tensor
                holds[name] = (tensor, e.take(tensor, Reason.VALUE, name))
        e.close_scope()
        if op.clears:
            e.clear_autocast_cache()
        for name in ends.get(index, ()):
            if name in holds:
                e.end(*holds.pop(name))
    e.release(attributes)
    returned = {name: values[name] for name in body.outputs if isinstance(values.get(name), Tensor)}
    storages = {tensor.storage for tensor in returned.values()}
    for tensor, hold in holds.values():
        if tensor.storage in storages:
            e.leave_to_scope(tensor, hold)
        else:
            e.end(tensor, hold)
    return returned


def run_autograd(e: Eager, target: str, args: Sequence[Any]) -> list[Tensor | None]:
    """An op of autograd that the code runs, and the gradients that it gives."""
    if target in (REQUIRES_GRAD, REQUIRES_NO_GRAD):
        args[0].requires_grad = target == REQUIRES_GRAD
        return []
    roots, gradients, leaves, retain_graph = args
    return inner_backward(e, roots, gradients, leaves, retain_graph, captures=target == GRAD)


def _filled(arg: Any, values: dict[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    return tuple([_filled(a, values) for a in arg]) if isinstance(arg, tuple) else arg
