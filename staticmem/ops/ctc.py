"""Connectionist temporal classification, as the native kernel of CUDA computes it.

Sources: aten/src/ATen/native/LossCTC.cpp (`ctc_loss_impl`, `get_clamped_target_length`),
native/cuda/LossCTC.cu (`ctc_loss_gpu_template`, `ctc_loss_backward_gpu_template`), and
derivatives.yaml (`_ctc_loss`). cuDNN's loss runs for int32 targets in one dimension alone, with blank 0
(native/cudnn/LossCTC.cpp, `_use_cudnn_ctc_loss`); it is not covered.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.arithmetic import div
from staticmem.ops.dispatch import call
from staticmem.ops.loss import reduced
from staticmem.ops.registry import KernelCall, Temporary, function_of, rule, rule_of, workspace
from staticmem.ops.softmax import softmax
from staticmem.ops.views import transpose
from staticmem.units import exactly


@rule("ctc_loss")
@scoped
def ctc_loss(
    e: Eager, log_probs: Tensor, targets: Tensor, input_lengths: Sequence[int], target_lengths: Sequence[int],
    blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Log-probabilities (T, N, C) and targets (N, S) in int64: saves both, the losses, and log_alpha of N x T x
    (2 S + 1) numbers; backward makes one contiguous tensor of the first's size. `target_lengths` are numbers."""
    frames, batch = log_probs.shape[:2]
    states = 2 * max(target_lengths) + 1
    losses = e.empty((batch,), log_probs.dtype, kernel="aten._ctc_loss.default")
    log_alpha = e.empty((batch, frames, states), log_probs.dtype)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(log_probs.shape, log_probs.dtype, kernel="aten._ctc_loss_backward.default")

    saves = [log_probs, targets, losses, log_alpha]
    e.record("CtcLossBackward0", losses, [log_probs], [Formula((0,), gradient)], saves)
    e.free(log_alpha)
    if zero_infinity:
        losses = _without_infinity(e, losses)
    if reduction != 1:
        return reduced(e, losses, reduction)
    lengths = e.empty((batch,), losses.dtype, kernel="aten._to_copy.default")
    clamped: Tensor = function_of("aten::clamp_min")(e, lengths, 1)
    e.free(lengths)
    return reduced(e, div(e, losses, clamped), reduction)


@scoped
def _without_infinity(e: Eager, losses: Tensor) -> Tensor:
    """`where(losses == inf, zeros({}), losses)`."""
    zero = e.empty((), losses.dtype, kernel="aten.zeros.default")
    infinite = e.empty(losses.shape, dtypes.bool_, kernel="aten.eq.Scalar")
    result: Tensor = function_of("aten::where")(e, infinite, zero, losses)
    e.free(losses)
    return result


@workspace("aten._ctc_loss.default aten._ctc_loss_backward.default")
def ctc_temporaries(call: KernelCall) -> list[Temporary]:
    """Lengths of targets and inputs, and where each target begins, in int64; in the backward log_beta, of log_alpha's
    size."""
    backward = call.kernel == "aten._ctc_loss_backward.default"
    log_alpha = (call.forward if backward else call.results)[1]
    lengths = exactly(log_alpha.shape[0] * dtypes.int64.itemsize)
    small = [
        Temporary(lengths, f"{what} of CTC", first=True)
        for what in ("lengths of targets", "lengths of inputs", "offsets of targets")
    ]
    return [*small, Temporary(exactly(log_alpha.nbytes), "log_beta of CTC", first=True)] if backward else small


@scoped
def _log_softmax(e: Eager, outputs: Tensor) -> Tensor:
    return softmax(e, outputs, outputs.ndim - 1, dtypes.float32, kernel="aten._log_softmax")


@rule("staticmem::ctc_loss")
@scoped
def ctc_loss_of_outputs(e: Eager, outputs: Tensor, targets: Tensor, batch_first: bool, normalized: bool) -> Tensor:
    """`ctc_loss(outputs.log_softmax(-1, dtype=float32).transpose(0, 1), targets, input_lengths, target_lengths)`,
    without log_softmax where outputs are `normalized`, and without transpose where they are (T, N, C)."""
    log_probs = outputs if normalized else _log_softmax(e, outputs)
    if batch_first:
        log_probs = transpose(e, log_probs, 0, 1)
    frames, batch = log_probs.shape[:2]
    lengths = (frames,) * batch, (targets.shape[1],) * batch
    loss: Tensor = call(e, rule_of("aten::ctc_loss"), (log_probs, targets, *lengths), {})
    return loss
