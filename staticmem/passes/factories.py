"""Numbers, and tensors of zeros or ones, that the dynamo exporter's optimiser computed and stored in the file.

`torch.zeros(n, 64)` in a model's code makes a tensor in every step; with fixed sizes it is a constant of the file,
under the name that the FX graph gave it (`zeros`, `new_zeros_1`). What belongs to a module is in the graph's signature.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from staticmem.ir.graph import Frame, Op, Ref
from staticmem.ir.onnx_graph import Net
from staticmem.ops import kinds_of

if TYPE_CHECKING:
    import numpy as np

# names that torch/fx/graph.py makes of the call's: `aten.new_zeros.default` -> `new_zeros`, `new_zeros_1`
_NAMED = re.compile(r"(?:new_)?(zeros|ones|full|empty)(?:_like)?(?:_\d+)?\Z")


def numbers(consts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Constants that were Python numbers: type promotion for ONNX wraps them (`scalar_tensor_default`)."""
    named = ((name, array) for name, array in consts.items() if name.startswith("scalar_tensor"))
    return {name: array.item() for name, array in named if array.ndim == 0 and array.dtype.kind in "if"}


def with_numbers(op: Op, known: Mapping[str, float]) -> Op:
    """The op with the numbers that its code has: `2 * x`, `x > 0`, `1 - x`."""
    if len(op.args) != 2 or kinds_of(op.base).isdisjoint(("arithmetic", "comparison")):
        return op
    left, right = op.args
    if isinstance(right, Ref) and right.name in known and isinstance(left, Ref):
        target = op.target.removesuffix(".Tensor") + ".Scalar" if "comparison" in kinds_of(op.base) else op.target
        return op.changed(target=target, args=(left, known[right.name]))
    if (
        isinstance(left, Ref)
        and left.name in known
        and isinstance(right, Ref)
        and op.base in ("aten::sub", "aten::mul")
    ):
        target = "aten::rsub.Scalar" if op.base == "aten::sub" else op.target
        return op.changed(target=target, args=(right, known[left.name]))
    return op


def restore(ops: Sequence[Op], net: Net) -> list[Op]:
    """The ops with the calls that made such tensors, each before its first reader."""
    made = {name for op in ops for name in op.outputs} | {*net.inputs, *net.aliases.values()}
    readers: dict[str, list[Op]] = {}
    for op in ops:
        for name in dict.fromkeys(op.refs()):
            if name not in made and _NAMED.match(name):
                readers.setdefault(name, []).append(op)
    if not readers:
        return list(ops)
    found: list[Op] = []
    pending = dict(readers)
    for op in ops:
        for name in [n for n in dict.fromkeys(op.refs()) if n in pending]:
            call = _call(name, pending.pop(name), net)
            found += [call] if call is not None else []
        found.append(op)
    return found


def _call(name: str, readers: list[Op], net: Net) -> Op | None:
    value, match = net.values.get(name), _NAMED.match(name)
    if value is None or value.shape is None or value.numel < 2 or match is None:
        return None
    args = (value.shape, 0) if match[1] == "full" else (value.shape,)
    return Op(name, f"aten::{match[1]}", args, {"dtype": value.dtype}, (name,), _around(readers))


def _around(readers: list[Op]) -> tuple[Frame, ...]:
    """The modules that enclose all readers."""
    modules = readers[0].modules
    for op in readers[1:]:
        modules = tuple(
            x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(modules, op.modules, strict=False))
        )
    return modules


__all__ = ["numbers", "restore", "with_numbers"]
