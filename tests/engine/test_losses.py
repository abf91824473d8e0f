"""The losses that the tool adds, against those that a model may call itself (which are compared with PyTorch)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from staticmem.eager.autograd import run_backward
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine import losses
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.loss import binary_cross_entropy_with_logits, cross_entropy_loss, mse_loss
from staticmem.ops.reduction import mean
from staticmem.ops.views import flatten


@pytest.mark.parametrize(
    ("shape", "loss"),
    [((4, 10), "cross-entropy"), ((2, 7, 100), "cross-entropy"), ((2, 21, 5, 5), "cross-entropy"), ((4, 1), "mean"),
     ((2, 768, 5, 5), "mean"), ((2, 3, 1, 1), "mean"), ((4,), "mean"), ((), "mean")],
)  # fmt: skip
def test_the_loss_follows_the_shape_of_the_output(shape: tuple[int, ...], loss: str) -> None:
    assert losses.choose(shape) == loss


@pytest.mark.parametrize(
    ("loss", "shape", "target"),
    [("cross-entropy", (4, 10), ((4,), dtypes.int64)), ("cross-entropy", (2, 7, 100), ((2, 7), dtypes.int64)),
     ("cross-entropy", (2, 21, 5, 6), ((2, 5, 6), dtypes.int64)), ("mse", (4, 3), ((4, 3), dtypes.float32)),
     ("mean", (4, 3), None)],
)  # fmt: skip
def test_targets(loss: str, shape: tuple[int, ...], target: object) -> None:
    assert losses.target_of(loss, shape) == target


def test_cross_entropy_needs_a_class_dimension() -> None:
    e = Eager()
    e.trace.begin("forward")
    with pytest.raises(UsageError, match="does not fit"):
        losses.run(e, "cross-entropy", e.empty((4,), dtypes.float32), e.empty((), dtypes.int64))


def buffers(shape: tuple[int, ...], dtype: DType, amp: DType | None, run: object) -> Sequence[tuple[object, ...]]:
    """Every buffer of a loss and its backward, with its life."""
    e = Eager()
    e.trace.begin("forward")
    e.autocast = amp
    output = e.empty(shape, dtype)
    output.requires_grad = True
    e.hold(output, Owner(Reason.VALUE, "output"))
    target = e.empty((shape[0] * shape[1], ) if len(shape) == 3 else (shape[0], *shape[2:]), dtypes.int64)  # fmt: skip
    e.hold(target, Owner(Reason.OUTSIDE, "target"))
    e.open_scope()
    loss: Tensor = run(e, output, target)  # type: ignore[operator]
    e.hold(loss, Owner(Reason.VALUE, "loss"))
    e.close_scope()
    e.autocast, e.grad_enabled = None, False
    root = e.empty_like(loss)
    e.hold(root, Owner(Reason.GRADIENT, "root"))
    e.trace.begin("backward")
    run_backward(e, loss, root, {})
    return [(b.nbytes, b.dtype.name, b.born, b.died) for b in e.trace.buffers]


@pytest.mark.parametrize("amp", [None, dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(4, 10), (2, 7, 100), (2, 21, 5, 6)])
def test_cross_entropy_is_what_a_model_would_run(shape: tuple[int, ...], amp: DType | None) -> None:
    def added(e: Eager, output: Tensor, target: Tensor) -> Tensor:
        return losses.run(e, "cross-entropy", output, target)

    def called(e: Eager, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy_loss(e, flatten(e, output, 0, 1) if output.ndim == 3 else output, target)

    dtype = amp or dtypes.float32
    assert buffers(shape, dtype, amp, added) == buffers(shape, dtype, amp, called)


def test_bce_is_what_a_model_would_run() -> None:
    def added(e: Eager, output: Tensor, target: Tensor) -> Tensor:
        return losses.run(e, "bce", output, e.alias(output, output.shape, output.strides))

    def called(e: Eager, output: Tensor, target: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(e, output, e.alias(output, output.shape, output.strides))

    assert losses.target_of("bce", (4, 3)) == ((4, 3), dtypes.float32)
    assert buffers((4, 3), dtypes.float32, None, added) == buffers((4, 3), dtypes.float32, None, called)


def test_mse_and_mean_are_what_a_model_would_run() -> None:
    def added_mse(e: Eager, output: Tensor, target: Tensor) -> Tensor:
        return losses.run(e, "mse", output, e.alias(output, output.shape, output.strides))

    def called_mse(e: Eager, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(e, output, e.alias(output, output.shape, output.strides))

    def added_mean(e: Eager, output: Tensor, target: Tensor) -> Tensor:
        return losses.run(e, "mean", output, None)

    def called_mean(e: Eager, output: Tensor, target: Tensor) -> Tensor:
        return mean(e, output)

    assert buffers((4, 3), dtypes.float32, None, added_mse) == buffers((4, 3), dtypes.float32, None, called_mse)
    assert buffers((4, 3), dtypes.float32, None, added_mean) == buffers((4, 3), dtypes.float32, None, called_mean)
