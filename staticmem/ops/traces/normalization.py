"""Batch, instance, group, layer and RMS norm, and norms of weights.

Sources: torch/_decomp/decompositions.py (`native_batch_norm_helper`, `native_batch_norm_backward`,
`native_group_norm_backward`, `native_layer_norm_backward`, `_fused_rms_norm`, `_fused_rms_norm_backward`,
`_weight_norm_interface`), torch/_refs (`native_group_norm`, `native_layer_norm`),
aten/src/ATen/native/Normalization.cpp (`instance_norm`). What eager code does by one of several kernels
(`_select_batch_norm_backend`) decomposes to the same nodes. The kernel of the gradients of a weight norm has no
decomposition (`make_fallback` of torch/_inductor/lowering.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.arithmetic import div, mul
from staticmem.ops.traces.reduction import norm
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.views import contiguous, transpose, view
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, reduced


def _to_rank(t: Tracer, self: Node, rank: int) -> Node:
    for _ in range(rank - self.ndim):
        self = t.unsqueeze(self, -1)
    return self


def _spread(t: Tracer, self: Node, shape: Sequence[int]) -> Node:
    """`_broadcast_batch_norm_backward`: [C] as [1, C, 1, 1]."""
    for axis, size in enumerate(shape):
        if size == 1 and not (axis < self.ndim and self.shape[axis] == size):
            self = t.unsqueeze(self, axis)
    return self


class _Statistics:
    """Buffers and their momentum; `update` gives the new values."""

    def __init__(self, mean: Node | None, var: Node | None, momentum: float) -> None:
        self.mean, self.var, self.momentum = mean, var, momentum

    def moved(self, t: Tracer, old: Node, new: Node) -> Node:
        return t.add(t.mul(new, self.momentum), t.mul(old, 1 - self.momentum))


def _normalize(
    t: Tracer, input: Node, weight: Node | None, bias: Node | None, running: _Statistics, training: bool, eps: float
) -> tuple[Node, Node | None, Node | None]:
    """The result, recorded, and the new statistics."""
    dims = (0, *range(2, input.ndim))
    mean, rstd, out, statistics = (_measured if training else _given)(t, input, running, dims, eps)
    if weight is not None:
        out = t.mul(out, _to_rank(t, weight, input.ndim - 1))
    if bias is not None:
        out = t.add(out, _to_rank(t, bias, input.ndim - 1))
    out = t.cast(out, input.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        saved = (mean, rstd) if training else (running.mean, running.var)
        return _backward(t, grads[0], input, weight, saved, training, eps, need)

    t.record(out, [input, weight, bias], gradient)
    return out, *statistics


def _measured(t: Tracer, input: Node, running: _Statistics, dims: tuple[int, ...], eps: float) -> Any:
    wide = t.opmath(input)
    shape = tuple([1 if k in dims else size for k, size in enumerate(input.shape)])
    forms = [form(shape, wide.dtype)] * 2
    var, mean = t.several("aten::var_mean.correction", (wide, dims), forms, correction=0, keepdim=True)
    rstd = t.pointwise("aten::rsqrt", t.add(var, eps))
    out = t.mul(t.sub(input, mean), rstd)
    save_mean, save_rstd = t.squeeze(mean, dims), t.squeeze(rstd, dims)
    new_mean = new_var = None
    if running.mean is not None:
        new_mean = running.moved(t, running.mean, save_mean)
    if running.var is not None:
        n = input.numel / input.shape[1]
        new_var = running.moved(t, running.var, t.mul(t.squeeze(var, dims), n / (n - 1) if n != 1 else float("inf")))
    return save_mean, save_rstd, out, (new_mean, new_var)


def _given(t: Tracer, input: Node, running: _Statistics, dims: tuple[int, ...], eps: float) -> Any:
    """By copies of the running statistics in the computation's dtype, also where they have it."""
    assert running.mean is not None
    assert running.var is not None
    dtype = t.computes_in(input.dtype)
    mean, var = [
        t.new("prims::convert_element_type", (node, dtype), node.shape, dtype) for node in (running.mean, running.var)
    ]
    rstd = t.pointwise("aten::rsqrt", t.add(var, eps))
    mean, rstd = _to_rank(t, mean, input.ndim - 1), _to_rank(t, rstd, input.ndim - 1)
    out = t.mul(t.sub(input, mean), rstd)
    return None, None, out, (None, None)


