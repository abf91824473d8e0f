"""Repeats ops that are called often with like operands: the rule runs twice, after that its record is repeated.

A call's key is what its rule depends on: arguments, modes of the execution, and of each operand its form, whether it
needs a gradient and whether it is a view. Records are kept for the process, so a second analysis of a similar model
runs few rules (`eager.calls`).
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
KEYS = 1 << 16  # keys, and patterns of arguments, that are kept

_signatures: dict[Any, Signature] = {}
# patterns of lists that ops share, by the lists' id(); the lists are kept, so that no other object gets the id
_lists: dict[int, tuple[Any, Any]] = {}
_last = count()


class Signature:
    """The constant part of an op's key: ops that differ only in names of operands and results share one."""

    __slots__ = ("named", "number", "rule", "sliced")

    def __init__(self, op: Op, rule: Rule) -> None:
        self.number, self.rule = next(_last), rule
        self.named = "" not in op.outputs  # no result dies with the call
        self.sliced = op.base == "aten::slice"


def signature_of(op: Op, rule: Rule) -> Signature | None:
    """The signature of an op; None where an argument is of no type that an ATen schema has."""
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
    """A hashable key of arguments, with their types (1, 1.0 and True differ); each operand is `Ref`."""
    pattern: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int or arg is None:
            pattern.append(arg)
        elif kind is Ref:
            pattern.append(Ref)
        elif kind is not tuple:
            pattern.append((kind, arg))
        elif (cached := _lists.get(id(arg))) is not None and cached[0] is arg:
            pattern.append(cached[1])
        elif _NESTED.isdisjoint(kinds := tuple(map(type, arg))):  # type: ignore[arg-type]
            pattern.append((kinds, arg))
            if len(_lists) < CALLS and len(arg) < 16:  # type: ignore[arg-type]
                _lists[id(arg)] = (arg, pattern[-1])
        else:
            pattern.append(_pattern(arg))  # type: ignore[arg-type]
    return tuple(pattern)


class CallRecords:
    """The calls of one set of modes: the record, SEEN, or None where the rule itself must run."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps  # else each call runs its rule
        self.calls: dict[Key, Call | int | None] = {}
        self.recorded = 0

    def note(
        self, e: Eager, key: Key, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[Tensor]
    ) -> None:
        """Counts a call that ran; the second one of a key is recorded. `operands` are its tensors."""
        calls = self.calls
        if not self.keeps:
            return
        if self.recorded >= CALLS or len(calls) >= KEYS:
            calls.clear()
            self.recorded = 0
        if key not in calls:
            calls[key] = SEEN
            return
        calls[key] = record_call(e, call_of(rule, args, kwargs), operands)
        self.recorded += 1


_records: dict[tuple[bool, bool, DType | None, str, tuple[int, int]], CallRecords] = {}


def records_of_modes(e: Eager) -> dict[bool, CallRecords]:
    """The records of calls in the present modes, without and with gradients."""
    if not e.repeats_calls:
        return {False: CallRecords(keeps=False), True: CallRecords(keeps=False)}
    return {
        grad_enabled: _records.setdefault((e.training, grad_enabled, e.autocast, e.sdpa, e.torch), CallRecords())
        for grad_enabled in (False, True)
    }


def filled(op: Op, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an op with `values` in the places of its references, in order."""
    remaining = iter(values)
    args = [_replaced(a, Ref, remaining) for a in op.args]
    return args, {k: _replaced(v, Ref, remaining) for k, v in op.kwargs.items()}


def call_of(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Eager, Sequence[Tensor]], Any]:
    """A function that calls a rule with other tensors in the places of the tensors among its arguments."""

    def run(e: Eager, stand_ins: Sequence[Tensor]) -> Any:
        others = iter(stand_ins)
        new_args = [_replaced(a, Tensor, others) for a in args]
        return rule.function(e, *new_args, **{k: _replaced(v, Tensor, others) for k, v in kwargs.items()})

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
    """Runs the rule of an op whose references have `values`, or repeats its record.

    Returns the results, and whether a scope is left open, which the caller closes when the results have owners.

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
    except TypeError:  # a value that is not hashable
        call = None
    if type(call) is Call:
        keeps_scope = scoped or call.loose or not signature.named or len(call.results) > len(op.outputs)
        if keeps_scope and not scoped:
            e.open_scope()
        return call_again(e, call, operands, keeps_scope), keeps_scope
    if not scoped:
        e.open_scope()
    if args is None:
        args, kwargs = filled(op, values)
    if call is not None:
        records.note(e, key, rule, args, kwargs, operands)
    result = rule.function(e, *args, **kwargs)
    return [result] if isinstance(result, Tensor) else list(result or ()), True
