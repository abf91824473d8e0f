"""Linear systems, and decompositions of matrices.

Sources: aten/src/ATen/native/BatchLinearAlgebra.cpp (`linalg_solve_triangular_out`: the result is column-major),
torch/csrc/autograd/FunctionsManual.cpp (`linalg_solve_triangular_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ops.linear import matmul
from staticmem.ops.pointwise import grad_of
from staticmem.ops.registry import KernelCall, Temporary, rule, workspace
from staticmem.ops.views import transpose
from staticmem.units import Band

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
