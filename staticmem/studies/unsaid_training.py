"""What a file does not say of training, and the least that the step can have alive for it.

An ONNX file does not keep `requires_grad`, and a `.pt2` file that was exported for inference has it False everywhere:
any parameters but one may be frozen. And without source lines no file shows a checkpoint, nor a custom autograd
function that saves less than its ops would. The least is worked out from the step as it is expected, without another
run:

- of frozen parameters: what the model owns, with the largest tensor that its forward makes;
- of checkpoints and functions: backward and optimizer, in which what was saved for an op is there no sooner than that
  op's backward (a checkpoint computes it again); what code saves that calls no layer may not be there at all.

It is a `Lifetimes` as that of a step, so that it grows with the batch in the same way (`studies.between`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import Buffers, Holds
from staticmem.ir.graph import Graph, Note
from staticmem.ir.stacks import LIBRARIES
from staticmem.liveness import Lifetimes, liveness
from staticmem.scenario.step import Scenario

FUSED_PATH = "SM342"  # the note of layers that may run as one op in evaluation mode
THAWED = "SM315"  # a file in which no parameter requires a gradient
_OWNED = frozenset(("parameter", "buffer", "input"))
_TORCH = "torch.nn."
_Span = tuple[int, int, int]  # the index of a buffer, and from when to when it is alive


def least_on_fused_path(notes: Iterable[Note], lifetimes: Lifetimes) -> Lifetimes | None:
    """The least of an inference whose layers PyTorch may run as one op each, of which the file has the ordinary ops;
    None of others."""
    return _of(lifetimes, _alone(lifetimes)) if any(note.code == FUSED_PATH for note in notes) else None


def least_of_training(graph: Graph, scenario: Scenario, lifetimes: Lifetimes) -> Lifetimes | None:
    """The least that a training step has alive for what its file does not say of training; None where it says all."""
    if not scenario.training or graph.recorded is not None:
        return None
    if leaves_frozen_open(graph, scenario):
        return _of(lifetimes, _alone(lifetimes))
    if leaves_checkpoints_open(graph, scenario):
        return _of(lifetimes, _when_recomputed(graph, lifetimes))
    return None


def leaves_frozen_open(graph: Graph, scenario: Scenario) -> bool:
    """Whether neither the file nor the scenario says which parameters are trained."""
    if scenario.freeze is not None or scenario.lora is not None:
        return False
    return graph.format == "onnx" or any(note.code == THAWED for note in graph.notes)


def leaves_checkpoints_open(graph: Graph, scenario: Scenario) -> bool:
    """Whether neither source lines nor the scenario tell what runs in checkpoints. Code of published libraries is as it
    was compared: it has none unless it is asked to."""
    if scenario.checkpoint or scenario.checkpoint_segments or any(op.stack for op in graph.ops):
        return False
    classes = [cls for cls in graph.classes if cls]
    return not classes or any(not cls.startswith((*LIBRARIES, _TORCH)) for cls in classes)


def _of(lifetimes: Lifetimes, spans: Iterator[_Span]) -> Lifetimes:
    """Lifetimes of these buffers of a step alone, each over one span or more."""
    trace, buffers = lifetimes.trace, Buffers()
    for index, start, end in sorted(spans, key=lambda span: (span[1], span[0])):
        buffers.append(trace.buffers[index]._replace(born=start, died=end if end < trace.ticks else None))
    return liveness(replace(trace, buffers=buffers, holds=Holds()).seal())


def _alone(lifetimes: Lifetimes) -> Iterator[_Span]:
    """What the model owns, and each tensor of the forward without the others."""
    trace, ticks = lifetimes.trace, lifetimes.ticks
    forward, end = dict(trace.phases)["forward"], trace.marks.get("forward_end", ticks)
    rows = zip(trace.buffers.categories, lifetimes.born, strict=True)
    for index, (category, born) in enumerate(rows):
        if category in _OWNED:
            yield index, born, ticks
        elif category == "activation" and forward <= born < end:
            yield index, born, born + 1


def _when_recomputed(graph: Graph, lifetimes: Lifetimes) -> Iterator[_Span]:
    trace, end = lifetimes.trace, lifetimes.trace.marks["forward_end"]
    buffers, holds, kernels = trace.buffers, trace.holds, trace.kernels.ops
    begun: dict[int, int] = {}  # when the backward of an op allocates first
    for kernel, born in zip(buffers.kernels, lifetimes.born, strict=True):
        if born >= end and kernel >= 0:
            begun.setdefault(kernels[kernel], born)
    held = [0] * len(buffers)  # by others than autograd
    has_holds = [False] * len(buffers)
    spans: list[_Span] = []
    for buffer, kind, op, ended in zip(holds.buffers, holds.kinds, holds.ops, holds.ends, strict=True):
        has_holds[buffer] = True
        if kind is not Reason.SAVED or op < 0:
            held[buffer] = max(held[buffer], min(ended, lifetimes.ticks))
        elif op in begun and ended > end and _is_layer(graph, op):
            spans.append((buffer, begun[op], min(ended, lifetimes.ticks)))
    for index, (born, died) in enumerate(zip(lifetimes.born, lifetimes.died, strict=True)):
        until = held[index] if has_holds[index] else died
        held[index] = until
        if until > end:
            yield index, max(born, end), until
    for index, start, ended in sorted(spans):
        start = max(start, held[index])  # several ops may have saved one tensor
        if start < ended:
            held[index] = ended
            yield index, start, ended


def _is_layer(graph: Graph, op: int) -> bool:
    """Whether an op is run by a layer of torch.nn, which calls no function of its own."""
    modules = graph.ops[op].modules
    return bool(modules) and modules[-1].cls.startswith(_TORCH)
