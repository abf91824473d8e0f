"""Notes on what a graph shows of its export, without an edit of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from staticmem.ir.graph import Graph, Note, Op, Ref
from staticmem.ops import kinds_of
from staticmem.passes.restoring.custom_functions import OWN_BACKWARD, functions
from staticmem.passes.variables.unseen_code import line_calling_function

if TYPE_CHECKING:  # its module has the ONNX frontend, which no other file needs
    from staticmem.passes.restoring.onnx_tensors import FromOnnx

_MODULES = re.compile(r"[A-Za-z_]\w*(\.\w+)+$")
# values that a pass of the exporter made, or of the optimiser of ONNX
_MADE = re.compile(r"(onnx::\w+|_v_\d+|\d+)$")
MIN_CONVOLUTIONS = 3


def folded_norms(graph: Graph, source: FromOnnx) -> tuple[Graph, Sequence[Note]]:
    """A warning where BatchNorms were folded into convolutions.

    The TorchScript exporter does it in evaluation mode, and gives the weight and the bias that result new names
    (torch/csrc/jit/passes/onnx/eval_peephole.cpp, `fuseConvBatchNorm`); what was not folded has those of its module.
    """
    net, ops = source.net, graph.ops
    if not net.producer.startswith("pytorch") or net.aliases:
        return graph, ()  # a dynamo export names its parameters: a norm would be among them
    convs = [op for op in ops if "convolution" in kinds_of(op.base) and "enlarging" not in kinds_of(op.base)]
    biases = [op.args[2].name for op in convs if len(op.args) > 2 and isinstance(op.args[2], Ref)]
    if any(_MODULES.match(name) for name in net.weights):
        folded = sum(name in net.weights and _MADE.match(name) is not None for name in biases)
        text = "convolutions have a bias that belongs to no module: the export folded BatchNorm into them"
        if not folded:
            folded = _alone_with_activations(convs, ops)
            text = (
                f"{folded} of {len(convs)} convolutions have a bias, and a module of their own with an activation and "
                "nothing else: if this model had BatchNorm between them, its code folded it before the export"
            )
    else:
        folded = _may_be_folded(convs, biases, ops)
        text = (
            f"{folded} of {len(convs)} convolutions have a bias, and hardly anything is normalised: if this model had "
            "BatchNorm, the export folded it"
        )
    text += (
        ", and training memory is underestimated (export with training=TrainingMode.TRAINING and "
        "do_constant_folding=False, or with optimize=False)"
    )
    return graph, [Note("warning", "SM261", text, folded)] if folded else []


MOST = 9 / 10  # of the convolutions: a head, or a layer with fixed weights, may have no bias


def _may_be_folded(convs: Sequence[Op], biases: Sequence[str], ops: Sequence[Op]) -> int:
    """In files without names of modules: how many convolutions have a bias, where most have and few ops normalise.

    Networks that never had a norm (AlexNet, VGG, SqueezeNet) look the same unless the names of nodes show it: a
    convolution whose next module in the same container is the activation has no BatchNorm between them.
    """
    norms = sum("norm" in kinds_of(op.base) for op in ops)
    few = len(convs) >= MIN_CONVOLUTIONS and norms <= (1 - MOST) * len(convs)
    return len(biases) if few and len(biases) >= MOST * len(convs) and not _neighbours(ops) else 0


def _alone_with_activations(convs: Sequence[Op], ops: Sequence[Op]) -> int:
    """How many convolutions with a bias are in a module with an activation and nothing else, where most are.

    `Model.fuse()` of detectors (ultralytics, `fuse_conv_and_bn`) leaves the block `Conv2d, BatchNorm2d, SiLU` so. Code
    that never had norms has its layers in a row, in numbered containers or several in a block.
    """
    inside: dict[str, set[str]] = {}  # the parts of a module that run, by its path
    for op in ops:
        for outer, inner in pairwise(op.modules):
            inside.setdefault(outer.path, set()).add(inner.path)
    readers: dict[str, list[Op]] = {}
    for op in ops:
        for name in op.refs():
            readers.setdefault(name, []).append(op)
    alone = 0
    for conv in convs:
        after = readers.get(conv.outputs[0], [])
        if len(conv.args) < 3 or conv.args[2] is None or len(conv.modules) < 2 or len(after) != 1:
            continue
        path, other = conv.modules[-1].path, after[0].modules[-1].path if after[0].modules else ""
        leaf, own = path.rpartition(".")[2], other.rpartition(".")[2]
        block = inside[conv.modules[-2].path] == {path, other} and (
            "activation" in kinds_of(after[0].base) or after[0].base == "aten::gelu"
        )
        alone += block and path != other and not leaf.isdigit() and not own.startswith(leaf)
    norms = sum("norm" in kinds_of(op.base) for op in ops)
    return alone if alone >= MIN_CONVOLUTIONS and alone * 2 >= len(convs) and norms <= alone * (1 - MOST) else 0


def _neighbours(ops: Sequence[Op]) -> bool:
    """Whether activations directly follow convolutions in numbered containers: `features.0`, then `features.1`."""
    hits = total = 0
    for conv, after in pairwise(ops):
        if not conv.base.startswith("aten::conv") or after.base not in ("aten::relu", "aten::hardtanh", "aten::silu"):
            continue
        if not conv.modules or not after.modules:
            continue
        a, b = conv.modules[-1].path, after.modules[-1].path
        head, _, number = a.rpartition(".")
        total += 1
        if number.isdigit():
            hits += b == (f"{head}." if head else "") + str(int(number) + 1)
        else:  # named modules, as in SqueezeNet: squeeze, squeeze_activation
            hits += b.startswith(a)
    return total > 0 and hits * 2 > total


_APPLY = re.compile(r"\b[A-Za-z_]\w*\.apply\(")


def name_custom_functions(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """Warns of ops under `SomeFunction.apply(...)`: an autograd.Function saves what its own backward wants, and an
    export shows only the ops of its forward, and a recording what it saves."""
    if graph.recorded is not None:
        return graph, ()
    counts: dict[str, int] = {}
    for op in graph.ops:
        for line in op.stack:
            match = _APPLY.search(line.text) if ".apply(" in line.text else None
            if match:
                counts[match[0][:-1]] = counts.get(match[0][:-1], 0) + 1
                break
        else:
            number = line_calling_function(op)
            if number is not None:
                called = f"what the line `{op.stack[number].text.strip()[:60]}` calls"
                counts[called] = counts.get(called, 0) + 1
    text = "is a custom autograd function: what it saves for backward is not in the file"
    notes = [Note("warning", "SM325", f"{call} {text}", count) for call, count in sorted(counts.items())]
    return (_record_custom_functions(graph) if notes else graph), notes


def _record_custom_functions(graph: Graph) -> Graph:
    """The graph whose custom functions without a derivative of their own have a gradient: of each input, as a
    straight-through estimator gives one. They are taken to save their inputs."""
    ops = list(graph.ops)
    for region, differentiable in reversed(list(functions(graph))):
        inner = graph.ops[region.start : region.end]
        results = {name for op in inner for name in op.outputs}
        read = dict.fromkeys(name for op in inner for name in op.refs() if name not in results)
        result, value = inner[-1].outputs[0], graph.values.get(inner[-1].outputs[0])
        if differentiable or not read or (value is not None and not value.dtype.is_differentiable):
            continue
        plain = f"{result}::forward"
        inputs = tuple(map(Ref, read))
        call = (Ref(plain), inputs, inputs, 0)
        last = inner[-1]
        end = replace(last, name=f"{last.name}::function", target=OWN_BACKWARD, args=call, kwargs={})
        without = [replace(op, grad=False) for op in inner]
        without[-1] = replace(without[-1], outputs=(plain, *last.outputs[1:]))
        ops[region.start : region.end] = [*without, replace(end, outputs=(result,))]
    return replace(graph, ops=tuple(ops))


def integer_results(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """Says of how many operators on integers ATen has no counterpart."""
    whole = sum("integer" in kinds_of(op.base) for op in graph.ops)
    text = "operators on integers have no counterpart in ATen: their results are counted, no gradient passes them"
    return graph, [Note("assumption", "SM269", text, whole)]


def lost_parameters(graph: Graph, source: FromOnnx) -> tuple[Graph, Sequence[Note]]:
    """A warning of parameters that the metadata of a dynamo export names and the file does not have: what leads to no
    output was left out with all that it reads, so that nothing tells its size."""
    names = {p.fqn for p in (*graph.parameters, *graph.buffers)} | {p.value.name for p in graph.parameters}
    stacks = {op.modules for op in graph.ops}
    run = {
        frame.path for stack in stacks for frame in stack
    }  # a module that runs without its own weight has a tied one
    lost = [fqn for name, fqn in source.net.aliases.items() if name.startswith("p_") and fqn not in names]
    lost = [fqn for fqn in lost if fqn.rpartition(".")[0] not in run]
    if not lost or any(frame.cls.startswith("transformers.") for stack in stacks for frame in stack):
        return graph, ()  # models of transformers tie embeddings to a module that never runs
    listed = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
    text = (
        f"parameters of the model that the exporter left out, with the code that reads them: {listed}. The peak is too "
        "low by what they and that code take, which no band here covers (a .pt2 file has both)"
    )
    return graph, [Note("warning", "SM273", text, len(lost))]


def sizes_in_data(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """Says of how many ops the data decide the sizes."""
    by_data = sum("data_sized" in kinds_of(op.base) for op in graph.ops)
    text = "sizes that are in the data (NonZero, Unique, masks) were taken as large as they can get"
    return graph, [Note("assumption", "SM267", text, by_data)]
