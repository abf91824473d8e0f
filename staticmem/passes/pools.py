"""Adaptive pools: exported as a mean, or as a pool with fixed kernels (torch/_decomp/decompositions.py)."""

from __future__ import annotations

import math
from dataclasses import replace

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Net
from staticmem.passes.edit import Ops


def rewrite(ops: Ops, net: Net) -> None:
    """Puts `adaptive_avg_pool` back where the module says so."""
    for op in list(ops.ops):
        if op is None:
            continue
        adaptive = bool(op.modules) and op.modules[-1].cls.rpartition(".")[2].startswith("AdaptiveAvgPool")
        if op.target == "aten::mean.dim" and (adaptive or op.args[1:] == ((-1, -2), True)):
            _mean(ops, op)  # the decomposition writes these dims in this order
        elif adaptive and op.base in ("aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d"):
            _pool(ops, net, op)


def _mean(ops: Ops, op: Op) -> None:
    dims = op.args[1]
    count = len(dims) if isinstance(dims, tuple) else 1
    ops.put(op, replace(op, target=f"aten::adaptive_avg_pool{count}d", args=(op.args[0], (1,) * count), kwargs={}))
    strided = ops.only_reader(op.outputs[0])
    if strided is not None and strided.base == "aten::as_strided" and strided.modules == op.modules:
        ops.alias(strided, op.outputs[0])  # the channels-last strides of the decomposition


def _pool(ops: Ops, net: Net, op: Op) -> None:
    """The output size is the file's, unless a linear layer after it says that another one was meant: kernel sizes
    were fixed for the size at export."""
    shape = net.shape(op.outputs[0])
    count = int(op.base[-2])
    if shape is None or len(shape) < count + 1:
        return
    sizes = shape[-count:]
    expected = _from_linear(ops, net, op, shape[-count - 1], count)
    if expected is not None and expected != sizes:
        sizes = expected
        _flatten(ops, op)
    args: tuple[Arg, ...] = (op.args[0], sizes)
    ops.put(op, replace(op, target=f"aten::adaptive_avg_pool{count}d", args=args, kwargs={}))


def _from_linear(ops: Ops, net: Net, op: Op, channels: int, count: int) -> tuple[int, ...] | None:
    """Sizes that make `flatten` + `linear` fit, if they are equal in all directions."""
    view = ops.only_reader(op.outputs[0])
    if view is None or view.base != "aten::view":
        return None
    linear = ops.only_reader(view.outputs[0])
    if linear is None or linear.base != "aten::linear" or not isinstance(linear.args[1], Ref):
        return None
    weight = net.shape(linear.args[1].name)
    if weight is None or len(weight) != 2 or channels == 0 or weight[1] % channels:
        return None
    side = round((weight[1] // channels) ** (1 / count))
    return (side,) * count if math.pow(side, count) * channels == weight[1] else None


def _flatten(ops: Ops, op: Op) -> None:
    view = ops.only_reader(op.outputs[0])
    if view is not None:
        ops.put(view, replace(view, target="aten::flatten.using_ints", args=(view.args[0], 1), kwargs={}))
