"""Losses that a model computes itself (`engine/losses.py` has those that the tool adds).

`reduction`: 0 none, 1 mean, 2 sum, as in `at::Reduction`.

Connectionist temporal classification, as the native kernel of CUDA computes it.

Sources: aten/src/ATen/native/LossCTC.cpp (`ctc_loss_impl`, `get_clamped_target_length`),
native/cuda/LossCTC.cu (`ctc_loss_gpu_template`, `ctc_loss_backward_gpu_template`), and
derivatives.yaml (`_ctc_loss`). cuDNN's loss runs for int32 targets in one dimension alone, with blank 0
(native/cudnn/LossCTC.cpp, `_use_cudnn_ctc_loss`); it is not covered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager, scoped
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import Copies
from staticmem.ir import dtypes
from staticmem.ir.graph import Op
from staticmem.ir.onnx_graph import Node
from staticmem.ops.arithmetic import add, div, mul, sub
from staticmem.ops.binary import xlogy
from staticmem.ops.casts import to_copy
from staticmem.ops.dispatch import call
from staticmem.ops.onnx import Context, text, translation
from staticmem.ops.pointwise import end_statement, gradient_like
from staticmem.ops.reduction import mean
from staticmem.ops.reduction import sum as sum_
from staticmem.ops.registry import KernelCall, Temporary, function_of, rule, rule_of, workspace
from staticmem.ops.softmax import softmax
from staticmem.ops.views import reshape, transpose
from staticmem.units import exactly

# Their reduced result is made in the size of what is reduced, and `resize_({})` does not shrink its storage
# (`TORCH_META_FUNC` of native/BinaryOps.cpp; huber_loss and l1_loss make a new one)
KEEP_WHOLE = ("mse_loss", "smooth_l1_loss")


def reduced(e: Eager, loss: Tensor, reduction: int) -> Tensor:
    if reduction == 0:
        return loss
    return mean(e, loss) if reduction == 1 else sum_(e, loss)


def _pair_loss(e: Eager, self: Tensor, target: Tensor, reduction: int, name: str) -> Tensor:
    """Element-wise, then reduced in the kernel's own temporary, which the dispatcher does not see."""
    kernel = f"aten.{name}.default"
    if reduction == 0 or name in KEEP_WHOLE:
        out = e.pointwise(kernel, self, target)
    else:
        out = e.empty((), self.dtype, kernel=kernel)
    if reduction and name in KEEP_WHOLE:
        e.reads(Copies((out.nbytes,)))
        e.reduces(out, range(out.ndim))
        out = e.alias(out, (), ())

    def by(like: Tensor) -> Any:
        def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
            return e.pointwise(f"aten.{name}_backward.default", self, target)

        return gradient

    formulas = [Formula((0,), by(self)), Formula((1,), by(target))]
    return e.record(f"{name.title().replace('_', '')}Backward0", out, [self, target], formulas, [self, target])


@rule("mse_loss", autocast="float32")
def mse_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Saves both; backward makes one tensor for each that needs a gradient."""
    return _pair_loss(e, self, target, reduction, "mse_loss")


@rule("smooth_l1_loss", autocast="float32")
def smooth_l1_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    """Saves both; backward makes one tensor for each that needs a gradient."""
    return _pair_loss(e, self, target, reduction, "smooth_l1_loss")


@rule("huber_loss", autocast="float32")
def huber_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """Saves both; backward makes one tensor for each that needs a gradient."""
    return _pair_loss(e, self, target, reduction, "huber_loss")


@rule("binary_cross_entropy")
def binary_cross_entropy(
    e: Eager, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Saves input, target and weight; backward makes one tensor."""
    out = e.empty_like(self, kernel="aten.binary_cross_entropy.default")
    if reduction:  # native/cuda/Loss.cu resizes it, which shrinks no storage
        out = e.alias(out, (), ())

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty_like(self, kernel="aten.binary_cross_entropy_backward.default")

    saves = [self, target, weight]
    return e.record("BinaryCrossEntropyBackward0", out, [self], [Formula((0,), gradient)], saves)


