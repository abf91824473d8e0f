"""Matrix products.

Sources: aten/src/ATen/native/Linear.cpp (`linear`), LinearAlgebra.cpp (`matmul`, `should_fold`), derivatives.yaml and
FunctionsManual.cpp (`mm_mat1_backward`, `mm_mat2_backward`). Generated code evaluates formulas in alphabetical order.

Linear systems, and decompositions of matrices.

Sources: aten/src/ATen/native/BatchLinearAlgebra.cpp (`linalg_solve_triangular_out`: the result is column-major),
torch/csrc/autograd/FunctionsManual.cpp (`linalg_solve_triangular_backward`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import add, add_, mul
from staticmem.ops.onnx import Context, Results, Shape, declare_sizes, integer, like_first, product, real, translation
from staticmem.ops.pointwise import grad_of, gradient_like, same, times
from staticmem.ops.registry import Flops, KernelCall, Shapes, Temporary, rule, size_of, workspace
from staticmem.ops.views import contiguous, expand, reshape, squeeze, t, transpose, unsafe_view, unsqueeze
from staticmem.units import Band

# names that exporters give to what they compute, as a transposed weight; a parameter of the model itself has no number
_NUMBERED = re.compile(r"(val|_?v|t|permute|transpose)(_\d+)?$")

# kernels that call cuBLAS (aten/src/ATen/native/cuda/Blas.cpp)
CUBLAS = frozenset(f"aten.{name}.default" for name in "mm addmm bmm baddbmm mv addmv _trilinear _scaled_mm".split())
# those of them that call cublasLt: `addmm` with a bias, products of float8
CUBLASLT = frozenset(("aten.addmm.default", "aten._scaled_mm.default"))


def _check(a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"cannot multiply {list(a.shape)} by {list(b.shape)}")


def _factor(like: Tensor) -> Any:
    """The gradient of a factor: column-major where the factor was in the forward, as `t()` of a product."""
    rows, columns = like.shape
    column_major = like.strides[0] == 1 and like.strides[1] == rows

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        dtype = grad_of(grads).dtype
        if column_major:
            product = e.empty((columns, rows), dtype, kernel="aten.mm.default")
            return e.alias(product, (rows, columns), (1, rows))
        return e.empty((rows, columns), dtype, kernel="aten.mm.default")

    return gradient


def product_flops(first: int) -> Flops:
    """result x shared dimension; `first` is the position of the left factor, whose last dimension is shared."""

    def count(op: Op, args: Sequence[Arg], shapes: Shapes) -> int:
        return 2 * prod(shapes[op.outputs[0]]) * size_of(args[first], shapes)[-1]

    return count


def rows_of(input: Tensor, columns: int) -> int:
    """Rows of the input of a linear layer of `columns` features.

    Raises:
        ValueError: it has other features.
    """
    if input.shape[-1] != columns:
        raise ValueError(f"linear expects {columns} input features, got {input.shape[-1]}")
    return layout.numel(input.shape[:-1])


FACTORS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1)}  # which arguments are multiplied


@rule("mm", kinds=("product",), autocast="half", flops=product_flops(0))
def mm(e: Eager, self: Tensor, mat2: Tensor) -> Tensor:
    """Each factor is saved only if the other one needs a gradient."""
    _check(self, mat2)
    out = e.empty((self.shape[0], mat2.shape[1]), self.dtype, kernel="aten.mm.default")
    saves = [mat2 if e.needs_grad(self) else None, self if e.needs_grad(mat2) else None]
    formulas = [Formula((1,), _factor(mat2)), Formula((0,), _factor(self))]
    return e.record("MmBackward0", out, [self, mat2], formulas, saves)


@rule("_scaled_mm", kinds=("product",), flops=product_flops(0))
def scaled_mm(
    e: Eager,
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: DType | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Of float8 (`_scaled_mm_cuda`, aten/src/ATen/native/cuda/ScaledBlas.cpp). It has no derivative."""
    _check(self, mat2)
    return e.empty((self.shape[0], mat2.shape[1]), out_dtype or self.dtype, kernel="aten._scaled_mm.default")


