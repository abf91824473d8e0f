"""ATen calls of an ONNX graph without usable exporter metadata: patterns first, then node by node."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from staticmem.ir.graph import Frame, Note, Op, Value
from staticmem.ir.onnx_graph import Net, Node, Recovered, frames, is_known
from staticmem.ops.onnx import quantized, table
from staticmem.ops.onnx.context import Context
from staticmem.passes import decomposed, module_parts, scatter
from staticmem.passes.patterns import find
from staticmem.passes.scopes import Scopes
from staticmem.passes.tidy import drop_unused


class Translator:
    """Translates nodes in order. Results whose contents are known need no op."""

    def __init__(self, net: Net) -> None:
        self.ctx = Context(net)
        self.net = net
        self.scopes = Scopes()
        self.unknown: Counter[str] = Counter()

    def frames(self, node: Node) -> tuple[Frame, ...]:
        return frames(node) if node.scopes else self.scopes.frames(node.name)

    def node(self, node: Node, modules: tuple[Frame, ...] | None = None, known: bool = False) -> list[Op]:
        """The ops of one node; none where its contents are known, unless those are wanted as well."""
        if not known and is_known(node, self.net.consts):
            return []
        if (node.op == "Constant" and not node.domain) or (node.outputs and node.outputs[0] in self.net.weights):
            return []
        self.ctx.frames = self.frames(node) if modules is None else modules
        ops, meaning = table.translate(self.ctx, node)
        if not meaning:
            self.unknown[f"{node.domain or 'onnx'}::{node.op}"] += 1
        return ops

    def traced(self, name: str) -> Value | None:
        """What a Constant node of a trace makes, None for all other names."""
        node = self.ctx.producer(name) if self.net.producer.startswith("pytorch") else None
        constant = node is not None and node.op == "Constant" and not node.domain and not node.fx
        return self.net.values.get(name) if constant else None


def recover(net: Net) -> Recovered:
    """The ATen ops of a graph, from its nodes alone."""
    net.filled()
    nodes = list(net.nodes)
    translator = Translator(net)
    numbers = [translator.scopes.number(node.name) if not node.scopes else -1 for node in nodes]
    told = _told_by_parts(net, nodes, numbers, translator.scopes)
    matches, regrouped = find(translator.ctx, nodes, translator.frames)
    made: dict[int, list[Op]] = dict(matches)
    stacks = translator.scopes.stacks
    for index, node in enumerate(nodes):
        if index not in made:
            number = numbers[index]
            made[index] = translator.node(node, stacks[number] if number >= 0 else None)
    _materialise(translator, nodes, made)
    ops = [op for index in range(len(nodes)) for op in made[index]]
    if translator.ctx.renamed:
        ops = [_renamed(op, translator.ctx.renamed) for op in ops]
    outputs = tuple(translator.ctx.renamed.get(name, name) for name in net.outputs)
    ops = scatter.augmented(ops, outputs)
    ops, dropped = drop_unused(ops, outputs)
    ops, again = decomposed.regrouped(ops, outputs, net.consts, translator.traced)
    notes = [*notes_of(translator, regrouped, dropped), *again]
    whole = sum(op.target.removeprefix("onnx::") in quantized.INTEGERS for op in ops)
    if whole:
        text = "operators on integers have no counterpart in ATen: their results are counted, no gradient passes them"
        notes.append(Note("assumption", "SM269", text, whole))
    if told:
        text = "modules have the class of torchvision or timm that has parts of these names"
        notes.append(Note("assumption", "SM268", text, told))
    return Recovered(ops, notes, outputs, any(op.modules for op in ops), translator.ctx.transposed)


def _told_by_parts(net: Net, nodes: list[Node], numbers: list[int], scopes: Scopes) -> int:
    """Gives modules the classes that the names of their parts tell, where the file has no classes; how many.

    `numbers` are those of the nodes' scopes, -1 where the file has the modules.
    """
    operators: dict[str, set[str]] = {}
    own: dict[int, set[str]] = {}  # of the innermost module, by the number of the scope
    for node, number in zip(nodes, numbers, strict=True):
        if number < 1:
            continue
        if number not in own:
            stack = scopes.stacks[number]
            for frame in stack:
                operators.setdefault(frame.path, set())
            own[number] = operators[stack[-1].path]
            if len(operators) > module_parts.MOST_PATHS:
                return 0
        own[number].add(node.op)
    if len(operators) < 2:
        return 0
    tensors = {name: len(shape) if (shape := net.shape(name)) is not None else -1 for name in net.weights}
    classes = module_parts.classes_of(operators, tensors, module_parts.grammar())
    scopes.told(classes)
    return sum(cls.startswith(module_parts.LIBRARIES) for cls in classes.values())


def _materialise(translator: Translator, nodes: list[Node], made: dict[int, list[Op]]) -> None:
    """Adds the ops of tensors whose contents are known, but which other ops read: eager computes them all the same."""
    consts = translator.net.consts
    if not consts:
        return
    pending = [name for ops in made.values() for op in ops for name in op.refs() if name in consts]
    if not pending:
        return
    producer = {name: index for index, node in enumerate(nodes) for name in node.outputs}
    done: set[int] = set()
    while pending:
        name = pending.pop()
        index = producer.get(name)
        if index is None or index in done or made[index] or name not in translator.net.consts:
            continue
        done.add(index)
        node = nodes[index]
        if node.op in ("Shape", "Size", "Constant"):
            continue
        ops = translator.node(node, known=True)
        if all(op.target.startswith("aten::") for op in ops):
            made[index] = ops
            pending += [ref for op in ops for ref in op.refs()]


def _renamed(op: Op, renamed: dict[str, str]) -> Op:
    """Results that patterns gave another name after an op was made."""
    from staticmem.passes.edit import Ops

    if not any(name in renamed for name in op.refs()):
        return op
    edit = Ops([op])
    edit.renamed = renamed
    return edit.done()[0]


def notes_of(translator: Translator, regrouped: Counter[str], dropped: int) -> list[Note]:
    """What a reader should know of a translation."""
    notes = [
        Note("regrouped", "SM252", f"nodes were regrouped as {name}", count)
        for name, count in sorted(regrouped.items())
    ]
    if dropped:
        notes.append(Note("dropped", "SM253", "operators whose results are not used were left out", dropped))
    if translator.ctx.copied_masks:
        text = (
            "contiguous(), which exporters leave out, was put back in front of attention: its mask is permuted. Code "
            "without it needs much more: --sdpa math"
        )
        notes.append(Note("assumption", "SM272", text, translator.ctx.copied_masks))
    notes += [
        Note("warning", "SM257", f"{name} has no counterpart in ATen: its memory is a conservative guess", count)
        for name, count in sorted(translator.unknown.items())
    ]
    return notes


def with_frames(op: Op, modules: tuple[Frame, ...]) -> Op:
    return replace(op, modules=modules)
