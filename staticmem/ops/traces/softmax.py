"""Softmax and its logarithm (torch/_decomp/decompositions.py `_softmax`, `_log_softmax`, `_log_softmax_backward_data`;
torch/_inductor/decomposition.py `_softmax_backward_data`): contiguous, in float32 for half precision."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.ir.dtypes import DType
from staticmem.ops.traces.casts import to_copy
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer


def _input(t: Tracer, self: Node, dtype: DType | None) -> Node:
    """`softmax` converts first, but where a half becomes float32: CUDA's kernel reads halves (`half_to_float`), and
    the decomposition converts."""
    if dtype is not None and dtype is not self.dtype:
        self = to_copy(t, self, dtype)
    return self


@traced("softmax special_softmax")
def softmax(t: Tracer, self: Node, dim: int, dtype: DType | None = None) -> Node:
    return softmax_(t, _input(t, self, dtype), dim, False)


def softmax_forward(t: Tracer, self: Node, dim: int, half_to_float: bool = False) -> Node:
    """Its nodes, which autograd does not see one by one."""
    self.dim(dim)  # it is checked, and stays as it was given
    wide = t.opmath(t.contiguous(self))
    shifted = t.pointwise("aten::sub.Tensor", wide, t.reduce("aten::amax", wide, (dim,), True))
    powers = t.pointwise("aten::exp", shifted)
    out = t.pointwise("aten::div.Tensor", powers, t.sum(powers, (dim,), True))
    return out if half_to_float else t.cast(out, self.dtype)


@traced("_softmax")
def softmax_(t: Tracer, self: Node, dim: int, half_to_float: bool) -> Node:
    out = softmax_forward(t, self, dim, half_to_float)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [softmax_gradient(t, grads[0], out, dim, self.dtype)]

    t.record(out, [self], gradient)
    return out


def softmax_gradient(t: Tracer, grad: Node, out: Node, dim: int, dtype: DType) -> Node:
    """`_softmax_backward_data`, under `pw_cast_for_opmath`."""
    grad, wide = t.opmath(grad), t.opmath(out)
    product = t.pointwise("aten::mul.Tensor", grad, wide)
    total = t.sum(product, (dim,), True)
    result = t.pointwise("prims::fma", t.pointwise("aten::neg", wide), total, product)
    return t.cast(t.contiguous(result), dtype)


@traced("log_softmax special_log_softmax")
def log_softmax(t: Tracer, self: Node, dim: int, dtype: DType | None = None) -> Node:
    return log_softmax_(t, _input(t, self, dtype), dim, False)


@traced("_log_softmax")
def log_softmax_(t: Tracer, self: Node, dim: int, half_to_float: bool) -> Node:
    self.dim(dim)  # it is checked, and stays as it was given
    wide = t.opmath(t.contiguous(self))
    shifted = t.pointwise("aten::sub.Tensor", wide, t.reduce("aten::amax", wide, (dim,), True))
    total = t.pointwise("aten::log", t.sum(t.pointwise("aten::exp", shifted), (dim,), True))
    out = t.pointwise("aten::sub.Tensor", shifted, total)
    if not half_to_float:
        out = t.cast(out, self.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        grad = t.opmath(grads[0])
        product = t.pointwise(
            "aten::mul.Tensor", t.pointwise("aten::exp", t.opmath(out)), t.sum(grad, (dim,), True)
        )  # fmt: skip
        return [t.cast(t.pointwise("aten::sub.Tensor", grad, product), self.dtype)]

    t.record(out, [self], gradient)
    return out
