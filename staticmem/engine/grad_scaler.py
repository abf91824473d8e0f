"""Loss scaling, and clipping of gradients between backward and the optimizer: scalars, 512 bytes each on the device.

Source: torch/amp/grad_scaler.py, torch/nn/utils/clip_grad.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine.features import Feature, RunningStep
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.arithmetic import mul

if TYPE_CHECKING:
    from staticmem.engine.optimizers import Optimizer, OptimizersOfGroups


def make_scalar(e: Eager, kernel: str, dtype: DType = dtypes.float32) -> Tensor:
    return e.empty((), dtype, kernel=kernel)


class GradScaler(Feature):
    """`torch.amp.GradScaler`: the scale and the growth tracker live on the device from the first `scale()` on."""

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        self.state = Owner(Reason.OPTIMIZER, "GradScaler")
        self.found_inf = Owner(Reason.OPTIMIZER, "GradScaler")
        self.factor: Tensor | None = None

    def place(self) -> None:
        """The state that the step before has left."""
        e = self.e
        self.factor = make_scalar(e, "aten.full.default")
        for tensor, name in (
            (self.factor, "scale"),
            (make_scalar(e, "aten.full.default", dtypes.int32), "growth_tracker"),
        ):
            e.categorise(tensor, "optimizer_state", f"GradScaler.{name}")
            e.hold(tensor, self.state)

    def scale(self, losses: Sequence[Tensor]) -> Sequence[Tensor]:
        """`scale(loss)`: a product that saves the scale."""
        assert self.factor is not None
        return [mul(self.e, loss, self.factor) for loss in losses]

    def begin_update(self, optimizer: Optimizer | OptimizersOfGroups | None) -> None:
        if optimizer is not None:
            self._unscale(optimizer.fused and not self.step.scenario.clip_grad_norm)

    def _unscale(self, fused: bool) -> None:
        """`unscale_`: gradients are divided in place, with float64 for the reciprocal. A fused optimizer divides in its
        own kernel: `step` then makes a dummy for the check, a copy of the scale, and the sum of the checks' results."""
        e = self.e
        e.open_scope()
        if fused:
            make_scalar(e, "aten.full.default")
            e.hold(make_scalar(e, "aten.full.default"), self.found_inf)
            e.kernel("aten._amp_foreach_non_finite_check_and_unscale_.default")
            e.close_scope()
            e.hold(make_scalar(e, "aten.add.Tensor"), self.found_inf)
            e.hold(make_scalar(e, "aten.mul.Tensor"), self.found_inf)
            return
        double = make_scalar(e, "aten._to_copy.default", dtypes.float64)
        reciprocal = make_scalar(e, "aten.reciprocal.default", dtypes.float64)
        inverse = make_scalar(e, "aten._to_copy.default")
        e.free(double, reciprocal)
        e.hold(make_scalar(e, "aten.full.default"), self.found_inf)
        e.kernel("aten._amp_foreach_non_finite_check_and_unscale_.default")
        e.free(inverse)
        e.close_scope()

    def end_update(self) -> None:
        """`update()`: changes the scale in place and drops the results of the checks (`found_inf_per_device`)."""
        self.e.kernel("aten._amp_update_scale_.default")
        self.e.release(self.found_inf)


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
        e.free(stacked, *norms)
        added = make_scalar(e, "aten.add.Tensor", total.dtype)
        inverse = make_scalar(e, "aten.reciprocal.default", total.dtype)
        e.free(added)
        make_scalar(e, "aten.mul.Tensor", total.dtype)
        e.free(inverse)
        make_scalar(e, "aten.clamp.default", total.dtype)
        e.kernel("aten._foreach_mul_.Tensor")
        e.close_scope()
