"""Losses as PyTorch runs them, the choice of one from the output's shape, and that of a training step."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.engine.features import Feature, RunningStep
from staticmem.engine.shapes import output_shape
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Note, Value
from staticmem.ops.casts import to_copy
from staticmem.ops.dispatch import call
from staticmem.ops.reduction import mean
from staticmem.ops.registry import rule_of
from staticmem.ops.softmax import softmax
from staticmem.ops.views import flatten
from staticmem.scenario.losses import AFTER_THE_MODEL, HEAD_LOSSES, OF_THE_MODEL

_WITH_TARGET_OF_THE_OUTPUT = ("mse", "l1", "smooth-l1", "bce")  # of its shape
_AN_OUTPUT = ("none", "outputs", *OF_THE_MODEL)  # losses that are outputs of the model
_CALLS = {
    "l1": "aten::l1_loss", "smooth-l1": "aten::smooth_l1_loss", "bce": "aten::binary_cross_entropy_with_logits",
}  # fmt: skip


class Criterion(Feature):
    """A loss of the first output; `auto` is decided by its shape."""

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        step.criterion = self
        self.values: Sequence[str] = step.graph.outputs[:1]  # the outputs that it is of
        self.name = step.scenario.loss
        self.target: Tensor | None = None
        self.ops_after_model = int(self.name in AFTER_THE_MODEL and not step.has_own_loss)
        self.is_output = self.name in _AN_OUTPUT or step.has_own_loss

    def place(self) -> None:
        """Places the target."""
        step = self.step
        shape = output_shape(step.graph)
        if step.has_own_loss:
            if self.name not in ("auto", "none"):
                text = f"--loss {self.name} is not used: the recording has the loss of the code"
                step.notes.append(Note("warning", "SM329", text))
            self.name = "none"
        if self.name in HEAD_LOSSES:  # the graph ends with it
            return
        if self.name == "auto":
            self.name = choose(shape)
            text = f"loss: {self.name}, chosen by the output's shape {list(shape)} (--loss changes it)"
            step.notes.append(Note("assumption", "SM330", text))
        target = target_of(self.name, shape)
        if target is not None:
            self.target = step.place(Value("target", target[1], target[0]), "input", "target")

    def compute(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """What backward starts from: the loss, or all outputs."""
        several = outputs if self.name == "outputs" else outputs[:1]
        return [run(self.e, self.name, output, self.target) for output in several]


def choose(shape: layout.Shape) -> str:
    """The loss that `auto` picks: cross-entropy where the output looks like class scores, else its mean.

    (N, C): one class a row; (N, T, V): a class a token; (N, C, H, W) with at most 512 channels: a class a pixel.
    """
    if len(shape) in (2, 3) and shape[-1] > 1:
        return "cross-entropy"
    if len(shape) == 4 and 1 < shape[1] <= 512 and min(shape[2:]) > 1:
        return "cross-entropy"
    return "mean"


def target_of(loss: str, shape: layout.Shape) -> tuple[layout.Shape, dtypes.DType] | None:
    """Shape and dtype of the target tensor, or None where the loss needs none."""
    if loss == "cross-entropy":
        if len(shape) == 3:
            return shape[:2], dtypes.int64
        return (shape[0], *shape[2:]), dtypes.int64
    if loss in _WITH_TARGET_OF_THE_OUTPUT:
        return shape, dtypes.float32
    return None


def run(e: Eager, loss: str, output: Tensor, target: Tensor | None) -> Tensor:
    """The loss of an output; `none` and `outputs` take the output itself (a model that returns its loss), whatever its
    shape.

    Raises:
        UsageError: the output has no loss of this kind.
    """
    if output.dtype is dtypes.string:
        raise UsageError(
            "the model's first output holds strings", "A loss needs numbers.", "Use --mode infer.", code="SM131"
        )
    if loss == "mean":
        return mean(e, output)
    if loss == "sum":
        total: Tensor = call(e, rule_of("aten::sum"), (output,), {})  # autocast runs it in float32
        return total
    if target is None:  # the output is the loss, or what backward starts from
        return output
    if loss == "mse":
        return mse(e, output, target)
    if loss in _CALLS:
        result: Tensor = call(e, rule_of(_CALLS[loss]), (output, target), {})
        return result
    if output.ndim < 2:
        raise UsageError(
            "--loss cross-entropy does not fit this model",
            f"Its output has shape {list(output.shape)}; cross-entropy needs a class dimension.",
            "Use --loss mse or --loss mean.",
            code="SM130",
        )
    return cross_entropy(e, flatten(e, output, 0, 1) if output.ndim == 3 else output, target)


def cross_entropy(e: Eager, logits: Tensor, target: Tensor) -> Tensor:
    """log_softmax in the input's dtype, then nll_loss; autocast casts the log-probabilities to float32 for nll_loss.

    Source: aten/src/ATen/native/LossNLL.cpp, `cross_entropy_loss` passes the input's dtype to log_softmax, so
    autocast's float32 default does not apply to it. nll_loss saves its input, the target and the total weight.
    """
    log_probs = softmax(e, logits, 1, kernel="aten._log_softmax")
    if e.autocast is not None and log_probs.dtype in dtypes.HALVES:
        log_probs = to_copy(e, log_probs, dtypes.float32)
    name = "aten.nll_loss_forward" if logits.ndim == 2 else "aten.nll_loss2d_forward"
    out = e.empty((), log_probs.dtype, kernel=f"{name}.default")
    total_weight = e.empty((), log_probs.dtype)

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.empty(log_probs.shape, log_probs.dtype, kernel=name.replace("forward", "backward.default"))

    e.record("NllLossBackward0", out, [log_probs], [Formula((0,), gradient)], [log_probs, target, total_weight])
    return out


def mse(e: Eager, output: Tensor, target: Tensor) -> Tensor:
    """Saves output and target; backward makes one tensor."""
    source = output
    if e.autocast is not None and output.dtype in dtypes.HALVES:
        source = to_copy(e, output, dtypes.float32)
    out = e.empty((), source.dtype, kernel="aten.mse_loss.default")

    def gradient(e: Eager, grads: Grads, need: Sequence[bool]) -> Tensor:
        return e.pointwise("aten.mse_loss_backward.default", source, target)

    e.record("MseLossBackward0", out, [source], [Formula((0,), gradient)], [source, target])
    return out