@scoped
def _nll(e: Eager, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    flat = log_probs.ndim <= 2
    name = "aten.nll_loss_forward" if flat else "aten.nll_loss2d_forward"
    out = e.empty(target.shape if reduction == 0 else (), log_probs.dtype, kernel=f"{name}.default")
    total = e.empty((), log_probs.dtype)
    gradient = gradient_like(log_probs, name.replace("forward", "backward.default"), log_probs.dtype)
    saves = [log_probs, target, weight, total]
    return e.record("NllLossBackward0", out, [log_probs], [Formula((0,), gradient)], saves)


@rule("nll_loss_nd nll_loss nll_loss2d", autocast="float32")
def nll_loss(
    e: Eager, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    """Saves input, target, weight and the total weight; backward makes one tensor of the input's size."""
    return _nll(e, self, target, weight, reduction)


@scoped
def _nll_nd(e: Eager, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    """nll_loss as the dispatcher calls it: autocast casts log-probabilities to float32, for as long as the call."""
    if e.autocast is not None and log_probs.dtype in dtypes.HALVES:
        log_probs = to_copy(e, log_probs, dtypes.float32)
    return _nll(e, log_probs, target, weight, reduction)


@rule("cross_entropy_loss")
@scoped
def cross_entropy_loss(
    e: Eager, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """log_softmax in the input's dtype, which saves its result, then nll_loss; products for targets that are
    probabilities (a target of the input's shape), and nll_loss beside a sum over the classes with label smoothing.

    Source: aten/src/ATen/native/LossNLL.cpp, `cross_entropy_loss_symint`.
    """
    classes = 1 if self.ndim > 1 else 0
    log_probs = softmax(e, self, classes, kernel="aten._log_softmax")
    if self.shape == target.shape:
        return _of_probabilities(e, log_probs, target, weight, reduction, label_smoothing)
    if label_smoothing > 0:
        return _smoothed(e, log_probs, target, weight, reduction, label_smoothing)
    return _nll_nd(e, log_probs, target, weight, reduction)


def _class_weights(e: Eager, weight: Tensor, like: Tensor) -> Tensor:
    """Weights of the classes as a view that broadcasts over the input."""
    shape = tuple(weight.numel if d == 1 else 1 for d in range(like.ndim))
    return reshape(e, weight, shape) if like.ndim > 1 else weight


def _called(e: Eager, name: str, *args: Any) -> Tensor:
    """A call through the dispatcher, so that autocast sees it."""
    result: Tensor = call(e, rule_of(f"aten::{name}"), args, {})
    return result


def _of_probabilities(
    e: Eager, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    """`cross_entropy_loss_prob_target`: -(log_probs * target * weight), summed."""
    if label_smoothing > 0:
        scaled = mul(e, target, 1 - label_smoothing)
        target = add(e, scaled, label_smoothing)
        e.free(scaled)
    weights = None if weight is None else _class_weights(e, weight, log_probs)
    product = mul(e, log_probs, target)
    if weights is not None:
        product = mul(e, product, weights)
    total = _called(e, "sum", product, (1,)) if reduction == 0 and log_probs.ndim > 1 else _called(e, "sum", product)
    loss = _called(e, "neg", total)
    return div(e, loss, log_probs.numel) if reduction == 1 else loss


def _smoothed(
    e: Eager, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    """`cross_entropy_loss_label_smoothing`: nll_loss and the mean over the classes, each with its share."""
    loss = _nll_nd(e, log_probs, target, weight, reduction)
    classes = 1 if log_probs.ndim > 1 else 0
    product = log_probs if weight is None else mul(e, log_probs, _class_weights(e, weight, log_probs))
    total = _called(e, "sum", product, (classes,))
    smooth = _called(e, "neg", total)
    e.free(total)
    if product is not log_probs:
        e.free(product)
    ignored = _called(e, "eq", target, 0)
    smooth = _called(e, "masked_fill_", smooth, ignored, 0.0)
    if reduction == 1:
        smooth = _mean_over_kept(e, smooth, ignored, target, weight)
    elif reduction == 2:
        smooth = _called(e, "sum", smooth)
    share = mul(e, loss, 1 - label_smoothing)
    return add(e, share, mul(e, smooth, label_smoothing))


@scoped
def _mean_over_kept(e: Eager, smooth: Tensor, ignored: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """The sum by the number of targets that are not ignored, or by their weights (none is taken to be ignored)."""
    kept = _called(e, "bitwise_not", ignored)
    if weight is not None:
        chosen = e.empty((target.numel,), target.dtype, kernel="aten.masked_select.default")
        kept = _called(e, "gather", weight, 0, chosen)
    count = _called(e, "sum", kept)
    return div(e, _called(e, "sum", smooth), count)


@rule("l1_loss", autocast="float32")
@scoped
def l1_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """sub, abs and a reduction: saves the difference."""
    size = function_of("aten::abs")(e, sub(e, self, target))
    return reduced(e, size, reduction)


@rule("kl_div", autocast="float32")
@scoped
def kl_div(e: Eager, self: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False) -> Tensor:
    """target * (log(target) - input): xlogy, a product and their difference; of a logarithm exp, sub and mul."""
    if log_target:
        right = sub(e, target, self)
        left = function_of("aten::exp")(e, target)
        loss = mul(e, left, right)
    else:
        right = mul(e, target, self)
        left = xlogy(e, target, target)
        loss = sub(e, left, right)
    e.free(left)  # unless their backward saved them
    e.free(right)
    return reduced(e, loss, reduction)


@rule("binary_cross_entropy_with_logits", autocast="float32")
def binary_cross_entropy_with_logits(
    e: Eager,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """Saves input, target and weights; backward is one tensor, with `pos_weight` three at once."""
    shape = self.shape if reduction == 0 else ()
    out = e.empty(shape, self.dtype, kernel="aten.binary_cross_entropy_with_logits.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        # FunctionsManual.cpp, binary_cross_entropy_with_logits_backward
        if pos_weight is None:
            return e.pointwise("aten.sigmoid.default", self)  # the rest runs in it
        e.pointwise("aten.mul.Tensor", pos_weight, target)
        result = e.pointwise("aten.add.Scalar", target)
        e.free(e.pointwise("aten.sigmoid.default", self))
        return result

    saves = [self, target, weight, pos_weight]
    return e.record("BinaryCrossEntropyWithLogitsBackward0", out, [self], [Formula((0,), gradient)], saves)


@rule("soft_margin_loss", autocast="float32")
def soft_margin_loss(e: Eager, self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """log(1 + exp(-target * self)) in one buffer, which a reduced result keeps whole (`resize_` does not shrink it).

    Saves both; backward has three buffers at once, of which one is the gradient.
    """
    out = e.pointwise("aten.soft_margin_loss.default", self, target)
    if reduction:
        out = e.alias(out, (), ())

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        e.kernel("aten.soft_margin_loss_backward.default")
        parts = [e.empty_like(target), e.pointwise("", target, self)]
        exponential = e.pointwise("", target, self)
        end_statement(e, *parts)
        result = e.pointwise("", target, exponential)
        e.free(exponential)
        return result

    return e.record("SoftMarginLossBackward0", out, [self], [Formula((0,), gradient)], [self, target])


@rule("poisson_nll_loss", autocast="float32")
@scoped
def poisson_nll_loss(
    e: Eager, input: Tensor, target: Tensor, log_input: bool, full: bool, eps: float, reduction: int
) -> Tensor:
    """exp(input) - target * input, or input - target * log(input + eps); without Stirling's term."""
    if log_input:
        product, rate = mul(e, target, input), function_of("aten::exp")(e, input)
        temporaries = [product, rate]
        loss = sub(e, rate, product)
    else:
        raised = add(e, input, eps)
        log = function_of("aten::log")(e, raised)
        temporaries = [raised, log, mul(e, target, log)]
        loss = sub(e, input, temporaries[-1])
    end_statement(e, *temporaries)
    return reduced(e, loss, reduction)


_ONNX_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


_ONNX_LOSSES = {"SoftmaxCrossEntropyLoss": "cross_entropy_loss", "NegativeLogLikelihoodLoss": "nll_loss_nd"}


@translation(*_ONNX_LOSSES)
def onnx_class_loss(ctx: Context, node: Node) -> list[Op] | None:
    """A loss over scores and the numbers of classes; the log-probabilities as a second result are not covered."""
    if len(node.outputs) > 1 and node.outputs[1]:
        return None
    reduction = _ONNX_REDUCTIONS[text(node, "reduction", "mean")]
    scores, labels = (ctx.ref(name) for name in node.inputs[:2])
    return [ctx.op(node, f"aten::{_ONNX_LOSSES[node.op]}", scores, labels, ctx.optional(node, 2), reduction)]


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
