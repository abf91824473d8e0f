"""Losses as PyTorch runs them, the choice of one from the output's shape, and losses over several outputs.

`loss = cross_entropy(out, y) + 0.4 * cross_entropy(aux, y)`: one term after the other; each sum ends its operands. The
losses that a sum or a product was made of are temporaries of that line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from staticmem.eager import strides as layout
from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.strides import Shape
from staticmem.eager.tensor import Tensor
from staticmem.engine.features import Feature, RunningStep
from staticmem.engine.shapes import output_shape, value_infos
from staticmem.errors import UsageError, closest
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Note, Value
from staticmem.ir.record import record
from staticmem.ops.casts import to_copy
from staticmem.ops.dispatch import call
from staticmem.ops.reduction import mean
from staticmem.ops.registry import rule_of
from staticmem.ops.softmax import softmax
from staticmem.ops.views import flatten
from staticmem.scenario import losses

_WITH_TARGET_OF_THE_OUTPUT = ("mse", "l1", "smooth-l1", "bce")  # of its shape
_AN_OUTPUT = ("none", "outputs", *losses.OF_THE_MODEL)  # losses that are outputs of the model
_CALLS = {
    "mse": "aten::mse_loss",
    "l1": "aten::l1_loss",
    "smooth-l1": "aten::smooth_l1_loss",
    "bce": "aten::binary_cross_entropy_with_logits",
}


class Criterion(Feature):
    """A loss of the first output; `auto` is decided by its shape."""

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        step.criterion = self
        self.values: Sequence[str] = step.graph.outputs[:1]  # the outputs that it is of
        self.name = step.scenario.loss
        self.targets: dict[str, Tensor] = {}
        self.ops_after_model = int(self.name in losses.AFTER_THE_MODEL and not step.has_own_loss)
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
        if self.name in losses.HEAD_LOSSES:  # the graph ends with it
            return
        if self.name == "auto":
            self.name = choose(shape)
            text = f"loss: {self.name}, chosen by the output's shape {list(shape)} (--loss changes it)"
            step.notes.append(Note("assumption", "SM330", text))
        target = target_of(self.name, shape)
        if target is not None:
            self.targets["target"] = step.place(Value("target", target[1], target[0]), "input", "target")

    def compute(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """What backward starts from: the loss, or all outputs."""
        several = outputs if self.name == "outputs" else outputs[:1]
        return [run(self.e, self.name, output, self.targets.get("target")) for output in several]


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

    return e.record("NllLossBackward0", out, [log_probs], [Formula((0,), gradient)], [log_probs, target, total_weight])


@record(frozen=True)
class Target:
    """What an output is compared with. `name` of an input of the model, or of a tensor that is one besides."""

    name: str
    shape: Shape
    dtype: DType
    is_input: bool = False


@record(frozen=True)
class TermOfOutput:
    """A term over a value: `term.kind` is no longer `AUTO`, and `term.output` what the output is called in reports."""

    value: str
    term: losses.Term
    target: Target | None = None


def terms_over(graph: Graph, loss: str) -> tuple[TermOfOutput, ...]:
    """The terms of a loss over several outputs, with their targets. `EVERY` takes the outputs that no other term names
    and that can have a loss.

    Raises:
        UsageError: the model has no such output, a loss does not fit its output, or two outputs the target that they
            share.
    """
    read: dict[str, losses.Term] = {}
    rest: dict[str, losses.Term] = {}
    terms = losses.terms_of(loss)
    for term in terms:
        if term.output == losses.EVERY:
            continue
        value = graph.outputs[_position(graph, term.output)]
        if value in read:
            what = f"--loss has two terms of one output: '{read[value].output}' and '{term.output}'"
            raise UsageError(what, "Two names of it are the same tensor.", "Leave one of them out.", code="SM139")
        read[value] = term
    for term in terms:
        if term.output == losses.EVERY:
            called = {value: _called(graph, number) for number, value in enumerate(graph.outputs) if value not in read}
            rest = {value: replace(term, output=name) for value, name in called.items()}
    forms = _forms(graph, [*read, *rest])
    summands: list[TermOfOutput] = []
    targets: dict[object, Target] = {}
    for value, term in {**read, **rest}.items():
        shape, dtype = forms.get(value, (None, dtypes.string))
        if shape is None or not dtype.is_differentiable:
            if value in rest:
                continue
            why = "It is no floating-point tensor." if shape is not None else "It is no tensor."
            raise UsageError(f"--loss {term}: the output has no gradient", why, "Leave it out.", code="SM139")
        term = replace(term, kind=choose(shape) if term.kind == losses.AUTO else term.kind)
        _check(term, shape)
        summands.append(TermOfOutput(value, term, _target(graph, term, shape, targets)))
    if not summands:
        raise UsageError("--loss has no term", "No output is a floating-point tensor.", "Use --mode infer.", "SM139")
    return tuple(summands)


def _position(graph: Graph, output: str) -> int:
    if output in graph.output_names:
        return graph.output_names.index(output)
    if output.isascii() and output.isdigit() and len(output) < 10 and int(output) < len(graph.outputs):
        return int(output)
    names = [name for name in graph.output_names if name]
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    count = len(graph.outputs)
    why = f"It has {count} output{'s' if count != 1 else ''}"
    why += f": {listed}." if names else "; the file has no names of them, so they go by their numbers, from 0."
    hint = closest(output, names) if names else "Example: --loss 0=cross-entropy"
    raise UsageError(f"--loss: the model has no output '{output[:60]}'", why, hint, code="SM139")


def _called(graph: Graph, number: int) -> str:
    """The name of an output, else its number."""
    name = graph.output_names[number] if number < len(graph.output_names) else ""
    return name or str(number)


def _forms(graph: Graph, names: Collection[str]) -> dict[str, tuple[Shape | None, DType]]:
    """Shapes and dtypes of outputs, from the file or from a run of the forward."""
    forms = {name: (v.shape, v.dtype) for name in names if (v := graph.values.get(name)) is not None}
    if any(name not in forms or forms[name][0] is None for name in names):
        infos = value_infos(graph, training=False)
        forms |= {name: (infos[name].shape, infos[name].dtype) for name in names if name in infos}
    return forms


def _check(term: losses.Term, shape: Shape) -> None:
    if term.kind == losses.ITSELF and len(shape) > 0:
        raise UsageError(
            f"--loss {term}: the output is no loss",
            f"'{losses.ITSELF}' takes an output as a loss that the model has computed, and it has shape {list(shape)}.",
            "Name a loss of it, as mean, or leave it out.",
            code="SM139",
        )
    if term.kind == "cross-entropy" and len(shape) < 2:
        raise UsageError(
            f"--loss {term} does not fit the output",
            f"It has shape {list(shape)}; cross-entropy needs a class dimension.",
            "Use mse or mean for it.",
            code="SM139",
        )


def _target(graph: Graph, term: losses.Term, shape: Shape, targets: dict[object, Target]) -> Target | None:
    """The target of a term: of one name, or, without names, of one kind and shape of output, there is one."""
    wanted = target_of(term.kind, shape)
    if wanted is None:
        return None
    given = next((value for value in graph.inputs if value.name == term.target), None)
    if given is not None:
        target = Target(given.name, given.shape or (), given.dtype, is_input=True)
    else:
        name = f"target '{term.target}'" if term.target else f"target of {term.output}"
        target = targets.setdefault(term.target or (term.kind, shape), Target(name, *wanted))
    fits = target.dtype is wanted[1] or (target.dtype.is_floating_point and wanted[1].is_floating_point)
    if target.shape != wanted[0] or not fits:
        raise UsageError(
            f"--loss {term}: the target does not fit the output",
            f"'{term.target}' is {target.dtype.name} {list(target.shape)}, and {term.kind} of an output of shape "
            f"{list(shape)} needs {wanted[1].name} {list(wanted[0])}.",
            "Give it a target with its own name.",
            code="SM139",
        )
    return target


def name_of(terms: Sequence[TermOfOutput]) -> str:
    """The loss as the text that `terms_of` reads, with what was chosen."""
    return ",".join(str(one.term) for one in terms)


def notes_on(graph: Graph, terms: Sequence[TermOfOutput]) -> list[Note]:
    """What is summed, what is compared with what, and which outputs nothing is learned from."""
    parts = []
    for one in terms:
        weight = f"{one.term.weight} x " if one.term.weight else ""
        parts.append(
            weight + (one.term.output if one.term.kind == losses.ITSELF else f"{one.term.kind} of {one.term.output}")
        )
    text = f"the loss is {' + '.join(parts)}"
    shared: dict[str, list[str]] = {}
    for one in terms:
        if one.target is not None:
            shared.setdefault(one.target.name, []).append(one.term.output)
    for name, outputs in shared.items():
        of_input = any(one.target is not None and one.target.is_input and one.target.name == name for one in terms)
        if of_input:
            text += f"; {', '.join(outputs)}: the input '{name}' is the target"
        elif len(outputs) > 1:
            text += f"; {', '.join(outputs)} have one target (@NAME after a loss names its own)"
    notes = [Note("assumption", "SM215", text, len(terms))]
    read = {one.value for one in terms}
    left = [_called(graph, number) for number, value in enumerate(graph.outputs) if value not in read]
    if left:
        listed = ", ".join(left[:6]) + (", ..." if len(left) > 6 else "")
        notes.append(Note("assumption", "SM216", f"outputs that the loss leaves out: {listed}", len(left)))
    return notes


class SumOfTerms(Criterion):
    """A loss over several outputs."""

    def __init__(self, step: RunningStep) -> None:
        super().__init__(step)
        self.terms = terms_over(step.graph, step.scenario.loss)
        self.values = [one.value for one in self.terms]
        self.name = name_of(self.terms)
        (first, *others) = self.terms
        self.is_output = not others and first.term.kind == losses.ITSELF and not first.term.weight

    def place(self) -> None:
        """Places the targets."""
        step = self.step
        for target in filter(None, [one.target for one in self.terms]):
            if target.name not in self.targets:
                value = Value(target.name, target.dtype, target.shape)
                given = step.interpreter.env[target.name] if target.is_input else None
                self.targets[target.name] = given or step.place(value, "input", target.name)
        step.notes += notes_on(step.graph, self.terms)

    def compute(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The sum of the terms."""
        return [sum_terms(self.e, self.terms, self.step.interpreter.env, self.targets)]


def make_criterion(step: RunningStep) -> Criterion:
    """The loss of a step: the one that its scenario names, or a sum of several."""
    has_one_loss = step.has_own_loss or not losses.has_terms(step.scenario.loss)
    return Criterion(step) if has_one_loss else SumOfTerms(step)


def sum_terms(
    e: Eager, terms: Sequence[TermOfOutput], env: Mapping[str, object], targets: Mapping[str, Tensor]
) -> Tensor:
    """The sum of the terms."""
    from staticmem.ops.arithmetic import add, mul  # few steps have such a loss

    total: Tensor | None = None
    for one in terms:
        output = env[one.value]
        assert isinstance(output, Tensor)
        e.open_scope()
        loss = run(e, one.term.kind, output, None if one.target is None else targets[one.target.name])
        if one.term.weight:
            loss = mul(e, loss, float(one.term.weight))
        e.close_scope(keep=[loss])
        if total is None:
            total = loss
            continue
        both = add(e, total, loss)
        e.free(total, loss)
        total = both
    assert total is not None
    return total
