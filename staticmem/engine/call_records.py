"""Ops that are called again with operands that look the same: the rule is run twice, then its record is repeated.

What a rule does depends on its arguments, on the looks of its operands and on the modes of the execution: these are the
key. Records are kept for the process, so a second analysis of a like model runs few rules (`eager.calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, TypeAlias

from staticmem.eager.calls import Call, call_again
from staticmem.eager.context import Eager
from staticmem.eager.recording import record_call
from staticmem.eager.tensor import Tensor
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ops.dispatch import cast_arguments
from staticmem.ops.registry import Rule

Key: TypeAlias = "tuple[Any, ...]"
_NESTED = frozenset((Ref, tuple))
SEEN: Final = 0  # the rule has run once for this key
CALLS = 4096  # records that are kept in a mode; one takes about 4 KB
KEYS = 1 << 16  # keys and patterns of arguments that are remembered

_signatures: dict[Any, Signature] = {}
# patterns of lists that ops share, by their identity; they are kept, so that nothing else gets it
_lists: dict[int, tuple[Any, Any]] = {}
_last = count()


class Signature:
    """What an op says of itself: one for all ops that differ in the names of operands and results alone."""

    __slots__ = ("named", "number", "rule", "sliced")

    def __init__(self, op: Op, rule: Rule) -> None:
        self.number, self.rule = next(_last), rule
        self.named = "" not in op.outputs  # no result dies with the call
        self.sliced = op.base == "aten::slice"


def signature_of(op: Op, rule: Rule) -> Signature | None:
    """The signature of an op; None where an argument is nothing that a schema knows."""
    pattern: Any = (op.target, "" in op.outputs, _pattern(op.args))
    if op.kwargs:
        pattern = (*pattern, *((name, _pattern((value,))) for name, value in op.kwargs.items()))
    try:
        signature = _signatures.get(pattern)
    except TypeError:
        return None
    if signature is None or signature.rule is not rule:
        if len(_signatures) >= KEYS:
            _signatures.clear()
        signature = _signatures[pattern] = Signature(op, rule)
    return signature


def _pattern(args: Sequence[Arg]) -> Any:
    """Arguments with their types, in which 1, 1.0 and True differ; operands are left open."""
    found: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int or arg is None:
            found.append(arg)
        elif kind is Ref:
            found.append(Ref)
        elif kind is not tuple:
            found.append((kind, arg))
        elif (known := _lists.get(id(arg))) is not None and known[0] is arg:
            found.append(known[1])
        elif _NESTED.isdisjoint(kinds := tuple(map(type, arg))):  # type: ignore[arg-type]
            found.append((kinds, arg))
            if len(_lists) < CALLS and len(arg) < 16:  # type: ignore[arg-type]
                _lists[id(arg)] = (arg, found[-1])
        else:
            found.append(_pattern(arg))  # type: ignore[arg-type]
    return tuple(found)


class CallRecords:
    """The calls of one set of modes: the record, SEEN, or None where the rule itself must run."""

    def __init__(self) -> None:
        self.calls: dict[Key, Call | int | None] = {}
        self.recorded = 0

    def learn(
        self, e: Eager, key: Key, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[Tensor]
    ) -> None:
        """Takes note of a call; at the second time it is recorded for the next. `operands` are the tensors of it."""
        calls = self.calls
        if self.recorded >= CALLS or len(calls) >= KEYS:
            calls.clear()
            self.recorded = 0
        if key not in calls:
            calls[key] = SEEN
            return
        calls[key] = record_call(e, call_of(rule, args, kwargs), operands)
        self.recorded += 1


_records: dict[tuple[bool, bool, DType | None, str], CallRecords] = {}


def records_of_modes(e: Eager) -> dict[bool, CallRecords]:
    """The records of calls in the present modes, without and with gradients."""
    return {
        grad_enabled: _records.setdefault((e.training, grad_enabled, e.autocast, e.sdpa), CallRecords())
        for grad_enabled in (False, True)
    }


def filled(op: Op, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an op with its references replaced, in order, by what they mean."""
    meanings = iter(values)
    args = [_replaced(a, Ref, meanings) for a in op.args]
    return args, {k: _replaced(v, Ref, meanings) for k, v in op.kwargs.items()}


def call_of(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Eager, Sequence[Tensor]], Any]:
    """The call of a rule with other tensors in the places of those among its arguments."""

    def run(e: Eager, stand_ins: Sequence[Tensor]) -> Any:
        others = iter(stand_ins)
        given = [_replaced(a, Tensor, others) for a in args]
        return rule.function(e, *given, **{k: _replaced(v, Tensor, others) for k, v in kwargs.items()})

    return run


def _replaced(arg: Any, kind: type, others: Iterator[Any]) -> Any:
    """The argument with each object of a type replaced by the next of `others`."""
    if type(arg) is kind:
        return next(others)
    return tuple([_replaced(a, kind, others) for a in arg]) if type(arg) is tuple else arg


def tensors_of(args: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, in order."""
    tensors: list[Tensor] = []
    for arg in args:
        if type(arg) is Tensor:
            tensors.append(arg)
        elif type(arg) is tuple:
            tensors += tensors_of(arg)
    return tensors


def run_call(
    e: Eager, records: CallRecords, signature: Signature, op: Op, values: Sequence[Any]
) -> tuple[Sequence[Any], bool]:
    """Runs the rule of an op whose references mean `values`, or repeats its record; what it gives.

    The second is whether a scope is left open, for the caller to end when results have their owners.

    Raises:
        Exception: whatever the rule raises.
    """
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = {}
    rule = signature.rule
    scoped = e.autocast is not None and rule.autocast != ""
    if scoped:
        e.open_scope()
        args, kwargs = cast_arguments(e, rule, *filled(op, values))
        values = [*tensors_of((*args, *kwargs.values())), *[v for v in values if not isinstance(v, Tensor)]]
    operands: list[Tensor] = []
    parts: list[Any] = [signature.number]
    for value in values:
        if type(value) is Tensor:
            form = value.known_form or value.form
            parts.append(form.number + value.requires_grad + (0 if value.base is None else 2))
            operands.append(value)
        else:
            parts.append((type(value), value))
    key = tuple(parts)
    try:
        call = records.calls.get(key, SEEN)
    except TypeError:  # a value that no schema knows
        call = None
    if type(call) is Call:
        leave = scoped or call.loose or not signature.named or len(call.results) > len(op.outputs)
        if leave and not scoped:
            e.open_scope()
        return call_again(e, call, operands, leave), leave
    if not scoped:
        e.open_scope()
    if args is None:
        args, kwargs = filled(op, values)
    if call is not None:
        records.learn(e, key, rule, args, kwargs, operands)
    result = rule.function(e, *args, **kwargs)
    return [result] if isinstance(result, Tensor) else list(result or ()), True
