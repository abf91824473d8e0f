"""Softmax, logarithms of sums of exponentials, and running sums and products.

Source of what kernels take: aten/src/ATen/native/cuda/SoftMax.cu (`softmax_backward_cuda_out`, `host_softmax` and
`host_softmax_backward`, the same from PyTorch 0.4 to 2.15), native/transformers/attention.cpp (`_safe_softmax`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import Copies
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.casts import to_copy
from staticmem.ops.onnx import Context, integer, like_first, translation
from staticmem.ops.pointwise import grad_of
from staticmem.ops.reduction import axes_of, kept, onnx_axes, reduced_shape
from staticmem.ops.registry import KernelCall, Temporary, rule, workspace
from staticmem.units import exactly

# Structured kernels (`TORCH_META_FUNC` in native/SoftMax.cpp and BinaryOps.cpp): their result is there before what they
# make for themselves: an input that is contiguous, a loss before it is reduced
RESULT_FIRST = (
    "aten._softmax.default",
    "aten._log_softmax.default",
    "aten._softmax_backward_data.default",
    "aten._log_softmax_backward_data.default",
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
)


@rule("softmax _softmax", kinds=("softmax",), autocast="float32_dtype", aliases="special_softmax")
def softmax(
    e: Eager, self: Tensor, dim: int, dtype: DType | bool | None = None, *, kernel: str = "aten._softmax"
) -> Tensor:
    """Saves its result; backward makes one tensor. A dtype other than fp16 -> float32 copies the input first."""
    source = self
    if isinstance(dtype, DType) and dtype is not self.dtype:
        if self.dtype is dtypes.float16 and dtype is dtypes.float32:  # half_to_float inside the kernel
            return _softmax_result(e, self, dtype, kernel)
        source = to_copy(e, self, dtype)
    return _softmax_result(e, source, source.dtype, kernel)


@rule("log_softmax _log_softmax", autocast="float32_dtype", aliases="special_log_softmax")
def log_softmax(e: Eager, self: Tensor, dim: int, dtype: DType | bool | None = None) -> Tensor:
    """As `softmax`, but what its backward takes for itself."""
    return softmax(e, self, dim, dtype, kernel="aten._log_softmax")


def _softmax_result(e: Eager, self: Tensor, dtype: DType, kernel: str) -> Tensor:
    out = e.empty(self.shape, dtype, kernel=f"{kernel}.default")  # the structured kernel asks for no strides
    e.copies(self)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)
        result = e.empty(self.shape, self.dtype, kernel=f"{kernel}_backward_data.default")
        if kernel == "aten._log_softmax":
            e.copies(grad)
        else:  # the product with the result has the gradient's layout, and is then made contiguous
            strides = layout.pointwise_strides(self.shape, ((grad.shape, grad.strides), (out.shape, out.strides)))
            if not layout.is_contiguous(self.shape, strides):
                e.reads(Copies((out.form.nbytes,)))
        return result

    # before 1.11 the input too (https://github.com/pytorch/pytorch/pull/65242)
    saves = [out] if e.torch >= (1, 11) else [self, out]
    return e.record("SoftmaxBackward0", out, [self], [Formula((0,), gradient)], saves)


@workspace(
    "aten._softmax.default aten._softmax_backward_data.default "
    "aten._safe_softmax.default aten._safe_softmax_backward_data.default"
)
def softmax_temporaries(call: KernelCall) -> list[Temporary]:
    """The backward multiplies gradient and result into a tensor of its own first; that of log_softmax does not.

    `_safe_softmax` is a softmax, a mask of what was -inf, and a `where` over both.
    """
    if call.kernel.endswith("_backward_data.default"):
        output = (call.forward or call.results)[0]  # float32 where half was computed in float32
        return [Temporary(exactly(output.nbytes), "softmax backward: gradient x result")]
    if call.kernel == "aten._softmax.default":
        return []
    result = call.results[0]
    return [
        Temporary(exactly(result.nbytes), "softmax before rows are masked"),
        Temporary(exactly(layout.numel(result.shape)), "mask of softmax"),
    ]


@rule("logsumexp", autocast="float32", aliases="special_logsumexp")
def logsumexp(e: Eager, self: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Saves its input and result; backward holds a difference, its exponential and the product."""
    axes = axes_of(self, dim)
    out = e.empty(reduced_shape(self, axes, keepdim), self.dtype, kernel="aten.logsumexp.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        difference = e.pointwise("aten.sub.Tensor", self)
        exponential = e.pointwise("aten.exp.default", difference)
        return e.pointwise("aten.mul.Tensor", kept(e, grad_of(grads), self, axes, keepdim), exponential)

    return e.record("LogsumexpBackward0", out, [self], [Formula((0,), gradient)], [self, out])


@rule("cumsum", kinds=("running",), autocast="float32_dtype")
def cumsum(e: Eager, self: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """Contiguous, saves nothing; backward flips, sums and flips back."""
    result = dtype or (self.dtype if self.dtype.is_differentiable else dtypes.int64)
    out = e.empty(self.shape, result, kernel="aten.cumsum.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = e.to_dtype(grad_of(grads), self.dtype)
        if grad.numel <= 1 or grad.shape[self.dim(dim)] == 1:
            return grad
        e.empty_like(grad, kernel="aten.flip.default")
        for kernel in ("aten.cumsum.default", "aten.flip.default"):
            grad = e.empty(grad.shape, grad.dtype, kernel=kernel)
        return grad

    return e.record("CumsumBackward0", out, [self], [Formula((0,), gradient)])


@rule("cumprod", kinds=("running",), autocast="float32_dtype")
def cumprod(e: Eager, self: Tensor, dim: int, dtype: DType | None = None) -> Tensor:
    """Saves its input and result; backward without zeros in the input: a product, its reversed sum and a quotient."""
    out = e.empty(self.shape, dtype or self.dtype, kernel="aten.cumprod.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        if self.numel <= 1 or self.shape[self.dim(dim)] == 1:
            return grad_of(grads)
        product = e.pointwise("aten.mul.Tensor", out, grad_of(grads))
        e.pointwise("aten.eq.Scalar", self, dtype=dtypes.bool_)
        products = [
            e.empty_like(product, kernel=kernel)
            for kernel in ("aten.flip.default", "aten.cumsum.default", "aten.flip.default")
        ]
        e.free(*products[:2])
        return e.pointwise("aten.div.Tensor", products[2], self)

    return e.record("CumprodBackward0", out, [self], [Formula((0,), gradient)], [self, out])


@rule("logcumsumexp", autocast="float32")
def logcumsumexp(e: Eager, self: Tensor, dim: int) -> Tensor:
    """Saves its input and result; backward sums positive and negative parts apart, each through four full tensors."""
    out = e.empty(self.shape, self.dtype, kernel="aten.logcumsumexp.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        grad = grad_of(grads)  # FunctionsManual.cpp, logcumsumexp_backward
        e.empty((), grad.dtype, kernel="aten.scalar_tensor.default")
        size = e.pointwise("aten.abs.default", grad)
        log = e.pointwise("aten.log.default", size)
        e.free(size)
        signed = []
        for comparison in ("gt", "lt"):
            mask = e.pointwise(f"aten.{comparison}.Scalar", grad, dtype=dtypes.bool_)
            signed.append(e.pointwise("aten.where.self", mask, log, dtype=grad.dtype))
            e.free(mask)
        parts = []
        for part in signed:
            difference = e.pointwise("aten.sub.Tensor", part, out)
            reverse = e.empty_like(difference, kernel="aten.flip.default")
            total = e.empty(reverse.shape, reverse.dtype, kernel="aten.logcumsumexp.default")
            back = e.empty_like(total, kernel="aten.flip.default")
            e.free(reverse, total)
            shifted = e.pointwise("aten.add.Tensor", back, self)
            parts.append(e.pointwise("aten.exp.default", shifted))
            e.free(difference, back, shifted)
        return e.pointwise("aten.sub.Tensor", *parts)

    return e.record("LogcumsumexpBackward0", out, [self], [Formula((0,), gradient)], [self, out])


_SOFTMAX = {"Softmax": "aten::softmax.int", "LogSoftmax": "aten::log_softmax.int"}


@translation(*_SOFTMAX)
def onnx_softmax(ctx: Context, node: Node) -> list[Op]:
    axis = integer(node, "axis", -1 if ctx.net.opset >= 13 else 1)
    return [ctx.op(node, _SOFTMAX[node.op], ctx.ref(node.inputs[0]), axis)]


@translation("BiasSoftmax", sizes=like_first)
def onnx_biased_softmax(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft BiasSoftmax: softmax(data + bias) over the last dimension."""
    rank = ctx.rank(node.inputs[0])
    if rank == 0 or integer(node, "axis", 1) % rank != rank - 1:
        return None  # over several dimensions at once
    name = ctx.fresh(node)
    ctx.define(name, node.inputs[0], ctx.net.shape(node.inputs[0]))
    return [
        ctx.op(node, "aten::add.Tensor", ctx.ref(node.inputs[0]), ctx.ref(node.inputs[1]), outputs=(name,)),
        ctx.op(node, "aten::softmax.int", Ref(name), -1),
    ]


@translation("ReduceLogSumExp")
def onnx_log_sum_exp(ctx: Context, node: Node) -> list[Op]:
    return [ctx.op(node, "aten::logsumexp", ctx.ref(node.inputs[0]), *onnx_axes(ctx, node))]


@translation("CumSum")
def onnx_cumsum(ctx: Context, node: Node) -> list[Op] | None:
    axis = ctx.number(node, 1)
    if axis is None or integer(node, "exclusive", 0) or integer(node, "reverse", 0):
        return None
    return [ctx.op(node, "aten::cumsum", ctx.ref(node.inputs[0]), int(axis))]
