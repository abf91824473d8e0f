"""Losses that stand at the end of a graph as ops of their own: `--loss causal-lm` and those that replace the last
linear layer, and CTC's.

`causal-lm` is computed by the model, from its labels: the op runs in the frame of the model, and its result is an
output before the others. `chunked-cross-entropy` has the last linear layer run on each part of the sequence;
`linear-cross-entropy` and `fused-linear-cross-entropy` run it inside of the loss. `ctc` reads what the model returns.
What they allocate is in `ops.head_losses` and `ops.loss`, with their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from staticmem.eager.strides import numel
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Frame, Graph, Note, Op, Ref, Value
from staticmem.ops.head_losses import CHUNKS
from staticmem.ops.registry import kinds_of
from staticmem.passes.edit import with_ops
from staticmem.units import format_bytes

if TYPE_CHECKING:
    pass

LABELS, LOSS = "target", "loss"  # values that the pass adds
# classes whose forward in Liger-Kernel 0.8.5 asks for another `chunk_mem_const` than 1: transformers/model/gpt_oss.py
# (`_GPT_OSS_FLCE_CHUNK_MEM_CONST`)
_BUDGETS = {"transformers.models.gpt_oss.modeling_gpt_oss.GptOssForCausalLM": 8}


class Head(NamedTuple):
    """The last linear layer: the op, where it stands, and its result in elements, (batch, length, classes)."""

    op: Op
    at: int
    shape: tuple[int, ...]


def end_with_loss(
    graph: Graph, asked: tuple[str, int | None], logits: tuple[int, ...] | None
) -> tuple[Graph, Sequence[Note]]:
    """The graph with the loss as its first output, and the labels as an input.

    Raises:
        UsageError: the model has no linear layer of which the loss could be made.
    """
    if graph.recorded is not None and graph.recorded.loss:  # the code has a loss of its own
        return graph, ()
    loss, target_length = asked
    head = _head(graph, loss, logits)
    if loss == "ctc":
        return _end_with_ctc(graph, head, target_length)
    labels = Value(LABELS, dtypes.int64, head.shape[:-1])
    others = graph.outputs[1:]
    if loss == "causal-lm":
        op = _op(loss, (Ref(graph.outputs[0]), Ref(LABELS)), _around(head.op))
        return _replace_head(graph, head, [head.op], [op], labels, (LOSS, *graph.outputs)), ()
    if loss == "chunked-cross-entropy":
        chunk_ops, chunks = _chunks(head)
        op = _op(loss, (tuple(Ref(name) for name in chunks), Ref(LABELS)), _OWN)
        return _replace_head(graph, head, chunk_ops, [op], labels, (LOSS, *chunks, *others)), ()
    hidden, weight, bias = _linear(head.op)
    arguments = (hidden, weight, bias, Ref(LABELS))
    if loss == "linear-cross-entropy":  # the model returns what its last layer would read
        assert isinstance(hidden, Ref)
        op = _op(loss, arguments, _OWN)
        return _replace_head(graph, head, [], [op], labels, (LOSS, hidden.name, *others)), ()
    notes = [_note_older_releases(graph, weight)]
    budget = next((_BUDGETS[frame.cls] for frame in head.op.modules if frame.cls in _BUDGETS), 1)
    if budget != 1:
        text = f"Liger's forward of this class has logits of {budget} times as many tokens at once as others have"
        notes.append(Note("assumption", "SM247", text))
    op = _op(loss, (*arguments, budget), _around(head.op))
    return _replace_head(graph, head, [], [op], labels, (LOSS, *others)), notes


def _end_with_ctc(graph: Graph, head: Head, target_length: int | None) -> tuple[Graph, Sequence[Note]]:
    """CTC of what the model returns: (batch, frames, classes), or (frames, batch, classes) where the batch, which is
    the first size of the first input, is there. Log-probabilities are taken as they are."""
    batch = graph.inputs[0].shape[0] if graph.inputs and graph.inputs[0].shape else None
    if batch not in head.shape[:2]:
        why = f"Its first output has shape {list(head.shape)}, and no batch of {batch} among the first two sizes."
        raise _refused("ctc", why)
    batch_first = head.shape[0] == batch
    frames, notes = head.shape[1 if batch_first else 0], []
    if target_length is None:
        text = f"--loss ctc: targets of {frames} labels, as many as there are frames (--target-length says how many)"
        notes.append(Note("assumption", "SM338", text))
    labels = Value(LABELS, dtypes.int64, (batch, target_length or frames))
    arguments = (Ref(graph.outputs[0]), Ref(LABELS), batch_first, _is_log_softmax(graph, head.at))
    op = _op("ctc-loss", arguments, _OWN)
    return _replace_head(graph, head, [head.op], [op], labels, (LOSS, *graph.outputs)), notes


def _is_log_softmax(graph: Graph, at: int) -> bool:
    """Whether an op is a log_softmax, or a view of one."""
    position = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    op = graph.ops[at]
    while "view" in kinds_of(op.base) and op.args and isinstance(op.args[0], Ref) and op.args[0].name in position:
        op = graph.ops[position[op.args[0].name]]
    return op.base in ("aten::log_softmax", "aten::_log_softmax", "aten::special_log_softmax")


def _around(op: Op) -> tuple[Frame, ...]:
    """The module calls around the one of a linear layer."""
    return op.modules[:-1] if op.base == "aten::linear" else op.modules


def _note_older_releases(graph: Graph, weight: Arg) -> Note:
    """Releases from 0.6.2 on added the product of a chunk, in the dtype of the products, as a float32 tensor; addmm in
    place is of 0.8.1 for a float32 weight under autocast, and of 0.8.3 for one in half precision."""
    shape = next(p.value.shape for p in graph.parameters if isinstance(weight, Ref) and p.value.name == weight.name)
    more = format_bytes((2 + 4) * numel(shape or ()))
    text = (
        f"the fused loss is that of Liger-Kernel 0.8.3 to 0.8.5; from 0.6.2 on products in half precision took {more} "
        "more (the size of the last weight in both types), to 0.8.0 under autocast, to 0.8.2 in a model of that type"
    )
    return Note("assumption", "SM128", text)


_OWN = (Frame("loss", ""),)  # the call of a loss of its own, after the model has returned


def _op(loss: str, args: tuple[Arg, ...], modules: tuple[Frame, ...]) -> Op:
    names = {"causal-lm": "causal_lm_loss"}
    return Op(LOSS, f"staticmem::{names.get(loss, loss.replace('-', '_'))}", args, {}, (LOSS,), modules)


def _linear(op: Op) -> tuple[Arg, Arg, Arg]:
    """Input, weight and bias of a linear layer."""
    args = (*op.args, *op.kwargs.values())
    return args[0], args[1], args[2] if len(args) > 2 else None


def _head(graph: Graph, loss: str, sizes: tuple[int, ...] | None) -> Head:
    """The linear layer whose result is the first output; `sizes` are those of it, where the graph has none."""
    position = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    name = graph.outputs[0] if graph.outputs else ""
    op = graph.ops[position[name]] if name in position else None
    value = graph.values.get(name)
    shape = value.shape if value is not None else sizes
    if op is None or shape is None:
        raise _refused(loss, "Its first output is no result of an op whose size the file has.")
    if loss in ("causal-lm", "ctc"):
        if len(shape) != 3:
            raise _refused(loss, f"Its first output has shape {list(shape)}; logits are (batch, tokens, classes).")
        return Head(op, position[name], shape)
    weight = _linear(op)[1] if op.base == "aten::linear" else None
    if op.base != "aten::linear" or not isinstance(weight, Ref):
        raise _refused(loss, f"Its first output is made by {op.target}, not by a linear layer.")
    if weight.name not in {p.value.name for p in graph.parameters}:
        raise _refused(loss, "The weight of the linear layer that makes its first output is no parameter.")
    if name in graph.last_read or name in graph.outputs[1:]:
        raise _refused(loss, "Other ops, or other outputs, need what its last linear layer returns.")
    few = len(shape) != 3 and (loss != "fused-linear-cross-entropy" or len(shape) != 2)
    if few or (loss == "chunked-cross-entropy" and shape[1] < 1):
        raise _refused(loss, f"Its first output has shape {list(shape)}; logits are (batch, tokens, classes).")
    return Head(op, position[name], shape)


def _refused(loss: str, why: str) -> UsageError:
    return UsageError(
        f"--loss {loss} does not fit this model",
        why,
        "Use --loss cross-entropy, or export the model with a loss of yours: staticmem export --loss MODULE:FUNCTION.",
        code="SM281",
    )


def _chunks(head: Head) -> tuple[list[Op], list[str]]:
    """`[self.output(chunk) for chunk in h.chunk(CHUNKS, dim=1)]` and the results.

    Source: torchtune, modules/transformer.py, `TransformerDecoder.chunked_output`.
    """
    hidden, weight, bias = _linear(head.op)
    length = head.shape[1]
    size = -(-length // CHUNKS)
    count = -(-length // size)
    parts = [f"{head.op.name}.hidden.{k}" for k in range(count)]
    logits = [f"{head.op.name}.logits.{k}" for k in range(count)]
    split = replace(
        head.op,
        name=f"{head.op.name}.chunk",
        target="aten::chunk",
        args=(hidden, CHUNKS, 1),
        kwargs={},
        outputs=tuple(parts),
        modules=head.op.modules[:-1],
    )
    chunk_ops = [
        replace(head.op, name=name, args=(Ref(part), weight, bias), kwargs={}, outputs=(name,))
        for part, name in zip(parts, logits, strict=True)
    ]
    return [split, *chunk_ops], logits


def _replace_head(
    graph: Graph, head: Head, instead: Sequence[Op], last: Sequence[Op], labels: Value, outputs: tuple[str, ...]
) -> Graph:
    """The graph with other ops in place of the head, and the loss as its last op."""
    stretches: list[list[Op]] = [[op] for op in graph.ops]
    stretches[head.at] = list(instead)
    changed = with_ops(graph, stretches, {}, last)
    names = {name for op in changed.ops for name in op.outputs}
    values = {name: value for name, value in graph.values.items() if name in names or name not in head.op.outputs}
    recorded = changed.recorded
    if recorded is not None:  # an output is held by the caller
        held = {name: index for name, index in recorded.last_held.items() if name not in outputs}
        recorded = replace(recorded, last_held=held)
    return replace(
        changed, inputs=(*graph.inputs, labels), outputs=outputs, values=values, recorded=recorded, output_names=()
    )
