"""Losses that a model computes itself (`training/losses.py` has those that the tool adds).

`reduction`: 0 none, 1 mean, 2 sum, as in `at::Reduction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem import dtypes
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.rules.pointwise import grad_of
from staticmem.rules.reduction import softmax
from staticmem.rules.registry import rule


def _pair_loss(e: Eager, self: Tensor, target: Tensor, reduction: int, name: str) -> Tensor:
    """Element-wise, then reduced in the kernel's own temporary, which the dispatcher does not see."""
    kernel = f"aten.{name}.default"
    out = e.pointwise(kernel, self, target) if reduction == 0 else e.empty((), self.dtype, kernel=kernel)

    def by(like: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            return e.pointwise(f"aten.{name}_backward.default", self, target)

        return gradient

    formulas = [Formula((0,), by(self)), Formula((1,), by(target))]
    e.record(f"{name.title().replace('_', '')}Backward0", out, [self, target], formulas, [self, target])
    return out


@rule("aten::mse_loss", autocast="float32")
def mse_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Saves both; backward makes one tensor for each that needs a gradient."""
    return _pair_loss(e, self, target, reduction, "mse_loss")


@rule("aten::smooth_l1_loss", autocast="float32")
def smooth_l1_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    """Saves both; backward makes one tensor for each that needs a gradient."""
    return _pair_loss(e, self, target, reduction, "smooth_l1_loss")


@rule("aten::huber_loss", autocast="float32")
def huber_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """Saves both; backward makes one tensor for each that needs a gradient."""
    return _pair_loss(e, self, target, reduction, "huber_loss")


@rule("aten::binary_cross_entropy")
def binary_cross_entropy(
    e: Eager, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Saves input, target and weight; backward makes one tensor."""
    out = e.empty(self.shape if reduction == 0 else (), self.dtype, kernel="aten.binary_cross_entropy.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty_like(self, kernel="aten.binary_cross_entropy_backward.default")

    saves = [self, target, weight]
    e.record("BinaryCrossEntropyBackward0", out, [self], [Formula((0,), gradient)], saves)
    return out


def _nll(e: Eager, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    flat = log_probs.ndim <= 2
    name = "aten.nll_loss_forward" if flat else "aten.nll_loss2d_forward"
    out = e.empty(target.shape if reduction == 0 else (), log_probs.dtype, kernel=f"{name}.default")
    total = e.empty((), log_probs.dtype)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(log_probs.shape, log_probs.dtype, kernel=name.replace("forward", "backward.default"))

    saves = [log_probs, target, weight, total]
    e.record("NllLossBackward0", out, [log_probs], [Formula((0,), gradient)], saves)
    return out


@rule("aten::nll_loss_nd", "aten::nll_loss", "aten::nll_loss2d", autocast="float32")
def nll_loss(
    e: Eager, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    """Saves input, target, weight and the total weight; backward makes one tensor of the input's size."""
    return _nll(e, self, target, weight, reduction)


@rule("aten::cross_entropy_loss")
def cross_entropy_loss(
    e: Eager, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """log_softmax in the input's dtype, which saves its result, then nll_loss; class indices without smoothing only."""
    if target.dtype.is_differentiable or label_smoothing:
        raise ValueError("cross_entropy with class probabilities or label smoothing has no rule")
    log_probs = softmax(e, self, 1 if self.ndim > 1 else 0, kernel="aten._log_softmax")
    if e.autocast is not None and log_probs.dtype in (dtypes.float16, dtypes.bfloat16):
        from staticmem.rules.casts import to_copy

        log_probs = to_copy(e, log_probs, dtypes.float32)
    return _nll(e, log_probs, target, weight, reduction)


@rule("aten::embedding_bag", "aten::_embedding_bag")
def embedding_bag(
    e: Eager, weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Saves indices, offsets and int64 helpers (one an index, one a bag); a dense gradient of the table's size."""
    bags = offsets.shape[0] - (1 if include_last_offset else 0)
    out = e.empty((bags, weight.shape[1]), weight.dtype, kernel="aten._embedding_bag.default")
    offset2bag = e.empty(indices.shape, indices.dtype)
    bag_size = e.empty(offsets.shape, indices.dtype)
    max_indices = e.empty((bags, weight.shape[1]) if mode == 2 else (0,), indices.dtype)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(weight.shape, grad_of(grads).dtype, kernel="aten._embedding_bag_dense_backward.default")

    saves = [indices, offsets, offset2bag, bag_size, max_indices, per_sample_weights]
    e.record("EmbeddingBagBackward0", [out], [weight], [Formula((0,), gradient)], saves)
    return out, offset2bag, bag_size, max_indices
