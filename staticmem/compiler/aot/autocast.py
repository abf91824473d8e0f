"""Casts of arguments under `torch.autocast`, for the lists of aten/src/ATen/autocast_mode.h (`ops.registry.Autocast`).

A trace keeps no copies of weights (`disable_autocast_cache` of torch/fx/experimental/proxy_tensor.py): equal casts
become one when equal nodes are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from staticmem.compiler.aot.casts import to_copy
from staticmem.compiler.aot.tracer import Tracer
from staticmem.compiler.nodes import Node
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.registry import Autocast


def sees(target: str) -> bool:
    """False for `upsample_bilinear2d.vec` and its like: eager code casts in the call that they make, compiled code
    decomposes them before (`py_impl(DispatchKey.Autograd)` in torch/_decomp/decompositions.py)."""
    return not (target.endswith(".vec") and "upsample" in target)


def cast_arguments(
    t: Tracer, rule: Autocast, amp: DType, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as autocast makes them: in C++ argument order, right to left."""
    if rule == "float32_dtype":
        tensors = _nodes((*args, *kwargs.values()))
        has_dtype = any(isinstance(a, DType) for a in (*args, *kwargs.values()))
        if tensors and tensors[0].dtype in dtypes.HALVES and not has_dtype:
            return list(args), {**kwargs, "dtype": dtypes.float32}
        return list(args), dict(kwargs)
    if rule == "promote":
        operands = {node.dtype for node in _nodes((*args, *kwargs.values()))}
        target = dtypes.float32 if dtypes.float32 in operands else amp
    else:
        target = amp if rule == "half" else dtypes.float32
    cast_kwargs = {name: _cast(t, value, target) for name, value in reversed(list(kwargs.items()))}
    cast_args = [_cast(t, arg, target) for arg in reversed(args)]
    return cast_args[::-1], cast_kwargs


def _nodes(values: Sequence[Any]) -> list[Node]:
    nodes: list[Node] = []
    for value in values:
        if isinstance(value, Node):
            nodes.append(value)
        elif isinstance(value, (tuple, list)):
            nodes += _nodes(value)
    return nodes


def _cast(t: Tracer, value: Any, dtype: DType) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple([_cast(t, v, dtype) for v in value])
    if not isinstance(value, Node) or not value.dtype.is_floating_point or value.dtype is dtypes.float64:
        return value
    return to_copy(t, value, dtype)
