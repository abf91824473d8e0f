"""Weight norm on CUDA: torch/_decomp/decompositions.py (`_weight_norm_interface`). The kernel of its gradients has no
decomposition (`make_fallback` of torch/_inductor/lowering.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.views import contiguous
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer, form


@traced("_weight_norm")
def weight_norm(t: Tracer, v: Node, g: Node, dim: int = 0) -> Node:
    """`v * (g / norm(v))`, with the norm over all dimensions but the first or the last one: in float32 for half types.

    Raises:
        ValueError: another dimension is left, for which PyTorch has no kernel, or there is no other.
    """
    dim = dim % v.ndim
    over = tuple([axis for axis in range(v.ndim) if axis != dim])
    if dim not in (0, v.ndim - 1) or not over:
        raise ValueError(f"weight norm over all but dimension {dim} of {v.ndim}")
    v, g = contiguous(t, v), contiguous(t, g)
    total = t.sum(t.pointwise("aten::pow.Tensor_Scalar", t.opmath(v), 2), over, True)
    norm = t.pointwise("aten::pow.Tensor_Scalar", total, 0.5)
    out = t.mul(v, t.div(g, t.cast(norm, g.dtype)))

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        parts = form(v.shape, v.dtype), form(g.shape, g.dtype)
        args = (contiguous(t, grads[0]), v, g, norm, dim)
        call = t.node("aten::_weight_norm_interface_backward", args, parts)
        return [t.node("operator::getitem", (call, k), part) for k, part in enumerate(parts)]

    t.record(out, [v, g], gradient)
    return out
