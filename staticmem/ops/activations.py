"""Activations and clamps.

The gradient of a row is one kernel (tools/autograd/derivatives.yaml).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.onnx import Context, declare_sizes, like_first, one_input, real, text, translation
from staticmem.ops.pointwise import Unary, clone_for_backward, define_unary, fused, grad_of, gradient_like, inplace
from staticmem.ops.registry import rule
from staticmem.ops.views import reshape

# those that torch.nn.functional and a class of torch.nn run in place where they are asked to
_BY_ARGUMENT = (
    Unary("relu", "ReluBackward0", fused("threshold_backward", "result", first=True)),
    Unary("relu6", "HardtanhBackward0", fused("hardtanh_backward", "self", first=True)),
    Unary("hardtanh", "HardtanhBackward0", fused("hardtanh_backward", "self", first=True)),
    Unary("silu", "SiluBackward0", fused("silu_backward", "self")),
    Unary("mish", "MishBackward0", fused("mish_backward", "self")),
    Unary("hardswish", "HardswishBackward0", fused("hardswish_backward", "self", first=True)),
    Unary("hardsigmoid", "HardsigmoidBackward0", fused("hardsigmoid_backward", "self", first=True)),
    Unary("leaky_relu", "LeakyReluBackward0", fused("leaky_relu_backward", "self", first=True), inplace_saves="result"),
    Unary("elu", "EluBackward0", fused("elu_backward", "self", first=True), inplace_saves="result"),
    Unary("selu", "EluBackward0", fused("elu_backward", "self", first=True), inplace_saves="result"),
    Unary("celu", "EluBackward0", fused("elu_backward", "self", first=True), inplace_saves="result"),
    Unary("threshold", "ThresholdBackward0", fused("threshold_backward", "self", first=True)),
)
_OTHERS = (
    Unary("sigmoid", "SigmoidBackward0", fused("sigmoid_backward", "result"), also="special_expit"),
    Unary("tanh", "TanhBackward0", fused("tanh_backward", "result")),
    Unary("gelu", "GeluBackward0", fused("gelu_backward", "self")),
    Unary("softplus", "SoftplusBackward0", fused("softplus_backward", "self", first=True), "float32", in_place=False),
    Unary("softshrink", "SoftshrinkBackward0", fused("softshrink_backward", "self"), in_place=False),
    Unary("hardshrink", "HardshrinkBackward0", fused("hardshrink_backward", "self"), in_place=False),
    Unary("log_sigmoid", "LogSigmoidBackward0", fused("log_sigmoid_backward", "self"), in_place=False),
)
for _row in _BY_ARGUMENT:
    define_unary(_row, ("activation",))
for _row in _OTHERS:
    define_unary(_row)
TABLE = _BY_ARGUMENT + _OTHERS
MISH = "Softplus, Tanh, Mul"  # `Op.source` of what may be `mish`, or the product that the code has written
SWISH = "Sigmoid, Mul"  # `Op.source` of what may be `silu`, or a product with `sigmoid` that the code has written
# ATen names, in either form, of ops whose in-place form saves its result where the other one saves its operand
SAVE_LESS_IN_PLACE = frozenset(f"aten::{row.name}{end}" for row in TABLE if row.inplace_saves for end in ("", "_"))


def _bounds(self: Tensor, min: Any, max: Any) -> list[Tensor]:
    return [t for t in (self, min, max) if isinstance(t, Tensor)]


@rule("clamp", aliases="clip")
def clamp(e: Eager, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Saves its input; backward makes a zero scalar, one bool mask a bound and the chosen gradient."""
    out = e.pointwise("aten.clamp.default", *_bounds(self, min, max))
    return _record_clamp(e, out, self, self, min, max)


@rule("clamp_min")
def clamp_min(e: Eager, self: Tensor, min: Any) -> Tensor:
    """As `clamp` with one bound."""
    return clamp(e, self, min, None)


@rule("clamp_max")
def clamp_max(e: Eager, self: Tensor, max: Any) -> Tensor:
    """As `clamp` with one bound."""
    return clamp(e, self, None, max)


