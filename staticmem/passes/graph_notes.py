"""What a report has to say of a graph: where the file, or the scenario, leaves something out that PyTorch would run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from staticmem.eager.tensor import Tensor
from staticmem.ir.graph import Frame, Graph, Note, bases_of
from staticmem.ops import kinds_of

# the names of parameters in torch.nn, with the old and the new norms of weights
_LAYERS = re.compile(
    r"(^|[._])(weight|bias|[qkv]_proj_weight|in_proj_weight|in_proj_bias|bias_[kv]|(weight|bias)_[ih]h(_l\d+\w*)?|"
    r"weight_[gv]|weight_orig|original\d?)$"
)
_FUSED = ("torch.nn.modules.activation.MultiheadAttention", "torch.nn.modules.transformer.TransformerEncoderLayer")


def notes_of_graph(graph: Graph, training: bool, outputs: Sequence[Tensor], loss: str | None) -> list[Note]:
    """Assumptions and warnings that follow from the graph as it was run. `outputs` are the model's."""
    return [
        *_reserve(graph, training), *_other_outputs(training, outputs, loss), *_unread(graph, training),
        *_maybe_buffers(graph, training), *_maybe_frozen(graph, training), *_fused_path(graph, training),
    ]  # fmt: skip


def _reserve(graph: Graph, training: bool) -> list[Note]:
    if not training or not any("recurrent" in kinds_of(base) for base in bases_of(graph.ops)):
        return []
    count = sum("recurrent" in kinds_of(op.base) for op in graph.ops)
    text = (
        "what cuDNN keeps of recurrent layers for their backward is assumed (the gates of every step, and cells of an "
        "LSTM): only cuDNN knows its reserve"
    )
    return [Note("assumption", "SM341", text, count)]


def _other_outputs(training: bool, outputs: Sequence[Tensor], loss: str | None) -> list[Note]:
    """Outputs beside the first that could be part of a loss."""
    others = [t for t in outputs[1:] if t.dtype.is_differentiable and t.requires_grad]
    if not training or not others or loss == "none" or outputs[0].ndim == 0:  # a scalar is the loss itself
        return []
    shapes = ", ".join(str(list(t.shape)) for t in others[:4]) + (", ..." if len(others) > 4 else "")
    text = (
        f"the model has {len(outputs)} outputs and the loss is of the first: no gradient comes from the others "
        f"({shapes}). Return the sum of your losses first and use --loss none to have them all"
    )
    return [Note("assumption", "SM331", text)]


def _unread(graph: Graph, training: bool) -> list[Note]:
    """Parameters that no op reads: the exporter has left out ops whose result nothing uses, or they are for later."""
    read = graph.last_read
    aliased = {p.alias_of for p in graph.parameters}
    unread = [
        p for p in graph.parameters if p.value.name not in read and not p.alias_of and p.value.name not in aliased
    ]
    if not unread:
        return []
    names = ", ".join(p.fqn for p in unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
    tail = ", and get neither gradient nor optimizer state" if training else ""
    text = f"parameters that no op in the file reads count{tail}: {names}. If the code runs them, an export dropped it"
    return [Note("assumption", "SM332", text, len(unread))]


def _maybe_buffers(graph: Graph, training: bool) -> list[Note]:
    """Tensors of an ONNX file that does not tell parameters from buffers, by names that no layer gives a parameter."""
    if graph.format != "onnx" or not training or _has_classes(graph):
        return []
    found = [p.fqn for p in graph.parameters if p.trainable and not _of_layer(p.fqn) and "::" not in p.fqn]
    if not found:
        return []
    names = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    text = (
        f"the file does not tell parameters from buffers; taken to be trained: {names}. Where they are buffers, name "
        "them with --freeze: else their gradients and what leads to them are too much"
    )
    return [Note("assumption", "SM333", text, len(found))]


def _has_classes(graph: Graph) -> bool:
    """Whether the file has the classes of modules: the dynamo exporter writes them."""
    return any(frame.cls for stack in _stacks(graph) for frame in stack)


def _stacks(graph: Graph) -> Iterable[tuple[Frame, ...]]:
    """The module stacks of all ops; ops of one call have the same object."""
    return {id(op.modules): op.modules for op in graph.ops}.values()


def _of_layer(name: str) -> bool:
    """Whether a layer of torch.nn gives a parameter such a name."""
    return name.endswith((".weight", ".bias")) or _LAYERS.search(name) is not None


def _maybe_frozen(graph: Graph, training: bool) -> list[Note]:
    """ONNX has no `requires_grad` and no `detach`; files of the TorchScript exporter lack regions of `no_grad` too."""
    if graph.format != "onnx" or not training or not graph.parameters or not all(p.trainable for p in graph.parameters):
        return []
    # classes that were told by the names of parts (SM268) are not in the file
    traced = not _has_classes(graph) or any(note.code == "SM268" for note in graph.notes)
    stops = "no_grad() and detach() stop" if traced else "detach() stops"
    text = (
        "all parameters are taken to be trained: an ONNX file does not say which are frozen (--freeze does), nor where "
        f"{stops} gradients: the peak is too high then"
    )
    return [Note("assumption", "SM334", text)]


def _fused_path(graph: Graph, training: bool) -> list[Note]:
    """Modules of torch.nn with a path of their own in evaluation mode, which torch.export does not trace
    (torch/nn/modules/transformer.py and activation.py, `why_not_sparsity_fast_path` and `why_not_fast_path`)."""
    if training:
        return []
    found = {frame.path for stack in _stacks(graph) for frame in stack if frame.cls in _FUSED}
    if not found:
        return []
    text = (
        "in evaluation mode without gradients PyTorch may run nn.MultiheadAttention and nn.TransformerEncoderLayer as "
        "one fused op that needs less: the figure is for the ops of the file"
    )
    return [Note("assumption", "SM342", text, len(found))]


__all__ = ["notes_of_graph"]
