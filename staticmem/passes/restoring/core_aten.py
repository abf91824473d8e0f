"""Undoes what torch.export's decomposition to core ATen did to the calls that eager PyTorch makes.

Exporting for ONNX runs `run_decompositions`: composite ops become their parts, in-place ops become functional, and
`contiguous` becomes `clone`. Memory depends on the original calls, so they are put back
(torch/_decomp/decompositions.py and torch/export/exported_program.py say what was taken apart).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from staticmem.ir.graph import Arg, Graph, Note, Op, Ref
from staticmem.ir.onnx_graph import Net
from staticmem.ops.registry import kinds_of, one_name
from staticmem.passes.edit import Ops

_PLACEMENT = ("device", "pin_memory", "layout", "non_blocking")


def names_once(graph: Graph, source: object = None) -> tuple[Graph, Sequence[Note]]:
    """The graph with one name for each op that has several."""
    ops = [op.changed(target=one_name(op.target)) if "alias" in kinds_of(op.base) else op for op in graph.ops]
    return graph.with_targets(tuple(ops)), ()


def promotions(ops: Ops, net: Net) -> None:
    """Sums of integers and bools promote inside one kernel; the decomposition casts before them."""
    for op in ops.of("prims::convert_element_type"):
        reader = ops.only_reader(op.outputs[0])
        if isinstance(op.args[0], Ref) and reader is not None and "running" in kinds_of(reader.base):
            ops.alias(op, op.args[0].name)


def plain_calls(ops: Ops, net: Net) -> None:
    """Each op becomes the call that eager makes, where that does not depend on its neighbours."""
    for op in list(ops.ops):
        if op is not None and op.outputs:
            changed = _single(op)
            if changed is not op:
                ops.put(op, changed)


def _single(op: Op) -> Op:
    rule = _RULES.get(op.base)
    if op.kwargs and any(key in op.kwargs for key in _PLACEMENT):
        op = replace(op, kwargs={k: v for k, v in op.kwargs.items() if k not in _PLACEMENT})
    return rule(op) if rule is not None else op


def _call(op: Op, target: str, *args: Arg, outputs: int = 1, **kwargs: Arg) -> Op:
    return replace(op, target=target, args=args, kwargs=kwargs, outputs=op.outputs[:outputs])


def _pad(args: tuple[Arg, ...], *defaults: Arg) -> list[Arg]:
    return [*args, *defaults[len(args) :]]


def _sub(op: Op) -> Op:
    """A number minus a tensor is `rsub`: `1 - x`."""
    number = len(op.args) == 2 and isinstance(op.args[0], (int, float)) and isinstance(op.args[1], Ref)
    return _call(op, "aten::rsub.Scalar", op.args[1], op.args[0]) if number else op


_STATISTICS: tuple[Arg, ...] = (None,) * 5  # x, weight, bias, mean, var
_TRAINED = (*_STATISTICS, True, 0.1, 1e-5), (0, 1, 2, 3, 4, 5, 6, 7, True)
_EVALUATED = (*_STATISTICS, 0.1, 1e-5), (0, 1, 2, 3, 4, False, 5, 6, True)
# target -> the call of eager code, defaults of the arguments, and the arguments of that call: positions, or True, False
_ORDERED: dict[str, tuple[str, tuple[Arg, ...], tuple[int, ...]]] = {
    "aten::_native_batch_norm_legit_functional": ("aten::batch_norm", *_TRAINED),
    "aten::_native_batch_norm_legit": ("aten::batch_norm", *_TRAINED),
    "aten::native_batch_norm": ("aten::batch_norm", *_TRAINED),
    "aten::_batch_norm_with_update_functional": (
        "aten::batch_norm",
        (*_STATISTICS, 0.1, 1e-5),
        (0, 1, 2, 3, 4, True, 5, 6, True),
    ),
    "aten::_native_batch_norm_legit_no_training": ("aten::batch_norm", *_EVALUATED),
    "aten::_batch_norm_no_update": ("aten::batch_norm", *_EVALUATED),
    "aten::native_layer_norm": ("aten::layer_norm", (None, (), None, None, 1e-5), (0, 1, 2, 3, 4)),
    "aten::native_group_norm": ("aten::group_norm", (None, None, None, 0, 0, 0, 1, 1e-5), (0, 6, 1, 2, 7)),
    "aten::_softmax": ("aten::softmax.int", (None, None), (0, 1)),
    "aten::_log_softmax": ("aten::log_softmax.int", (None, None), (0, 1)),
}


def _ordered(op: Op) -> Op:
    target, defaults, order = _ORDERED[op.base]
    if op.target.endswith("legit.no_stats"):  # x, weight, bias, training, momentum, eps
        x, weight, bias, training, momentum, eps = _pad(op.args, None, None, None, True, 0.1, 1e-5)[:6]
        return _call(op, target, x, weight, bias, None, None, training, momentum, eps, True)
    args = _pad(op.args, *defaults)
    return _call(op, target, *[place if isinstance(place, bool) else args[place] for place in order])


def _dropout(op: Op) -> Op:
    x, p, train = _pad(op.args, None, 0.5, True)[:3]
    return _call(op, "aten::dropout", x, p, train is not False)


def _to(op: Op) -> Op:
    dtype = op.args[1] if len(op.args) > 1 else op.kwargs.get("dtype")
    kept = {name: value for name, value in op.kwargs.items() if name == "memory_format" and value is not None}
    if dtype is None:
        return replace(_call(op, "aten::clone", op.args[0]), kwargs=kept)
    return replace(_call(op, "aten::to.dtype", op.args[0], dtype), kwargs=kept)


def _convolution(op: Op) -> Op:
    defaults: tuple[Arg, ...] = (None, None, None, (1,), (0,), (1,), False, (0,), 1)
    x, weight, bias, stride, padding, dilation, transposed, out_padding, groups = _pad(op.args, *defaults)[:9]
    dims = len(stride) if isinstance(stride, tuple) else 2
    if transposed:
        target = f"aten::conv_transpose{dims}d" + (".input" if dims > 1 else "")
        return _call(op, target, x, weight, bias, stride, padding, out_padding, groups, dilation)
    return _call(op, f"aten::conv{dims}d", x, weight, bias, stride, padding, dilation, groups)


def _max_pool(op: Op) -> Op:
    if len(op.outputs) > 1:
        return op
    return replace(op, target=op.target.replace("_with_indices", ""))


_RULES: dict[str, Callable[[Op], Op]] = {
    **dict.fromkeys(_ORDERED, _ordered),
    "aten::native_dropout": _dropout,
    "aten::_to_copy": _to,
    "prims::convert_element_type": _to,
    "aten::convolution": _convolution,
    "aten::sub": _sub,
    "aten::max_pool2d_with_indices": _max_pool,
    "aten::max_pool3d_with_indices": _max_pool,
    "aten::minimum": lambda op: replace(op, target="aten::min.other"),
    "aten::maximum": lambda op: replace(op, target="aten::max.other"),
}


def inline_scalars(ops: Ops, net: Net) -> None:
    """`scalar_tensor` as an argument of arithmetic is a Python number in eager code."""
    for op in list(ops.ops):
        if op is None or op.base == "aten::scalar_tensor":
            continue
        for position, arg in enumerate(op.args):
            maker = ops.made_by(arg)
            if maker is None or maker.target != "aten::scalar_tensor":
                continue
            value = maker.args[0] if maker.args else None
            swapped = position == 0 and op.target == "aten::sub.Tensor" and len(op.args) == 2
            if isinstance(value, (int, float)) and (swapped or _takes_scalar(op, position)):
                args = (*op.args[:position], value, *op.args[position + 1 :])
                compares = "comparison" in kinds_of(op.base)
                target = op.target.removesuffix(".Tensor") + ".Scalar" if compares else op.target
                if swapped:  # `1 - x`
                    args, target = args[::-1], "aten::rsub.Scalar"
                new = replace(op, args=args, target=target)
                ops.put(op, new)
                op = new
                ops.readers[maker.outputs[0]].remove(ops.producer[op.outputs[0]])
                if not ops.readers[maker.outputs[0]]:
                    ops.drop(maker)


def _takes_scalar(op: Op, position: int) -> bool:
    return position == 1 and not kinds_of(op.base).isdisjoint(("arithmetic", "comparison"))


_SAME = ("aten::alias", "aten::lift_fresh_copy", "aten::lift_fresh", "aten::_assert_tensor_metadata")


def drop_aliases(ops: Ops, net: Net) -> None:
    """Ops that exist in exports only."""
    for op in list(ops.ops):
        if op is None or not op.outputs:
            continue
        if op.base in _SAME and op.args and isinstance(op.args[0], Ref):
            ops.alias(op, op.args[0].name)
        elif "check" in kinds_of(op.base) and not any(ops.readers.get(n) for n in op.outputs):
            ops.drop(op)


def reshapes(ops: Ops, net: Net) -> None:
    """`clone(contiguous)` + `_unsafe_view` is `reshape` of a tensor whose strides allow no view; a clone to a
    contiguous format alone is `contiguous()`."""
    for op in ops.of("aten::clone"):
        if not op.args:
            continue
        layout = str(op.kwargs.get("memory_format", ""))
        if "contiguous" not in layout:
            if not layout and isinstance(op.args[0], Ref) and ops.made_by(op.args[0]) is not None and not _copies(op):
                # `dropout(p=0)` is decomposed to a clone, but eager returns its input (ATen/native/Dropout.cpp)
                ops.put(op, replace(op, target="aten::dropout", args=(op.args[0], 0.0, True)))
            continue
        reader = ops.only_reader(op.outputs[0])
        if reader is not None and reader.base == "aten::_unsafe_view":
            ops.drop(op)
            ops.put(reader, replace(reader, target="aten::reshape", args=(op.args[0], reader.args[1])))
        else:
            ops.put(op, replace(op, target="aten::contiguous", args=op.args[:1], kwargs={}))
    for op in ops.of("aten::_unsafe_view", "aten::view"):
        if op.base == "aten::_unsafe_view":
            ops.put(op, replace(op, target="aten::view"))
        elif op.target == "aten::view" and _flattens(op, net):
            ops.put(op, replace(op, target="aten::flatten.using_ints", args=(op.args[0], 1)))


def _copies(op: Op) -> bool:
    """Whether the line of a clone asks for one."""
    return bool(op.stack) and re.search(r"\bclone\(", op.stack[-1].text) is not None


def packed_projection(ops: Ops, net: Net) -> None:
    """`nn.MultiheadAttention` makes its packed projection contiguous; optimised exports drop that as an identity
    (torch/nn/functional.py, `_in_projection_packed`)."""
    for index, op in enumerate(list(ops.ops)):
        if op is None or op.target != "aten::squeeze.dim" or not op.modules:
            continue
        turned = ops.made_by(op.args[0])
        added = ops.made_by(turned.args[0]) if turned is not None and turned.base == "aten::transpose" else None
        readers = [ops.ops[i] for i in ops.readers.get(op.outputs[0], ())]
        if added is None or added.base != "aten::unsqueeze" or not op.modules[-1].cls.endswith(".MultiheadAttention"):
            continue
        if len(readers) == 3 and all(r is not None and r.base == "aten::select" for r in readers):
            strided = f"{op.outputs[0]}::strided"
            ops.ops[index] = replace(op, outputs=(strided,))
            ops.insert(index + 1, replace(op, target="aten::contiguous", args=(Ref(strided),)))


def _flattens(op: Op, net: Net) -> bool:
    """Whether a view joins all axes but the first of an image: `torch.flatten(x, 1)`."""
    size = op.args[1]
    if not isinstance(size, tuple) or len(size) != 2 or not isinstance(op.args[0], Ref):
        return False
    shape = net.shape(op.args[0].name)
    return shape is not None and len(shape) == 4 and size == (shape[0], math.prod(shape[1:]))


def differences(ops: Ops, net: Net) -> None:
    """`diff(x, 1, dim, prepend)` is decomposed to `cat`, two slices and `sub`."""
    for op in ops.of("aten::sub"):
        if op.target != "aten::sub.Tensor" or len(op.args) != 2:
            continue
        late, early = ops.made_by(op.args[0]), ops.made_by(op.args[1])
        if late is None or early is None or late.base != "aten::slice" or early.base != "aten::slice":
            continue
        joined = ops.made_by(late.args[0])
        if joined is None or joined.base != "aten::cat" or early.args[0] != late.args[0]:
            continue
        parts = joined.args[0]
        dim = joined.args[1] if len(joined.args) > 1 else 0
        if late.args[1:3] != (dim, 1) or early.args[1:3] != (dim, 0) or not isinstance(parts, tuple):
            continue
        if len(parts) != 2 or len(ops.readers[joined.outputs[0]]) != 2:
            continue
        if any(ops.only_reader(part.outputs[0]) is not op for part in (late, early)):
            continue
        for part in (late, early, joined):
            ops.drop(part)
        ops.put(op, replace(op, target="aten::diff", args=(parts[1], 1, dim, parts[0])))


def adaptive_pools(ops: Ops, net: Net) -> None:
    """Puts `adaptive_avg_pool` back where the module says so."""
    for op in list(ops.ops):
        if op is None:
            continue
        adaptive = bool(op.modules) and op.modules[-1].cls.rpartition(".")[2].startswith("AdaptiveAvgPool")
        if op.target == "aten::mean.dim" and (adaptive or op.args[1:] == ((-1, -2), True)):
            _mean_pool(ops, op)  # the decomposition writes these dims in this order
        elif adaptive and op.base in ("aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d"):
            _adaptive_pool(ops, net, op)


def _mean_pool(ops: Ops, op: Op) -> None:
    dims = op.args[1]
    count = len(dims) if isinstance(dims, tuple) else 1
    ops.put(op, replace(op, target=f"aten::adaptive_avg_pool{count}d", args=(op.args[0], (1,) * count), kwargs={}))
    strided = ops.only_reader(op.outputs[0])
    if strided is not None and strided.base == "aten::as_strided" and strided.modules == op.modules:
        ops.alias(strided, op.outputs[0])  # the channels-last strides of the decomposition


def _adaptive_pool(ops: Ops, net: Net, op: Op) -> None:
    """The output size is the file's, unless a linear layer after it says that another one was meant: kernel sizes
    were fixed for the size at export."""
    shape = net.shape(op.outputs[0])
    count = int(op.base[-2])
    if shape is None or len(shape) < count + 1:
        return
    sizes = shape[-count:]
    expected = _find_sizes_before_linear(ops, net, op, shape[-count - 1], count)
    if expected is not None and expected != sizes:
        sizes = expected
        _flatten_after(ops, op)
    args: tuple[Arg, ...] = (op.args[0], sizes)
    ops.put(op, replace(op, target=f"aten::adaptive_avg_pool{count}d", args=args, kwargs={}))


def _find_sizes_before_linear(ops: Ops, net: Net, op: Op, channels: int, count: int) -> tuple[int, ...] | None:
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


def _flatten_after(ops: Ops, op: Op) -> None:
    view = ops.only_reader(op.outputs[0])
    if view is not None:
        ops.put(view, replace(view, target="aten::flatten.using_ints", args=(view.args[0], 1), kwargs={}))
