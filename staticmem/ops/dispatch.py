"""Calls a rule as the dispatcher would: autocast first, then the rule; an op without a rule gets a stated fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Value
from staticmem.ops.casts import to_copy
from staticmem.ops.registry import Autocast, Rule

# what a rule raises when an argument does not match the ATen schema
BAD_ARGUMENTS = (TypeError, AttributeError, LookupError, StopIteration, ArithmeticError)


class _Typed(Protocol):
    @property
    def dtype(self) -> DType: ...


T = TypeVar("T", bound=_Typed)


def call(e: Eager, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a rule. Under autocast its floating-point tensors are cast first."""
    if "out" in kwargs:
        return _into(e, rule, args, kwargs)
    if e.autocast is not None and rule.autocast:
        args, kwargs = cast_arguments(e, rule, args, kwargs)
    return rule.function(e, *args, **kwargs)


def _into(e: Eager, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An overload with `out=` writes to a tensor that is there and has no history; an empty one is resized first."""
    out = kwargs["out"]
    if not isinstance(out, Tensor) or out.numel == 0:
        return call(e, rule, args, {name: value for name, value in kwargs.items() if name != "out"})
    e.kernel(f"{rule.target.replace('::', '.')}.out")
    return out


def cast_arguments(
    e: Eager, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call under the autocast that is on."""
    assert e.autocast is not None
    return autocast_arguments(rule.autocast, e.autocast, Tensor, partial(_cast, e), args, kwargs)


def autocast_arguments(
    rule: Autocast,
    amp: DType,
    tensor: type[T],
    cast: Callable[[T, DType], T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as autocast makes them for an op on one of its lists: in C++ argument order, right to left.

    Source: aten/src/ATen/autocast_mode.h. `tensor` is the class of tensors among the arguments, which `cast` casts.
    """
    tensors = list(_instances((*args, *kwargs.values()), tensor))
    if rule == "float32_dtype":
        has_dtype = any(isinstance(value, DType) for value in (*args, *kwargs.values()))
        if tensors and tensors[0].dtype in dtypes.HALVES and not has_dtype:
            return list(args), {**kwargs, "dtype": dtypes.float32}
        return list(args), dict(kwargs)
    if rule == "promote":
        target = dtypes.float32 if any(t.dtype is dtypes.float32 for t in tensors) else amp
    else:
        target = amp if rule == "half" else dtypes.float32

    def converted(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple([converted(item) for item in value])
        if not isinstance(value, tensor) or not value.dtype.is_floating_point or value.dtype is dtypes.float64:
            return value
        return cast(value, target)

    cast_kwargs = {name: converted(value) for name, value in reversed(list(kwargs.items()))}
    cast_args = [converted(value) for value in reversed(args)]
    return cast_args[::-1], cast_kwargs


def _instances(values: Sequence[Any], tensor: type[T]) -> Iterator[T]:
    for value in values:
        if isinstance(value, tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _instances(value, tensor)


def _cast(e: Eager, value: Tensor, dtype: DType) -> Tensor:
    """`at::autocast::cached_cast`: float32 leaf parameters are cast once and kept until autocast exits, with a history
    also where the first op that casts them runs under no_grad (aten/src/ATen/autocast_mode.cpp; seen with 2.13)."""
    if value.dtype is dtype:
        return value
    cacheable = dtype is e.autocast and value.dtype is dtypes.float32
    cacheable = cacheable and value.requires_grad and value.grad_fn is None and value.base is None
    if not cacheable:
        return to_copy(e, value, dtype)
    cached = e.autocast_cache.get(id(value))
    if cached is None:
        grad_enabled, e.grad_enabled = e.grad_enabled, e.training
        cached = e.autocast_cache[id(value)] = to_copy(e, value, dtype)
        e.grad_enabled = grad_enabled
        e.hold(cached, e.autocast_owner)
    return cached


def fallback(e: Eager, target: str, args: Sequence[Any], values: Sequence[Value]) -> list[Tensor]:
    """An op without a rule: saves every input and result, and backward makes a gradient for each input that wants one.

    That is an upper bound for ops without hidden temporaries: autograd cannot save more than what goes in and out.
    """
    inputs = list(_instances(args, Tensor))
    outs = [e.empty(value.shape or (), value.dtype, kernel=target) for value in values]

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel(f"{target} backward")
        return [e.empty_like(t) if wanted else None for t, wanted in zip(inputs, need, strict=True)]

    if outs:
        formula = Formula(tuple(range(len(inputs))), gradients)
        e.record(f"{target} backward", outs, inputs, [formula], [*inputs, *outs])
    return outs