def _backward(
    t: Tracer, grad: Node, input: Node, weight: Node | None, saved: Any, training: bool, eps: float,
    need: Sequence[bool],
) -> Gradients:  # fmt: skip
    dtype = dtypes.float32 if weight is None else weight.dtype
    grad_, x = t.opmath(grad), t.opmath(input)
    scale_of = None if weight is None else t.opmath(weight)
    mean, rstd = [t.opmath(node) for node in saved]
    if not training:
        rstd = t.pointwise("aten::rsqrt", t.add(rstd, eps))
    dims = (0, *range(2, input.ndim))
    shape = [input.shape[1] if k == 1 else 1 for k in range(input.ndim)]
    norm = 1.0 / (input.numel / input.shape[1])
    mean = _spread(t, mean, shape)
    total = t.sum(grad_, dims)
    dot = t.sum(t.mul(grad_, t.sub(x, mean)), dims)
    by_mean = projection = None
    if training:
        by_mean = _spread(t, t.mul(total, norm), shape)
        projection = _spread(t, t.mul(t.mul(dot, norm), t.mul(rstd, rstd)), shape)
    scale = t.mul(_spread(t, rstd, shape), 1.0) if scale_of is None else _spread(t, t.mul(rstd, scale_of), shape)
    if training:
        rest = t.sub(grad_, t.mul(t.sub(x, mean), projection))
        by_input = t.mul(t.sub(rest, by_mean), scale)
    else:
        by_input = t.mul(grad_, scale)
    by_weight = t.mul(dot, rstd) if need[1] else None
    by_input = t.cast(by_input, input.dtype)
    return [by_input, by_weight and t.cast(by_weight, dtype), t.cast(total, dtype) if need[2] else None]