def _scaled(formula: Any, factor: Any) -> Any:
    """`maybe_multiply`: one more tensor unless the factor is 1."""
    if factor == 1:
        return formula

    def scaled(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.mul.Tensor", formula(e, grads, need))

    return scaled


@rule("addmm", kinds=("product",), autocast="half", flops=product_flops(1))
def addmm(e: Eager, self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Each factor is saved only if the other one needs a gradient; the bias gradient is summed after both products."""
    _check(mat1, mat2)
    out = e.empty((mat1.shape[0], mat2.shape[1]), mat1.dtype, kernel="aten.addmm.default")
    saves = [mat1 if e.needs_grad(mat2) else None, mat2 if e.needs_grad(mat1) else None]
    products = [Formula((1,), _scaled(_factor(mat1), alpha)), Formula((2,), _scaled(_factor(mat2), alpha))]
    return e.record("AddmmBackward0", out, [self, mat1, mat2], [*products, Formula((0,), _scaled(same, beta))], saves)


@rule("mv", kinds=("product",), autocast="half", flops=product_flops(0))
def mv(e: Eager, self: Tensor, vec: Tensor) -> Tensor:
    """Each factor is saved only if the other one needs a gradient; an outer product and a product in backward."""
    if self.shape[1] != vec.shape[0]:
        raise ValueError(f"cannot multiply {list(self.shape)} by {list(vec.shape)}")
    out = e.empty((self.shape[0],), self.dtype, kernel="aten.mv.default")
    saves = [self if e.needs_grad(vec) else None, vec if e.needs_grad(self) else None]
    return e.record("MvBackward0", out, [self, vec], [Formula((0,), _filled(self)), Formula((1,), _filled(vec))], saves)


def _filled(like: Tensor) -> Any:
    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(
            like.shape, grad_of(grads).dtype, kernel="aten.mul.Tensor" if like.ndim == 2 else "aten.mv.default"
        )

    return gradient


@rule("addmv", kinds=("product",), autocast="half", flops=product_flops(1))
def addmv(e: Eager, self: Tensor, mat: Tensor, vec: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """As `mv`; `self` receives the incoming gradient."""
    out = e.empty((mat.shape[0],), mat.dtype, kernel="aten.addmv.default")
    saves = [mat if e.needs_grad(vec) else None, vec if e.needs_grad(mat) else None]
    products = [Formula((1,), _scaled(_filled(mat), alpha)), Formula((2,), _scaled(_filled(vec), alpha))]
    return e.record("AddmvBackward0", out, [self, mat, vec], [*products, Formula((0,), _scaled(same, beta))], saves)


@rule("outer", aliases="ger")
def outer(e: Eager, self: Tensor, vec2: Tensor) -> Tensor:
    """A product of a column and a row; saves as `mul`."""
    return mul(e, reshape(e, self, (self.shape[0], 1)), vec2)


@rule("bmm", kinds=("product",), autocast="half", flops=product_flops(0))
def bmm(e: Eager, self: Tensor, mat2: Tensor) -> Tensor:
    """Each factor is saved only if the other one needs a gradient."""
    _check(self, mat2)
    out = e.empty((self.shape[0], self.shape[1], mat2.shape[2]), self.dtype, kernel="aten.bmm.default")
    saves = [mat2 if e.needs_grad(self) else None, self if e.needs_grad(mat2) else None]
    by_self, by_mat2 = (gradient_like(factor, "aten.bmm.default") for factor in (self, mat2))
    return e.record("BmmBackward0", out, [self, mat2], [Formula((1,), by_mat2), Formula((0,), by_self)], saves)


@rule("baddbmm", kinds=("product",), autocast="half", flops=product_flops(1))
def baddbmm(e: Eager, self: Tensor, batch1: Tensor, batch2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Each factor is saved only if the other one needs a gradient; `self` receives the incoming gradient."""
    _check(batch1, batch2)
    out = e.empty((batch1.shape[0], batch1.shape[1], batch2.shape[2]), batch1.dtype, kernel="aten.baddbmm.default")
    saves = [batch1 if e.needs_grad(batch2) else None, batch2 if e.needs_grad(batch1) else None]
    by_1, by_2 = (_scaled(gradient_like(factor, "aten.bmm.default"), alpha) for factor in (batch1, batch2))
    formulas = [Formula((1,), by_1), Formula((2,), by_2), Formula((0,), _scaled(same, beta))]
    return e.record("BaddbmmBackward0", out, [self, batch1, batch2], formulas, saves)


@rule("linear", kinds=("product",), autocast="half", flops=product_flops(0))
def linear(e: Eager, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """With bias and a contiguous input: view, addmm, view; else matmul and an in-place bias add."""
    if input.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear expects {weight.shape[-1]} input features, got {input.shape[-1]}")
    if bias is not None and input.ndim == 2:
        return addmm(e, bias, input, t(e, weight))
    if bias is not None and input.is_contiguous:
        flat = reshape(e, input, (-1, input.shape[-1]))
        out = addmm(e, bias, flat, t(e, weight))
        return reshape(e, out, (*input.shape[:-1], out.shape[-1]))
    out = matmul(e, input, t(e, weight))
    return out if bias is None else add_(e, out, bias)


@rule("matmul", kinds=("product",), autocast="half", flops=product_flops(0), aliases="linalg_matmul")
@scoped
def matmul(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """mm where a factor is 1-D or 2-D and folding pays, else expand, reshape (a clone where needed) and bmm."""
    a, b = self.ndim, other.ndim
    if a == 1 and b == 1:
        return _dot(e, self, other)
    if a == 2 and b == 1:
        return mv(e, self, other)
    if a == 1 and b == 2:
        return reshape(e, mm(e, unsqueeze(e, self, 0), other), (other.shape[1],))
    if a == 2 and b == 2:
        return mm(e, self, other)
    if _should_fold(e, self, other):
        return _fold(e, self, other)
    if a == 3 and b == 3 and self.shape[0] != other.shape[0]:  # no expanded gradient: fold the factor that is repeated
        if self.shape[0] == 1 and self.requires_grad:
            return matmul(e, squeeze(e, self, 0), other)
        if other.shape[0] == 1 and other.requires_grad:
            return matmul(e, self, squeeze(e, other, 0))
    return _batched(e, self, other)


@rule("dot vdot", kinds=("product",), autocast="promote", flops=product_flops(0))
def _dot(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    """Each factor is saved only if the other one needs a gradient."""
    out = e.empty((), self.dtype, kernel="aten.dot.default")
    saves = [other if e.needs_grad(self) else None, self if e.needs_grad(other) else None]
    formulas = [Formula((0,), times(other)), Formula((1,), times(self))]
    return e.record("DotBackward0", out, [self, other], formulas, saves)


def _should_fold(e: Eager, self: Tensor, other: Tensor) -> bool:
    first_larger = self.ndim >= other.ndim
    large, small = (self, other) if first_larger else (other, self)
    if not (large.ndim >= 3 and small.ndim <= 2):
        return False
    if small.requires_grad:  # avoids an expanded weight gradient in backward
        return True
    if self.ndim == 2:
        return False
    shape, strides = large.shape, large.strides
    if not first_larger:  # the larger one is transposed first
        shape, strides = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
    return all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(len(shape) - 2))


def _fold(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    first_larger = self.ndim >= other.ndim
    if first_larger:
        large, small = self, other
    else:
        large = transpose(e, other, -2, -1)
        small = t(e, self) if self.ndim == 2 else self
    flat = reshape(e, large, (-1, large.shape[-1]))
    if small.ndim == 1:
        return reshape(e, mv(e, flat, small), large.shape[:-1])
    out = unsafe_view(e, mm(e, flat, small), (*large.shape[:-1], small.shape[1]))
    if first_larger:
        return out
    return contiguous(e, transpose(e, out, -2, -1))


def _batched(e: Eager, self: Tensor, other: Tensor) -> Tensor:
    left = unsqueeze(e, self, 0) if self.ndim == 1 else self
    right = unsqueeze(e, other, 1) if other.ndim == 1 else other
    n, m = left.shape[-2:]
    p = right.shape[-1]
    batch = layout.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    count = layout.numel(batch)
    left = reshape(e, expand(e, left, (*batch, n, m)), (count, n, m))
    right = reshape(e, expand(e, right, (*batch, right.shape[-2], p)), (count, right.shape[-2], p))
    shape = batch + ((n,) if self.ndim > 1 else ()) + ((p,) if other.ndim > 1 else ())
    return unsafe_view(e, bmm(e, left, right), shape)


@rule("bilinear", autocast="promote")
def bilinear(e: Eager, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A trilinear product, each factor saved if another needs a gradient; then the bias is added.

    What `_trilinear` makes inside is not seen.
    """
    out = e.empty((*input1.shape[:-1], weight.shape[0]), input1.dtype, kernel="aten._trilinear.default")
    factors = [input1, weight, input2]

    def by(like: Tensor) -> Any:
        return lambda e, grads, need: e.empty(like.shape, like.dtype, kernel="aten._trilinear.default")

    formulas = [Formula((k,), by(factor)) for k, factor in enumerate(factors)]
    wants = [e.needs_grad(*factors[:k], *factors[k + 1 :]) for k in range(3)]
    saves = [factor if want else None for factor, want in zip(factors, wants, strict=True)]
    e.record("TrilinearBackward0", out, factors, formulas, saves)
    return out if bias is None else add(e, out, bias)


@rule("addbmm", kinds=("product",), autocast="half", flops=product_flops(1))
def addbmm(e: Eager, self: Tensor, batch1: Tensor, batch2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Each batch is saved if the other needs a gradient; each gradient is one bmm with the expanded incoming one."""
    shape = (batch1.shape[1], batch2.shape[2])
    out = e.empty(shape, batch1.dtype, kernel="aten.addbmm.default")

    def scaled(factor: Any, grad: Tensor) -> Tensor:
        return grad if factor == 1 else e.pointwise("aten.mul.Tensor", grad)

    def by_self(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return scaled(beta, grad_of(grads))

    def by(like: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            result = e.empty(like.shape, like.dtype, kernel="aten.bmm.default")
            return scaled(alpha, result)

        return gradient

    formulas = [Formula((1,), by(batch1)), Formula((2,), by(batch2)), Formula((0,), by_self)]
    saves = [batch1 if e.needs_grad(batch2) else None, batch2 if e.needs_grad(batch1) else None]
    return e.record("AddbmmBackward0", out, [self, batch1, batch2], formulas, saves)


def named_weight(ctx: Context, name: str) -> bool:
    """Whether PyTorch stores this tensor as it is in the file: folding by the exporter makes new, numbered names.

    `x @ self.memory` of the outermost module reads `memory`, which has no dot.
    """
    if not ctx.net.producer.startswith("pytorch") or "::" in name:
        return False
    return "." in name or (name.isidentifier() and not _NUMBERED.match(name))


@translation("MatMul")
def onnx_matmul(ctx: Context, node: Node) -> list[Op]:
    a, b = node.inputs[:2]
    plain = b in ctx.net.weights and ctx.rank(b) == 2 and ctx.rank(a) >= 2 and not named_weight(ctx, b)
    if plain and ctx.turnable(b):
        ctx.transposed.add(b)
        return [ctx.op(node, "aten::linear", ctx.ref(a), ctx.ref(b))]
    return [ctx.op(node, "aten::matmul", ctx.ref(a), ctx.ref(b))]


@translation("Gemm")
def onnx_gemm(ctx: Context, node: Node) -> list[Op]:
    alpha, beta = real(node, "alpha", 1.0), real(node, "beta", 1.0)
    a, b = node.inputs[:2]
    bias = ctx.optional(node, 2)
    ops: list[Op] = []
    x = ctx.ref(a)
    if integer(node, "transA", 0):
        name = ctx.fresh(node)
        shape = ctx.net.shape(a)
        ctx.define(name, a, tuple(reversed(shape)) if shape is not None else None)
        ops.append(ctx.op(node, "aten::t", x, outputs=(name,)))
        x = Ref(name)
    plain = alpha == 1.0 and beta == 1.0
    shape = ctx.net.shape(node.inputs[2]) if bias is not None else None
    if plain and (bias is None or shape is None or len(shape) == 1):
        if integer(node, "transB", 0):
            return [*ops, ctx.op(node, "aten::linear", x, ctx.ref(b), bias)]
        if b in ctx.net.weights and not named_weight(ctx, b) and ctx.turnable(b):
            ctx.transposed.add(b)
            return [*ops, ctx.op(node, "aten::linear", x, ctx.ref(b), bias)]
    weight = ctx.ref(b)
    if integer(node, "transB", 0):
        name = ctx.fresh(node)
        sizes = ctx.net.shape(b)
        ctx.define(name, b, tuple(reversed(sizes)) if sizes is not None else None)
        ops.append(ctx.op(node, "aten::t", weight, outputs=(name,)))
        weight = Ref(name)
    if bias is None:
        return [*ops, ctx.op(node, "aten::mm", x, weight)]
    kwargs: dict[str, Arg] = {} if plain else {"beta": beta, "alpha": alpha}
    return [*ops, ctx.op(node, "aten::addmm", bias, x, weight, kwargs=kwargs)]


def _fused_matmul_sizes(node: Node, a: Shape, b: Shape | None, *_: Shape | None) -> Results:
    if b is None or len(a) < 2 or len(b) < 2:
        return []
    a = (*a[:-2], a[-1], a[-2]) if integer(node, "transA", 0) else a
    b = (*b[:-2], b[-1], b[-2]) if integer(node, "transB", 0) else b
    if integer(node, "transBatchA", 0) or integer(node, "transBatchB", 0):
        return []
    return [(product(a, b), 0)]


def _fused_gemm_sizes(node: Node, a: Shape, b: Shape | None, *_: Shape | None) -> Results:
    if b is None or len(a) != 2 or len(b) != 2:
        return []
    return [((a[1 if integer(node, "transA", 0) else 0], b[0 if integer(node, "transB", 0) else 1]), 0)]


declare_sizes("TransposeMatMul", _fused_matmul_sizes)
declare_sizes("FusedGemm", _fused_gemm_sizes)
declare_sizes("Inverse MoE QMoE", like_first)


@translation("FusedMatMul", sizes=_fused_matmul_sizes)
def onnx_fused_matmul(ctx: Context, node: Node) -> list[Op] | None:
    """com.microsoft FusedMatMul: matmul with transposes and a factor."""
    if integer(node, "transBatchA", 0) or integer(node, "transBatchB", 0):
        return None
    ops: list[Op] = []
    args: list[Arg] = []
    for name, flag in zip(node.inputs[:2], ("transA", "transB"), strict=True):
        if integer(node, flag, 0):
            fresh, shape = ctx.fresh(node), ctx.net.shape(name)
            ctx.define(fresh, name, (*shape[:-2], shape[-1], shape[-2]) if shape is not None else None)
            ops.append(ctx.op(node, "aten::transpose.int", ctx.ref(name), -2, -1, outputs=(fresh,)))
            args.append(Ref(fresh))
        else:
            args.append(ctx.ref(name))
    alpha = real(node, "alpha", 1.0)
    if alpha == 1.0:
        return [*ops, ctx.op(node, "aten::matmul", *args)]
    product = ctx.fresh(node)
    ctx.define(product, node.outputs[0], ctx.net.shape(node.outputs[0]))
    ops.append(ctx.op(node, "aten::matmul", *args, outputs=(product,)))
    return [*ops, ctx.op(node, "aten::mul.Tensor", Ref(product), alpha)]


_KERNEL = "aten.linalg_solve_triangular.default"
SVD = "aten._linalg_svd.default"


def _solved(e: Eager, a: Tensor, b: Tensor) -> Tensor:
    """The result: of the size of B, with the batch of both, column-major."""
    batch = layout.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    rows, columns = b.shape[-2:]
    strides = layout.contiguous_strides((*batch, columns, rows))
    return e.empty((*batch, rows, columns), b.dtype, (*strides[:-2], strides[-1], strides[-2]), kernel=_KERNEL)


@rule("linalg_solve_triangular")
def linalg_solve_triangular(
    e: Eager,
    self: Tensor,
    B: Tensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Tensor:
    """Saves A and the result; backward solves for the gradient of B, which that of A is a product with: it is negated,
    and its triangle copied."""
    out = _solved(e, self, B)

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        of_b = _solved(e, transpose(e, self, -2, -1), grad_of(grads))
        of_a = None
        if need[0]:
            turned = transpose(e, out, -2, -1)
            product = matmul(e, of_b, turned) if left else matmul(e, turned, of_b)
            negated = e.empty_like(product, kernel="aten.neg.default")
            e.free(product)  # a temporary of the statement
            of_a = e.empty_like(negated, kernel="aten.triu.default" if upper else "aten.tril.default")
        return [of_a, of_b if need[1] else None]

    return e.record("LinalgSolveTriangularBackward0", out, [self, B], [Formula((0, 1), gradients)], [self, out])


@workspace(SVD, results=3)
def decomposed(call: KernelCall) -> list[Temporary]:
    """A copy of the matrix, which cuSOLVER overwrites; where its gesvdj does not converge, another one for gesvd, and
    the right singular vectors once more (aten/src/ATen/native/cuda/linalg/BatchLinearAlgebraLib.cpp, `svd_cusolver`,
    `apply_svd_cusolver_gesvd`). What cuSOLVER asks for itself (`gesvdj_bufferSize`) is not known, and not in it."""
    left, _, right = call.results
    copy = left.shape[0] * right.shape[1] * right.dtype.itemsize
    return [Temporary(Band(copy, copy, copy + right.nbytes), "copy of the matrix")]
