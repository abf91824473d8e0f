"""Ops that recordings alone have: what the code does to autograd, and to tensors, beside calls of ops."""

from __future__ import annotations

from collections.abc import Callable

from staticmem.eager.reasons import Reason
from staticmem.engine.custom_functions import run_autograd, unpredictable, with_history
from staticmem.engine.gradient_hooks import Interpreter, attach
from staticmem.ir.graph import FUNCTION, HOOK, NOT_RECORDED, RUN_AUTOGRAD, SET_DATA, Op
from staticmem.ops.dispatch import BAD_ARGUMENTS


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
    if interpreter.e.training:
        raise unpredictable(str(op.args[0]))


# Each may raise a ModelFileError: training cannot be predicted because of it, or its arguments do not fit.
RUNS: dict[str, Callable[[Interpreter, Op], None]] = {
    FUNCTION: _call_function,
    HOOK: _add_hook,
    SET_DATA: _set_data,
    NOT_RECORDED: _refuse_training,
    **dict.fromkeys(RUN_AUTOGRAD, _run_autograd),
}