@traced("batch_norm")
def batch_norm(
    t: Tracer, input: Node, weight: Node | None, bias: Node | None, running_mean: Node | None,
    running_var: Node | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Node:  # fmt: skip
    if not t.training and running_mean is not None:
        training = False  # model.eval(); without running statistics it stays as it was exported
    now = [None if buffer is None else t.writes.get(buffer, buffer) for buffer in (running_mean, running_var)]
    running = _Statistics(now[0], now[1], momentum)
    out, new_mean, new_var = _normalize(t, input, weight, bias, running, training or None in now, eps)
    for buffer, new in ((running_mean, new_mean), (running_var, new_var)):
        if buffer is not None and new is not None:
            t.writes[buffer] = t.cast(new, buffer.dtype)
    return out


@traced("instance_norm")
def instance_norm(
    t: Tracer, input: Node, weight: Node | None, bias: Node | None, running_mean: Node | None,
    running_var: Node | None, use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Node:  # fmt: skip
    """A batch norm of one sample with batch * channels features; statistics are means over the batch."""
    batch, channels = input.shape[:2]
    if not t.training and running_mean is not None:
        use_input_stats = False
    buffers = [None if buffer is None else t.writes.get(buffer, buffer) for buffer in (running_mean, running_var)]
    weight, bias, mean, var = [None if node is None else _repeat(t, node, batch) for node in (weight, bias, *buffers)]
    flat = view(t, input, (1, batch * channels, *input.shape[2:]))
    running = _Statistics(mean, var, momentum)
    out, *new = _normalize(t, flat, weight, bias, running, use_input_stats or mean is None, eps)
    for buffer, value in zip((running_mean, running_var), new, strict=True):
        if buffer is not None and value is not None:
            mean_of_batch = t.reduce("aten::mean.dim", t.view(value, (batch, channels)), (0,))
            t.writes[buffer] = t.new("aten::copy", (buffer, mean_of_batch), buffer.shape, buffer.dtype)
    return view(t, out, input.shape)


def _repeat(t: Tracer, self: Node, times: int) -> Node:
    out = t.new("aten::repeat", (self, (times,)), (times * self.numel,), self.dtype)

    def gradient(grad: Node) -> Node:
        """`repeat_backward`."""
        assert grad is not None
        return t.sum(t.view(grad, (times, self.numel)), (0,))

    return t.derive(out, self, gradient)


@traced("group_norm", calls="native_group_norm")
def group_norm(
    t: Tracer, input: Node, num_groups: int, weight: Node | None = None, bias: Node | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Node:  # fmt: skip
    """Statistics are saved in the input's dtype. On CUDA the input is contiguous, never channels last
    (`group_norm` of aten/src/ATen/native/group_norm.cpp)."""
    batch, channels = input.shape[:2]
    inner, per = input.numel // (batch * channels), channels // num_groups
    if channels % num_groups:
        raise ValueError(f"{channels} channels in {num_groups} groups")
    dense = layout.contiguous_strides(input.shape)
    x = input if input.strides == dense else t.clone(input, dense)
    wide = t.opmath(x)
    flat = t.view(wide, (batch, num_groups, per, inner))
    forms = [form((batch, num_groups, 1, 1), wide.dtype)] * 2
    var, mean = t.several("aten::var_mean.correction", (flat, (2, 3)), forms, correction=0, keepdim=True)
    rstd = t.pointwise("aten::rsqrt", t.add(var, eps))
    out = t.view(t.mul(t.sub(flat, mean), rstd), input.shape)
    shape = [channels if k == 1 else 1 for k in range(input.ndim)]
    if weight is not None:
        out = t.mul(out, _spread(t, weight, shape))
    if bias is not None:
        out = t.add(out, _spread(t, bias, shape))
    out = t.cast(out, input.dtype)
    saved_mean, saved_rstd = t.cast(mean, input.dtype), t.cast(rstd, input.dtype)
    saved_mean, saved_rstd = t.squeeze(saved_mean, (2, 3)), t.squeeze(saved_rstd, (2, 3))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        sizes = (batch, channels, inner, num_groups)
        return _group_backward(t, grads[0], x, (saved_mean, saved_rstd), weight, sizes, need)

    return t.record(out, [input, weight, bias], gradient)


def _group_backward(
    t: Tracer, grad: Node, x: Node, saved: tuple[Node, Node], weight: Node | None, sizes: tuple[int, int, int, int],
    need: Sequence[bool],
) -> Gradients:  # fmt: skip
    batch, channels, inner, groups = sizes
    per = channels // groups
    grad_, x_, mean, rstd = t.opmath(grad), t.opmath(x), t.opmath(saved[0]), t.opmath(saved[1])
    gamma = None if weight is None else t.opmath(weight)
    ds = t.sum(t.view(t.mul(grad_, x_), (batch, channels, inner)), (2,))
    db = t.sum(t.view(grad_, (batch, channels, inner)), (2,))
    by_input = by_weight = None
    if need[0]:
        s = 1.0 / (inner * per)

        def over_groups(value: Node) -> Node:
            value = value if gamma is None else t.mul(value, t.unsqueeze(gamma, 0))
            return t.sum(t.view(value, (batch, groups, per)), (2,))

        ds_val, db_val = over_groups(ds), over_groups(db)
        spread = t.unsqueeze(rstd, -1)
        ones = t.full((1, groups, per), 1) if gamma is None else t.view(gamma, (1, groups, per))
        c1 = t.mul(spread, ones)
        c2 = t.pointwise("aten::addcmul", t.pointwise("aten::neg", ds_val), db_val, mean)
        c2 = t.mul(t.mul(t.mul(t.mul(c2, rstd), rstd), rstd), s)
        c3 = t.mul(t.pointwise("aten::neg", c2), mean)
        c3 = t.sub(c3, t.mul(t.mul(db_val, rstd), s))
        c1, c2, c3 = t.unsqueeze(c1, -1), _to_rank(t, c2, 4), _to_rank(t, c3, 4)
        parts = (batch, groups, per, inner)
        by_input = t.mul(t.view(grad_, parts), c1)
        by_input = t.add(t.add(by_input, t.mul(t.view(x_, parts), c2)), c3)
        by_input = t.view(by_input, x.shape)
        if layout.prefers_channels_last(x.shape, x.strides):
            by_input = t.clone(by_input, layout.channels_last_strides(x.shape))
    if need[1]:
        parts3 = (batch, groups, per)
        ds3, db3 = t.view(ds, parts3), t.view(db, parts3)
        centered = t.sub(ds3, t.mul(db3, t.unsqueeze(mean, -1)))
        by_weight = t.view(t.sum(t.mul(centered, t.unsqueeze(rstd, -1)), (0,)), (channels,))
    by_bias = t.sum(db, (0,)) if need[2] else None
    return [by_input, by_weight, by_bias]


_EPSILON = {"float64": 2.220446049250313e-16}  # torch.finfo(...).eps; others are computed in float32

_EPSILON_32 = 1.1920928955078125e-07


def _computed(t: Tracer, node: Node) -> Node:
    """`.to(computation_dtype, memory_format=contiguous_format)`: a copy after a conversion, and one where the strides
    suggest another format."""
    wide = t.opmath(node)
    return t.clone(wide) if wide is not node or layout.prefers_channels_last(node.shape, node.strides) else node


def _axes(input: Node, normalized_shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """The dimensions that are normalized, and those before them."""
    axis = input.ndim - len(normalized_shape)
    if axis < 0 or input.shape[axis:] != tuple(normalized_shape):
        raise ValueError(f"a norm over {list(normalized_shape)} of sizes {list(input.shape)}")
    return list(range(axis, input.ndim)), list(range(axis))


@traced("layer_norm", calls="native_layer_norm")
def layer_norm(
    t: Tracer, input: Node, normalized_shape: Sequence[int], weight: Node | None = None, bias: Node | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Node:  # fmt: skip
    return native_layer_norm(t, input, normalized_shape, weight, bias, eps)[0]


@traced("native_layer_norm")
def native_layer_norm(
    t: Tracer, input: Node, normalized_shape: Sequence[int], weight: Node | None, bias: Node | None, eps: float
) -> list[Node]:
    inner, outer = _axes(input, normalized_shape)
    given = t.contiguous(input)
    wide = t.opmath(given)
    small = form(reduced(input.shape, inner, True), wide.dtype)
    kwargs = {"correction": 0, "keepdim": True}
    call = t.node("aten::var_mean.correction", (wide, tuple(inner)), (small, small), kwargs)
    var, mean = (t.node("operator::getitem", (call, k), small) for k in range(2))
    rstd = t.pointwise("aten::rsqrt", t.pointwise("aten::add.Tensor", var, eps))
    out = t.pointwise("aten::mul.Tensor", t.pointwise("aten::sub.Tensor", wide, mean), rstd)
    if weight is not None:
        out = t.pointwise("aten::mul.Tensor", out, t.contiguous(weight))
    if bias is not None:
        out = t.pointwise("aten::add.Tensor", out, t.contiguous(bias))
    out = t.cast(out, input.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return _layer_norm_gradients(t, grads[0], input, (mean, rstd), (weight, bias), (inner, outer), need)

    t.record(out, [input, weight, bias], gradient)
    return [out, mean, rstd]


def _layer_norm_gradients(
    t: Tracer, grad: Node, input: Node, statistics: tuple[Node, Node], affine: tuple[Node | None, Node | None],
    axes: tuple[list[int], list[int]], need: Sequence[bool],
) -> list[Node | None]:  # fmt: skip
    (mean, rstd), (weight, bias), (inner, outer) = statistics, affine, axes
    mul, sub = "aten::mul.Tensor", "aten::sub.Tensor"
    grad, wide = _computed(t, grad), _computed(t, input)
    scale = None if weight is None else _computed(t, weight)
    count = layout.numel([input.shape[d] for d in inner])
    normalized = t.pointwise(mul, t.pointwise(sub, wide, mean), rstd)
    scaled = grad if scale is None else t.pointwise(mul, grad, scale)
    a = t.pointwise(mul, scaled, count)
    b = t.sum(scaled, inner, True)
    c = t.pointwise(mul, normalized, t.sum(t.pointwise(mul, scaled, normalized), inner, True))
    difference = t.pointwise(sub, t.pointwise(sub, a, b), c)
    by_input = by_weight = by_bias = None
    if need[0]:
        by_input = t.pointwise(mul, t.pointwise("aten::div.Tensor", rstd, count), difference)
    if need[1] and weight is not None:
        by_weight = t.pointwise(mul, grad, normalized)
        by_weight = t.sum(by_weight, outer) if outer else by_weight
    if need[2] and bias is not None:
        by_bias = t.sum(grad, outer) if outer else t.clone(grad)
    results = zip((by_input, by_weight, by_bias), (input, weight, bias), strict=True)
    return [None if by is None or of is None else t.cast(by, of.dtype) for by, of in results]


@traced("rms_norm")
def rms_norm(
    t: Tracer, input: Node, normalized_shape: Sequence[int], weight: Node | None = None, eps: float | None = None
) -> Node:
    """Fused unless the weight has another dtype, in which case it is composed (`rms_norm_symint`)."""
    inner, outer = _axes(input, normalized_shape)
    if weight is not None and weight.dtype is not input.dtype:
        raise ValueError("rms_norm with a weight of another dtype is not traced")
    dtype = t.computes_in(input.dtype)
    eps = eps if eps is not None else _EPSILON.get(dtype.name, _EPSILON_32)
    wide = t.opmath(input)
    squares = t.pointwise("aten::pow.Tensor_Scalar", wide, 2)
    mean = t.reduce("aten::mean.dim", squares, inner[::-1], True)
    rstd = t.pointwise("aten::rsqrt", t.pointwise("aten::add.Scalar", mean, eps))
    out = t.pointwise("aten::mul.Tensor", wide, rstd)
    if weight is not None:
        out = t.pointwise("aten::mul.Tensor", out, weight)
    if not layout.prefers_channels_last(input.shape, input.strides):
        out = t.contiguous(out)
    out = t.cast(out, input.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        mul = "aten::mul.Tensor"
        grad, given = _computed(t, grads[0]), _computed(t, input)
        scale = None if weight is None else _computed(t, weight)
        scaled = grad if scale is None else t.pointwise(mul, grad, scale)
        normalized = t.pointwise(mul, given, rstd)
        by_input = by_weight = None
        if need[0]:
            total = t.sum(t.pointwise(mul, normalized, scaled), inner, True)
            part = t.pointwise(mul, t.pointwise("aten::div.Tensor", normalized, layout.numel(normalized_shape)), total)
            by_input = t.cast(t.pointwise(mul, t.pointwise("aten::sub.Tensor", scaled, part), rstd), input.dtype)
        if need[1]:
            by_weight = t.pointwise(mul, grad, normalized)
            by_weight = t.cast(t.sum(by_weight, outer) if outer else by_weight, input.dtype)
        return [by_input, by_weight]

    return t.record(out, [input, weight], gradient)


@traced("_weight_norm")
def weight_norm(t: Tracer, v: Node, g: Node, dim: int = 0) -> Node:
    """`v * (g / norm(v))`. With the norm over all dimensions but the first or the last one it is a kernel, which
    computes in float32 for half types; else it is made of other ops (`norm_except_dim`).

    Raises:
        ValueError: there is one dimension.
    """
    over = tuple([axis for axis in range(v.ndim) if axis != dim])
    if not over:
        raise ValueError("weight norm of one dimension")
    if dim == -1:
        return mul(t, v, div(t, g, norm(t, v)))
    if dim not in (0, v.ndim - 1):
        turned = contiguous(t, transpose(t, v, 0, dim))
        lengths = norm(t, view(t, turned, (v.shape[dim], v.numel // v.shape[dim])), 2, 1)
        lengths = transpose(t, view(t, lengths, (v.shape[dim], *(1,) * (v.ndim - 1))), 0, dim)
        return mul(t, v, div(t, g, lengths))
    v, g = contiguous(t, v), contiguous(t, g)
    total = t.sum(t.pointwise("aten::pow.Tensor_Scalar", t.opmath(v), 2), over, True)
    root = t.pointwise("aten::pow.Tensor_Scalar", total, 0.5)
    out = t.mul(v, t.div(g, t.cast(root, g.dtype)))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        parts = form(v.shape, v.dtype), form(g.shape, g.dtype)
        args = (contiguous(t, grads[0]), v, g, root, dim)
        call = t.node("aten::_weight_norm_interface_backward", args, parts)
        return [t.node("operator::getitem", (call, k), part) for k, part in enumerate(parts)]

    return t.record(out, [v, g], gradient)
