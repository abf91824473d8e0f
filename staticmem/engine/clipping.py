"""Clipping of gradients between backward and the optimizer: scalars, 512 bytes each on the device.

Source: torch/nn/utils/clip_grad.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from staticmem.engine.features import Feature
from staticmem.engine.grad_scaler import make_scalar

if TYPE_CHECKING:
    from staticmem.engine.optimizers import Optimizer, OptimizersOfGroups


class ClippedGradients(Feature):
    """`clip_grad_norm_` with its default, foreach: one norm a gradient, their stack, the coefficient; in place."""

    def begin_update(self, optimizer: Optimizer | OptimizersOfGroups | None) -> None:
        e = self.e
        gradients = [*self.step.grads.values()]
        if not gradients:
            return
        e.open_scope()
        e.kernel("aten._foreach_norm.Scalar")
        norms = [e.empty((), g.dtype) for g in gradients]
        stacked = e.empty((len(norms),), norms[0].dtype, kernel="aten.stack.default")
        total = make_scalar(e, "aten.linalg_vector_norm.default", stacked.dtype)
        for tensor in (stacked, *norms):
            e.free(tensor)
        added = make_scalar(e, "aten.add.Tensor", total.dtype)
        inverse = make_scalar(e, "aten.reciprocal.default", total.dtype)
        e.free(added)
        make_scalar(e, "aten.mul.Tensor", total.dtype)
        e.free(inverse)
        make_scalar(e, "aten.clamp.default", total.dtype)
        e.kernel("aten._foreach_mul_.Tensor")
        e.close_scope()
