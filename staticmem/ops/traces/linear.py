"""Matrix products: `linear` as it is composed in C++ (aten/src/ATen/native/Linear.cpp), `matmul` as in
torch/_decomp/decompositions.py, formulas of tools/autograd/derivatives.yaml, evaluated in alphabetical order.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.ops import kinds_of
from staticmem.ops.traces.arithmetic import mul, scaled
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.views import contiguous, expand, squeeze, t_, transpose, unsqueeze, view
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form, gradient_of


def _times(t: Tracer, node: Node, factor: float) -> Node:
    return node if factor == 1 else t.pointwise("aten::mul.Tensor", node, factor)


def _conj(t: Tracer, node: Node) -> Node:
    return t.new("aten::_conj", (node,), node.shape, node.dtype, node.strides) if node.dtype.kind == "complex" else node


def _column_major(node: Node) -> bool:
    return node.strides[0] == 1 and node.strides[1] == node.shape[0]


def _by_first(t: Tracer, grad: Node, first: Node, second: Node) -> Node:
    """`mm_mat1_backward` of FunctionsManual.cpp: column-major where the factor is."""
    if _column_major(first):
        return t.permute(t.mm(_conj(t, second), t.permute(grad, (1, 0))), (1, 0))
    return t.mm(grad, _conj(t, t.permute(second, (1, 0))))


def _by_second(t: Tracer, grad: Node, first: Node, second: Node) -> Node:
    """`mm_mat2_backward`."""
    if _column_major(second):
        return t.permute(t.mm(t.permute(grad, (1, 0)), _conj(t, first)), (1, 0))
    return t.mm(_conj(t, t.permute(first, (1, 0))), grad)


@traced("mm")
def mm(t: Tracer, self: Node, mat2: Node) -> Node:
    out = t.mm(self, mat2)
    return t.derive_each(
        out,
        [self, mat2],
        (1, lambda grad: _by_second(t, grad, self, mat2)),
        (0, lambda grad: _by_first(t, grad, self, mat2)),
    )


@traced("addmm")
def addmm(t: Tracer, self: Node, mat1: Node, mat2: Node, *, beta: float = 1, alpha: float = 1) -> Node:
    """An outer product is elementwise (`addmm` of torch/_inductor/decomposition.py)."""
    (rows, shared), columns = mat1.shape, mat2.shape[1]
    if shared != mat2.shape[0]:
        raise ValueError(f"cannot multiply {list(mat1.shape)} by {list(mat2.shape)}")
    if shared == 1 and rows != 1 and columns != 1 and beta:
        product = _times(t, t.pointwise("aten::mul.Tensor", t.opmath(mat1), t.opmath(mat2)), alpha)
        out = t.cast(t.pointwise("aten::add.Tensor", product, _times(t, t.opmath(self), beta)), mat1.dtype)
    else:
        kwargs = {name: value for name, value in (("beta", beta), ("alpha", alpha)) if value != 1}
        out = t.node("aten::addmm", (self, mat1, mat2), form((rows, columns), mat1.dtype), kwargs)
    return t.derive_each(
        out,
        [self, mat1, mat2],
        (1, lambda grad: scaled(t, _by_first(t, grad, mat1, mat2), alpha)),
        (2, lambda grad: scaled(t, _by_second(t, grad, mat1, mat2), alpha)),
        (0, lambda grad: scaled(t, grad, beta)),
    )


def _batched_gradients(
    t: Tracer, grad: Node, first: Node, second: Node, need: Sequence[bool], alpha: float = 1
) -> list[Node | None]:
    """Of the second factor first, as `bmm` has them; those of `baddbmm` are the other way round."""
    by_second = scaled(t, t.bmm(_conj(t, t.transpose(first, 1, 2)), grad), alpha) if need[1] else None
    by_first = scaled(t, t.bmm(grad, _conj(t, t.transpose(second, 1, 2))), alpha) if need[0] else None
    return [by_first, by_second]


@traced("bmm")
def bmm(t: Tracer, self: Node, mat2: Node) -> Node:
    out = t.bmm(self, mat2)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return _batched_gradients(t, grads[0], self, mat2, need)

    return t.record(out, [self, mat2], gradient)


@traced("baddbmm")
def baddbmm(t: Tracer, self: Node, batch1: Node, batch2: Node, *, beta: float = 1, alpha: float = 1) -> Node:
    """One call: Inductor takes its decomposition out (`decomps_to_exclude`)."""
    shape = (*batch1.shape[:2], batch2.shape[2])
    kwargs = {name: value for name, value in (("beta", beta), ("alpha", alpha)) if value != 1}
    out = t.node("aten::baddbmm", (self, batch1, batch2), form(shape, batch1.dtype), kwargs)
    return t.derive_each(
        out,
        [self, batch1, batch2],
        (1, lambda grad: scaled(t, t.bmm(grad, t.transpose(batch2, 1, 2)), alpha)),
        (2, lambda grad: scaled(t, t.bmm(t.transpose(batch1, 1, 2), grad), alpha)),
        (0, lambda grad: scaled(t, grad, beta)),
    )


@traced("mv")
def mv(t: Tracer, self: Node, vec: Node) -> Node:
    """A product and a sum (`mv` of torch/_decomp)."""
    product = t.pointwise("aten::mul.Tensor", t.opmath(self), t.opmath(vec))
    out = t.cast(t.sum(product, (1,)), self.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad = gradient_of(grads)
        by_self = t.pointwise("aten::mul.Tensor", t.view(grad, (self.shape[0], 1)), vec) if need[0] else None
        turned = t.transpose(self, 0, 1)
        if not need[1]:
            return [by_self, None]
        product = t.pointwise("aten::mul.Tensor", t.opmath(turned), t.opmath(grad))
        return [by_self, t.cast(t.sum(product, (1,)), vec.dtype)]

    return t.record(out, [self, vec], gradient)


@traced("dot")
def dot(t: Tracer, self: Node, other: Node) -> Node:
    """A product and a sum (torch/_refs, `dot`)."""
    return _dot(t, self, other, (0, 1))


@traced("vdot")
def vdot(t: Tracer, self: Node, other: Node) -> Node:
    return _dot(t, self, other, (1, 0))


def _dot(t: Tracer, self: Node, other: Node, order: tuple[int, int]) -> Node:
    product = t.pointwise("aten::mul.Tensor", t.opmath(self), t.opmath(other))
    out = t.cast(t.new("aten::sum", (product,), (), product.dtype), self.dtype)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        grad, results = grads[0], {}
        assert grad is not None
        for k in order:
            if need[k]:
                results[k] = t.pointwise("aten::mul.Tensor", grad, (other, self)[k])
        return [results.get(0), results.get(1)]

    return t.record(out, [self, other], gradient)


@traced("linear", calls="")
def linear(t: Tracer, input: Node, weight: Node, bias: Node | None = None) -> Node:
    """With a bias and a contiguous input one addmm over all leading dimensions (`_flatten_nd_linear`); else a product,
    and the bias is added."""
    if input.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear expects {weight.shape[-1]} input features, got {input.shape[-1]}")
    if bias is not None and input.ndim == 2:
        return addmm(t, bias, input, t_(t, weight))
    if bias is not None and weight.ndim == 2 and layout.is_contiguous(input.shape, input.strides):
        flat = view(t, input, (layout.numel(input.shape[:-1]), input.shape[-1]))
        out = addmm(t, bias, flat, t_(t, weight))
        return view(t, out, (*input.shape[:-1], weight.shape[0]))
    out = matmul(t, input, t_(t, weight))
    return out if bias is None else _add(t, out, bias)


def _add(t: Tracer, self: Node, other: Node) -> Node:
    out = t.pointwise("aten::add.Tensor", self, other)
    return t.record(out, [self, other], lambda grads, need: [grads[0], grads[0]])


@traced("matmul", calls="")
def matmul(t: Tracer, self: Node, other: Node) -> Node:
    a, b = self.ndim, other.ndim
    if not a or not b:
        raise ValueError("a product of a tensor without dimensions")
    if self.shape[-1] != other.shape[-2 if b > 1 else 0]:
        raise ValueError(f"cannot multiply {list(self.shape)} by {list(other.shape)}")
    if b == 1:
        if a <= 2:
            return dot(t, self, other) if a == 1 else mv(t, self, other)
    elif b == 2 and a <= 2:
        return mm(t, self, other) if a == 2 else squeeze(t, mm(t, unsqueeze(t, self, 0), other), 0)
    if _should_fold(t, self, other):
        return _fold(t, self, other)
    if a == 3 and b == 3 and self.shape[0] != other.shape[0]:  # no expanded gradient: fold what is repeated
        if self.shape[0] == 1 and t.needs_grad(self):
            return matmul(t, squeeze(t, self, 0), other)
        if other.shape[0] == 1 and t.needs_grad(other):
            return matmul(t, self, squeeze(t, other, 0))
    return _batched(t, self, other)


def _should_fold(t: Tracer, self: Node, other: Node) -> bool:
    """`should_fold`: the batch of one factor joins its rows where the other is a matrix or a vector, and that copies
    nothing or spares an expanded gradient."""
    large, small = (self, other) if self.ndim >= other.ndim else (other, self)
    if large.ndim < 3 or small.ndim > 2:
        return False
    if _requires_grad(t, small):
        return True
    return self.ndim != 2 and layout.is_contiguous(large.shape, large.strides)


def _requires_grad(t: Tracer, node: Node) -> bool:
    """What the traced tensor says of itself: a view of a parameter does without grad mode, too, what is computed
    from one does not."""
    while not t.needs_grad(node) and "view" in kinds_of(node.base):
        node = node.inputs[0]
    return t.needs_grad(node)


def _fold(t: Tracer, self: Node, other: Node) -> Node:
    turned = other.ndim > self.ndim
    large = transpose(t, other, -2, -1) if turned else self
    small = other if not turned else t_(t, self)
    flat = view(t, large, (layout.numel(large.shape[:-1]), large.shape[-1]))
    if small.ndim == 1:
        return view(t, mv(t, flat, small), large.shape[:-1])
    out = view(t, mm(t, flat, small), (*large.shape[:-1], small.shape[1]))
    return contiguous(t, transpose(t, out, -2, -1)) if turned else out


def _batched(t: Tracer, self: Node, other: Node) -> Node:
    n = self.shape[-2] if self.ndim > 1 else 1
    batch = layout.broadcast_shapes(self.shape[:-2], other.shape[:-2])
    count = layout.numel(batch)
    first = view(t, expand(t, self, (*batch, n, self.shape[-1])), (count, n, self.shape[-1]))
    if other.ndim == 1:
        second = unsqueeze(t, view(t, expand(t, other, (*batch, *other.shape)), (count, *other.shape)), 2)
        out = squeeze(t, bmm(t, first, second), -1)
    else:
        second = view(t, expand(t, other, (*batch, *other.shape[-2:])), (count, *other.shape[-2:]))
        out = bmm(t, first, second)
    shape = batch + ((n,) if self.ndim > 1 else ()) + ((other.shape[-1],) if other.ndim > 1 else ())
    return view(t, out, shape)


@traced("outer")
def outer(t: Tracer, self: Node, vec2: Node) -> Node:
    return mul(t, view(t, self, (self.shape[0], 1)), vec2)
