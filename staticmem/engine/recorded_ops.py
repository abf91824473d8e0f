"""Ops that recordings alone have: what the code does to autograd, and to tensors, beside calls of ops.

Hooks of gradients that a recording has (`recording.gradient_hooks`), run where the gradients arrive.

A hook of a tensor, or of what a module is given or returns, runs before the node of the op that made it, on gradients
that are complete. What it keeps is there until it, or another hook, lets go of it: often in the next backward.

Sources: torch/csrc/autograd/engine.cpp (`call_tensor_pre_hooks`, before the node and before AccumulateGrad).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from staticmem.eager.autograd import InputBuffer
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Tensor, gradient_edge
from staticmem.engine.custom_functions import COMPILED_HOOKS, run_autograd, run_body, unpredictable, with_history
from staticmem.errors import StaticmemError
from staticmem.frontends import fields
from staticmem.frontends import recording_format as written
from staticmem.ir.graph import FUNCTION, HOOK, NOT_RECORDED, RUN_AUTOGRAD, SET_DATA, CustomFunction, Op, Recorded
from staticmem.ops.dispatch import BAD_ARGUMENTS

if TYPE_CHECKING:
    from staticmem.eager.context import Eager
    from staticmem.eager.tensor import Owner


def _call_function(interpreter: Interpreter, op: Op) -> None:
    """Gives the results of a custom autograd function, whose forward has run, their history."""
    e, recorded = interpreter.e, interpreter.recorded
    assert recorded is not None
    e.open_scope()
    try:
        results, of_autograd = with_history(e, recorded.functions[op.name], interpreter.env)
        for name, tensor in zip(filter(None, op.outputs), results, strict=True):
            interpreter.bind(name, tensor, op)
    except (ValueError, *BAD_ARGUMENTS) as error:
        raise interpreter.explained(op, error) from error
    for tensor in of_autograd:
        e.keep_on_ctx(tensor)
    e.close_scope()


def _add_hook(interpreter: Interpreter, op: Op) -> None:
    assert interpreter.recorded is not None
    if interpreter.e.training:
        attach(interpreter, interpreter.recorded.functions[op.name])


def _run_autograd(interpreter: Interpreter, op: Op) -> None:
    e, args = interpreter.e, interpreter.arguments(op)
    e.open_scope()
    try:
        results = run_autograd(e, op.target, args)
        if "leaf" in op.kwargs:  # autograd's node for its gradient holds it
            e.hold(args[0], interpreter.made_leaves)
        elif op.target == written.REQUIRES_GRAD and args[0].requires_grad and args[0].grad_fn is None:
            gradient_edge(args[0])
            args[0].accumulate.keeps_leaf = True
            interpreter.code_leaves.append(args[0])
    except (ValueError, *BAD_ARGUMENTS) as error:
        raise interpreter.explained(op, error) from error
    for name, tensor in zip(op.outputs, results, strict=False):
        if name and tensor is not None:
            interpreter.bind(name, tensor, op)
    e.close_scope()


def _set_data(interpreter: Interpreter, op: Op) -> None:
    """`tensor.data = data`: whoever has the tensor has another storage from now on, that of `data`."""
    tensor, data = interpreter.arguments(op)
    e, name, before = interpreter.e, op.refs()[0], tensor.storage
    owner = None
    if name in interpreter.owners:
        e.end(*interpreter.owners.pop(name))
    else:
        owner = interpreter.attributes.get(name, interpreter.model)
        e.drop(tensor, owner)
    assert tensor.refs == 0, f"{tensor} has owners that the recording does not show"
    category, label = e.trace.buffers.categories[before.id], e.trace.buffers.names[before.id]
    tensor.storage, tensor.shape, tensor.strides, tensor.dtype = data.storage, data.shape, data.strides, data.dtype
    tensor.known_form = None
    if owner is not None:
        e.hold(tensor, owner)
        e.categorise(tensor, category, label)
        e.trace.replaced_by[before.id] = (tensor.storage.id,)
    else:
        interpreter.owners[name] = (tensor, e.take(tensor, Reason.VALUE, name))


def _refuse_training(interpreter: Interpreter, op: Op) -> None:
    if interpreter.e.training or op.grad:  # or the code enables gradients in inference
        raise unpredictable(str(op.args[0]))


# Each may raise a ModelFileError: training cannot be predicted because of it, or its arguments do not fit.
RUNS: dict[str, Callable[[Interpreter, Op], None]] = {
    FUNCTION: _call_function,
    HOOK: _add_hook,
    SET_DATA: _set_data,
    NOT_RECORDED: _refuse_training,
    **dict.fromkeys(RUN_AUTOGRAD, _run_autograd),
}


class Interpreter(Protocol):
    """The parts of `interpreter.Interpreter` that ops of recordings need."""

    e: Eager
    recorded: Recorded | None
    env: dict[str, Any]
    owners: dict[str, tuple[Tensor, int]]
    attributes: dict[str, Owner]
    model: Owner
    made_leaves: Owner
    code_leaves: list[Tensor]
    compiled: Sequence[Any]

    def arguments(self, op: Op) -> list[Any]: ...
    def bind(self, name: str, tensor: Tensor, op: Op) -> None: ...
    def explained(self, op: Op, error: Exception) -> StaticmemError: ...


def attach(interpreter: Interpreter, function: CustomFunction) -> None:
    """Adds a hook to the node that its tensors come from; nothing where they have no history.

    Raises:
        ModelFileError: a part of the step is compiled, and what hooks do to compiled code is not known.
    """
    if interpreter.compiled:
        raise unpredictable(COMPILED_HOOKS)
    e, env, body = interpreter.e, interpreter.env, function.backward
    tensors = [env.get(name) for name in function.results]
    edges = [gradient_edge(t) if isinstance(t, Tensor) else None for t in tensors]
    node = next((edge[0] for edge in edges if edge is not None), None)
    if node is None or body is None or body.recorded is None:
        return
    slots = [edge[1] if edge is not None and edge[0] is node else -1 for edge in edges]
    for name in function.attributes:
        e.keep_on_ctx(env[name])
    reads = {n: env[n] for op in body.ops for n in op.refs() if n in env}
    for name in body.recorded.last_held:  # what the hook lets go of lives until it runs
        if name in interpreter.owners:
            interpreter.e.held_by_hooks[name] = interpreter.owners.pop(name)
    run = partial(_run, interpreter, function, slots, reads)
    e.gradient_hooks.setdefault(node, []).insert(0, run)  # the last one was written first


def _run(
    interpreter: Interpreter, function: CustomFunction, slots: list[int], reads: dict[str, Any], buffer: InputBuffer
) -> None:
    e, body = interpreter.e, function.backward
    of_hooks = e.held_by_hooks
    assert body is not None
    assert body.recorded is not None
    values = dict(reads) | {name: tensor for name, (tensor, _) in of_hooks.items()}
    arrived = [buffer.slots[slot] if slot >= 0 else None for slot in slots]
    values |= {name: tensor for name, tensor in zip(function.incoming, arrived, strict=True) if tensor is not None}
    if all(tensor is None for tensor in arrived):
        return
    e.open_scope()
    try:
        results = run_body(e, body, values)
    except fields.MALFORMED as error:
        raise written.damaged("the file", f"the hook {function.name[:60]}: {error!r}") from error
    values |= results
    for name in function.kept:
        if isinstance(values.get(name), Tensor):
            _keep(interpreter, name, values[name])
    for name, slot in zip(function.gradients, slots, strict=True):
        new, old = values.get(name), buffer.slots[slot]
        if name and isinstance(new, Tensor) and old is not None and new is not old:
            buffer.slots[slot] = new
            e.hold(new, buffer)
            e.drop(old, buffer)
    for name in body.recorded.last_held:
        if name in of_hooks and name not in function.kept:
            e.end(*of_hooks.pop(name))
    e.close_scope()


def _keep(interpreter: Interpreter, name: str, tensor: Tensor) -> None:
    e, attributes = interpreter.e, interpreter.attributes
    if name in attributes:
        e.release(attributes[name])
        e.hold(tensor, attributes[name])
        return
    if name in interpreter.e.held_by_hooks:
        e.end(*interpreter.e.held_by_hooks.pop(name))
    interpreter.e.held_by_hooks[name] = tensor, e.take(tensor, Reason.MODULE, name)