def _record_clamp(e: Eager, out: Tensor, self: Tensor, saved: Tensor | None, min: Any, max: Any) -> Tensor:
    """Tensor bounds are saved, and their gradients (FunctionsManual.cpp, `clamp_backward_min_max`) come first."""
    bounds = [min if isinstance(min, Tensor) else None, max if isinstance(max, Tensor) else None]
    if bounds == [None, None]:
        return e.record("ClampBackward1", out, [self], [Formula((0,), _clamp_self(saved, min, max))], [saved])
    both = min is not None and max is not None

    def by_bounds(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        grad = grad_of(grads)
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        results: list[Tensor | None] = []
        for bound, wanted in zip(bounds, need, strict=True):
            results.append(None)
            if bound is not None and wanted and saved is not None:
                masks = [e.pointwise("aten.lt.Tensor", saved, bound, dtype=dtypes.bool_)]
                if both:
                    masks.append(
                        e.pointwise("aten.lt.Tensor", *[b for b in bounds if b is not None], dtype=dtypes.bool_)
                    )
                results[-1] = e.pointwise("aten.where.self", masks[0], grad, dtype=grad.dtype)
                e.free(*masks)
        return results

    formulas = [Formula((1, 2), by_bounds), Formula((0,), _clamp_self(saved, min, max))]
    return e.record("ClampBackward0", out, [self, *bounds], formulas, [*reversed(bounds), saved])


def _clamp_self(self: Tensor | None, min: Any, max: Any) -> Any:
    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        assert self is not None
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        for bound in (min, max):
            if bound is not None:
                e.pointwise("aten.ge.Scalar", *_bounds(self, bound, None), dtype=dtypes.bool_)
        return e.pointwise("aten.where.self", *_bounds(self, min, max), grad, dtype=grad.dtype)

    return compute


@rule("clamp_", aliases="clip_")
def clamp_(e: Eager, self: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """In place: clones its input first and saves the clone; backward as `clamp`."""
    original = clone_for_backward(e, self, *_bounds(self, min, max))
    out = inplace(e, self, "aten.clamp_.default")
    return _record_clamp(e, out, self, original, min, max)


@rule("clamp_min_")
def clamp_min_(e: Eager, self: Tensor, min: Any) -> Tensor:
    """As `clamp_` with one bound."""
    return clamp_(e, self, min, None)


@rule("clamp_max_")
def clamp_max_(e: Eager, self: Tensor, max: Any) -> Tensor:
    """As `clamp_` with one bound."""
    return clamp_(e, self, None, max)


@rule("prelu", autocast="half")
def prelu(e: Eager, self: Tensor, weight: Tensor) -> Tensor:
    """Saves input and weight; backward makes both gradients at full size always, the weight's is then reduced."""
    if self.ndim != weight.ndim:
        weight = reshape(e, weight, (weight.numel,) if self.ndim < 2 else (1, weight.numel, *(1,) * (self.ndim - 2)))
    return prelu_kernel(e, self, weight)


@rule("_prelu_kernel", autocast="half")
def prelu_kernel(e: Eager, self: Tensor, weight: Tensor) -> Tensor:
    """What `prelu` calls with a weight that broadcasts to the input; saves both."""
    out = e.pointwise("aten._prelu_kernel.default", self, weight)

    def compute(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor]:
        grad = grad_of(grads)
        e.kernel("aten._prelu_kernel_backward.default")
        return [e.pointwise("", self, weight, grad) for _ in range(2)]

    return e.record("PreluKernelBackward0", out, [self, weight], [Formula((0, 1), compute)], [self, weight])


@rule("glu")
def glu(e: Eager, self: Tensor, dim: int = -1) -> Tensor:
    """Saves its input; one gradient of the input's size."""
    axis = self.dim(dim)
    half = e.alias(self, tuple(s // 2 if i == axis else s for i, s in enumerate(self.shape)), self.strides)
    out = e.pointwise("aten.glu.default", half)
    compute = gradient_like(self, "aten.glu_backward.default", self.dtype)
    return e.record("GluBackward0", out, [self], [Formula((0,), compute)], [self])


_SAME_NAMES = "Relu Sigmoid Tanh Softplus Mish Selu HardSwish".split()
one_input({**{name: name.lower() for name in _SAME_NAMES}, "Swish": "silu"})
one_input({"QuickGelu": "silu"}, sizes=like_first)
declare_sizes("BiasSplitGelu", lambda _, x, *__: [((*x[:-1], x[-1] // 2), 0)])  # one half is the gate of the other


@translation("Clip")
def onnx_clip(ctx: Context, node: Node) -> list[Op]:
    low: Arg = ctx.arg(node.inputs[1]) if len(node.inputs) > 1 else None
    high: Arg = ctx.arg(node.inputs[2]) if len(node.inputs) > 2 else None
    if len(node.inputs) == 1:  # before opset 11
        low = real(node, "min", 0.0) if "min" in node.attrs else None
        high = real(node, "max", 0.0) if "max" in node.attrs else None
    x = ctx.ref(node.inputs[0])
    if low == 0 and high == 6:
        return [ctx.op(node, "aten::hardtanh", x, 0.0, 6.0)]
    if isinstance(low, Ref) or isinstance(high, Ref):
        return [ctx.op(node, "aten::clamp.Tensor", x, low, high)]
    return [ctx.op(node, "aten::clamp", x, low, high)]


@translation("Gelu", sizes=like_first)
def onnx_gelu(ctx: Context, node: Node) -> list[Op]:
    approximate = text(node, "approximate", "none")
    kwargs: dict[str, Arg] = {"approximate": approximate} if approximate != "none" else {}
    return [ctx.op(node, "aten::gelu", ctx.ref(node.inputs[0]), kwargs=kwargs)]


@translation("FastGelu", "BiasGelu", sizes=like_first)
def onnx_biased_gelu(ctx: Context, node: Node) -> list[Op]:
    """com.microsoft BiasGelu and FastGelu: gelu(x + bias), the fast one with tanh."""
    kwargs: dict[str, Arg] = {"approximate": "tanh"} if node.op == "FastGelu" else {}
    if ctx.optional(node, 1) is None:
        return [ctx.op(node, "aten::gelu", ctx.ref(node.inputs[0]), kwargs=kwargs)]
    name = ctx.fresh(node)
    ctx.define(name, node.inputs[0], ctx.net.shape(node.inputs[0]))
    return [
        ctx.op(node, "aten::add.Tensor", ctx.ref(node.inputs[0]), ctx.optional(node, 1), outputs=(name,)),
        ctx.op(node, "aten::gelu", Ref(name), kwargs=kwargs),
    ]


@translation("HardSigmoid")
def onnx_hard_sigmoid(ctx: Context, node: Node) -> list[Op] | None:
    if abs(real(node, "alpha", 0.2) - 1 / 6) > 1e-4:
        return None
    return [ctx.op(node, "aten::hardsigmoid", ctx.ref(node.inputs[0]))]


_WITH_ALPHA = {"LeakyRelu": ("aten::leaky_relu", 0.01), "Elu": ("aten::elu", 1.0), "Celu": ("aten::celu", 1.0)}


@translation(*_WITH_ALPHA)
def onnx_with_alpha(ctx: Context, node: Node) -> list[Op]:
    target, default = _WITH_ALPHA[node.op]
    return [ctx.op(node, target, ctx.ref(node.inputs[0]), real(node, "alpha", default))]


@translation("PRelu")
def onnx_prelu(ctx: Context, node: Node) -> list[Op]:
    """Opset 7 and later broadcast the slope to the input from the last axis on; `nn.PReLU` has one for all, or one for
    each channel."""
    x, slope = ctx.net.shape(node.inputs[0]), ctx.net.shape(node.inputs[1])
    if x is not None and slope is not None and ctx.net.opset >= 7:
        aligned = (*(1,) * (len(x) - len(slope)), *slope)
        if math.prod(aligned) > 1 and (len(x) < 2 or math.prod(aligned) != aligned[1]):
            return [ctx.op(node, "aten::_prelu_kernel", ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]))]
    weights = ctx.sources(node.inputs[1])  # exporters give them the axes of the input
    return [ctx.op(node, "aten::prelu", ctx.ref(node.inputs[0]), ctx.ref(weights[0] if weights else node.inputs[1]))]
