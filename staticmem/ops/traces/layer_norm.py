"""Layer and RMS norm, forward and backward as torch/_refs (`native_layer_norm`) and torch/_decomp/decompositions.py
(`native_layer_norm_backward`, `_fused_rms_norm`, `_fused_rms_norm_backward`) have them: in float32 for half precision.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, reduced

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


@traced("layer_norm")
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

    t.record(out, [input, weight], gradient)
    return out
