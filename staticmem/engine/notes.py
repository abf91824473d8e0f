"""Notes of a step: what PyTorch would run and the file leaves out, chosen kernels, and levers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Note
from staticmem.ops.registry import kinds_of
from staticmem.passes.restoring.custom_functions import is_of_layer
from staticmem.scenario.checkpointing import Policy, never_seen
from staticmem.scenario.edits import NONE_FROZEN
from staticmem.scenario.losses import has_terms
from staticmem.scenario.step import PAGEABLE, PINNED, Scenario
from staticmem.units import format_bytes
from staticmem.version import DEFAULTS_CHANGED

_FUSED = ("torch.nn.modules.activation.MultiheadAttention", "torch.nn.modules.transformer.TransformerEncoderLayer")


def notes_of_step(
    graph: Graph,
    scenario: Scenario,
    outputs: Sequence[Tensor],
    loss: str | None,
    choices: Mapping[tuple[str, str], int],
    overwritten: int,
) -> Iterator[Note]:
    """Assumptions and warnings. `outputs` are the model's; `choices` has the chosen kernels, the reasons, and
    how often; `overwritten`: checkpoints that change one of their inputs in place."""
    if scenario.training:
        yield from _of_recurrent(graph)
        yield from _note_other_outputs(outputs, loss)
    yield from _note_unread_parameters(graph, scenario.training)
    if scenario.torch < DEFAULTS_CHANGED and "aten::scaled_dot_product_attention" in graph.bases:
        text = (
            "PyTorch before 2.0 has no scaled_dot_product_attention: counted as products and a softmax, of which each "
            "result goes when the next is there; code that keeps more of them takes more, which a recording of it shows"
        )
        yield Note("warning", "SM361", text)
    if graph.recorded is not None:
        pass
    elif not scenario.training:
        yield from _note_fused_path(graph)
    elif graph.format == "onnx":
        yield from _note_onnx(graph, scenario)
    for (what, why), count in sorted(choices.items()):
        yield Note("assumption", "SM340", f"{what}: {why} (as on an sm_90 GPU; --sdpa changes it)", count)
    if scenario.training:
        yield from _note_levers(scenario, overwritten)


def notes_of_selection(names: Collection[str], policies: Iterable[Policy]) -> Iterator[Note]:
    """Names of `--checkpoint-save` that nothing under a checkpoint has."""
    missing = never_seen(names, policies)
    if missing:
        text = (
            f"nothing that runs under a checkpoint is called {_listed(missing, 4)}, so no result of it is kept: a "
            "policy sees the calls of kernels, as mm or addmm of a linear layer"
        )
        yield Note("warning", "SM208", text, len(missing))


def note_of_offloading(kind: str, copied: int) -> Note:
    """`copied`: bytes that one forward copies to the CPU."""
    where = {PAGEABLE: "save_on_cpu()", PINNED: "save_on_cpu(pin_memory=True)"}.get(kind, "OffloadActivations")
    text = (
        f"{where} is around the model's forward: {format_bytes(copied)} of saved tensors go to the CPU, take as "
        "much of its memory, and come back in the backward"
    )
    return Note("assumption", "SM339", text)


def _of_recurrent(graph: Graph) -> Iterator[Note]:
    recurrent = {base for base in graph.bases if "recurrent" in kinds_of(base)}
    if recurrent:
        text = (
            "what cuDNN keeps of recurrent layers for their backward is assumed (the gates of every step, and cells of "
            "an LSTM): only cuDNN knows its reserve"
        )
        yield Note("assumption", "SM341", text, sum(op.base in recurrent for op in graph.ops))


def _note_other_outputs(outputs: Sequence[Tensor], loss: str | None) -> Iterator[Note]:
    """Outputs beside the first that could be part of a loss."""
    others = [t for t in outputs[1:] if t.dtype.is_differentiable and t.requires_grad]
    chosen = loss in ("none", "outputs") or has_terms(loss or "")
    if others and not chosen and outputs[0].ndim > 0:  # a scalar is the loss itself
        shapes = ", ".join(str(list(t.shape)) for t in others[:4]) + (", ..." if len(others) > 4 else "")
        text = (
            f"the model has {len(outputs)} outputs and the loss is of the first: no gradient comes from the others "
            f"({shapes}). --loss OUTPUT=LOSS,OUTPUT=LOSS names the loss of each that has one"
        )
        yield Note("assumption", "SM331", text)


def _note_unread_parameters(graph: Graph, training: bool) -> Iterator[Note]:
    """Parameters that no op reads: the exporter has left out ops whose result nothing uses, or they are for later."""
    used = {*graph.last_read, *(p.alias_of for p in graph.parameters)}
    unread = [p.fqn for p in graph.parameters if p.value.name not in used and not p.alias_of]
    if unread:
        tail = ", and get neither gradient nor optimizer state" if training else ""
        text = f"parameters that no op in the file reads count{tail}: {_listed(unread, 3)}"
        yield Note("assumption", "SM332", f"{text}. If the code runs them, an export dropped it", len(unread))


def _note_onnx(graph: Graph, scenario: Scenario) -> Iterator[Note]:
    """ONNX tells no parameters from buffers; it has no `requires_grad` and no `detach`, and files of the TorchScript
    exporter lack regions of `no_grad` too."""
    classes = any(frame.cls for stack in _stacks(graph) for frame in stack)  # the dynamo exporter writes them
    if not classes:
        maybe = [p.fqn for p in graph.parameters if p.trainable and not is_of_layer(p.fqn) and "::" not in p.fqn]
        if maybe:
            text = (
                f"the file does not tell parameters from buffers; taken to be trained: {_listed(maybe, 4)}. Where they "
                "are buffers, name them with --freeze: else their gradients and what leads to them are too much"
            )
            yield Note("assumption", "SM333", text, len(maybe))
    if scenario.freeze != NONE_FROZEN and graph.parameters and all(p.trainable for p in graph.parameters):
        stops = "detach() stops" if classes else "no_grad() and detach() stop"
        text = (
            "all parameters are taken to be trained: an ONNX file does not say which are frozen (--freeze does, or "
            f"--freeze none), nor where {stops} gradients: the peak is too high then, and its band begins where nearly "
            "all are frozen"
        )
        yield Note("assumption", "SM334", text)


def _note_fused_path(graph: Graph) -> Iterator[Note]:
    """Modules of torch.nn with a path of their own in evaluation mode, which torch.export does not trace
    (torch/nn/modules/transformer.py and activation.py, `why_not_sparsity_fast_path` and `why_not_fast_path`)."""
    paths = {frame.path for stack in _stacks(graph) for frame in stack if frame.cls in _FUSED}
    if paths:
        text = (
            "in evaluation mode without gradients PyTorch may run nn.MultiheadAttention and nn.TransformerEncoderLayer "
            "as one fused op that needs less: the figure is for the ops of the file"
        )
        yield Note("assumption", "SM342", text, len(paths))


def _note_levers(scenario: Scenario, overwritten: int) -> Iterator[Note]:
    if overwritten:
        text = (
            "a checkpoint changes its input in place, so that PyTorch's backward stops with an error: put the border "
            "before the op that makes this input, or make the change out of place"
        )
        yield Note("warning", "SM311", text, overwritten)
    if scenario.amp is dtypes.float16 and not scenario.grad_scaler:
        text = "no GradScaler: with one, a few scalars of 512 bytes are alive besides (--grad-scaler)"
        yield Note("assumption", "SM312", text)
    if scenario.accumulate > 1:
        text = f"micro-batch 2 of {scenario.accumulate} is shown: from it on, gradients exist during the forward"
        yield Note("assumption", "SM313", text)
    if scenario.offload_optimizer and scenario.optimizer is not None:
        text = (
            "optimizer state and update are on the CPU; gradients are copied out and parameters back in without a "
            "tensor on the GPU, and gradients stay until zero_grad()"
        )
        yield Note("assumption", "SM314", text)


def _stacks(graph: Graph) -> Iterable[tuple[Frame, ...]]:
    """The module stacks of all ops; ops of one call have the same object."""
    return {id(op.modules): op.modules for op in graph.ops}.values()


def _listed(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
