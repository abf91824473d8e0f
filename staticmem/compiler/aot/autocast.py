"""Casts of arguments under `torch.autocast`, for the lists of aten/src/ATen/autocast_mode.h (`ops.registry.Autocast`).

A trace keeps no copies of weights (`disable_autocast_cache` of torch/fx/experimental/proxy_tensor.py): equal casts
become one when equal nodes are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from staticmem.ir.dtypes import DType
from staticmem.ops.dispatch import autocast_arguments
from staticmem.ops.registry import Autocast
from staticmem.ops.traces.casts import to_copy
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer


def sees(target: str) -> bool:
    """False for `upsample_bilinear2d.vec` and its like: eager code casts in the call that they make, compiled code
    decomposes them before (`py_impl(DispatchKey.Autograd)` in torch/_decomp/decompositions.py)."""
    return not (target.endswith(".vec") and "upsample" in target)


def cast_arguments(
    t: Tracer, rule: Autocast, amp: DType, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call under autocast to `amp`."""
    return autocast_arguments(rule, amp, Node, partial(to_copy, t), args, kwargs)
