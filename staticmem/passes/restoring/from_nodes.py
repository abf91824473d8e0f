"""ATen calls of an ONNX graph without usable exporter metadata: patterns first, then node by node.

Module paths come from the node names of the TorchScript exporter: `/layer1/layer1.0/relu_1/Relu`.
torch/csrc/jit/passes/onnx/naming.cpp builds them from the attribute names of modules. A child of a container that is
itself called repeats the container's name (`layer1.0`), and the second call of a module has `_1` after its name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Note, Op
from staticmem.ir.onnx_graph import Net, Node, Translated, frames, is_known
from staticmem.ops.onnx import Context, calls_of
from staticmem.passes.edit import Ops
from staticmem.passes.restoring.patterns import find

_REPEAT = re.compile(r"(.+)_(\d{1,4})$")
_NAME = re.compile(r"/(?:[^/\s]+/)*[A-Za-z]\w*$")


class Scopes:
    """Frames of node names; one for a graph, because a repeated call is told from a name by what came before."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of scopes, which are most of a name
        self.stacks: list[tuple[Frame, ...]] = [()]  # by these numbers; 0: no scope
        self._seen: dict[str, set[str]] = {}
        self._frames: dict[tuple[str, int], Frame] = {}

    def frames(self, name: str) -> tuple[Frame, ...]:
        """The module calls around a node, outermost first; none where the name is not a path."""
        return self.stacks[self.number(name)]

    def number(self, name: str) -> int:
        """The place of a node's frames in `stacks`."""
        scope, _, leaf = name.rpartition("/")
        number = self._numbers.get(scope)
        if number is None:
            if not _NAME.match(name):
                return 0
            number = self._numbers[scope] = len(self.stacks)
            self.stacks.append(self._build(scope))
        # identifiers of ASCII are most of what the pattern takes, and asking for them is cheaper
        elif not (leaf.isidentifier() and leaf.isascii() and leaf[0] != "_") and not _NAME.match(name):
            return 0
        return number

    def _build(self, scope: str) -> tuple[Frame, ...]:
        frames = [self._frame("", 0)]
        parent, path = "", ""
        last = ""
        for part in scope.split("/"):
            if not part:
                continue
            base, call = self._repeat(parent, part)
            if last and base.startswith(last + "."):
                path = path[: len(path) - len(last)] + base
            else:
                path = f"{path}.{base}" if path else base
            frames.append(self._frame(path, call))
            parent, last = f"{parent}/{part}", base
        return tuple(frames)

    def _frame(self, path: str, call: int) -> Frame:
        """The same object for all nodes of a call."""
        frame = self._frames.get((path, call))
        if frame is None:
            frame = self._frames[path, call] = Frame(path, "", call)
        return frame

    def _repeat(self, parent: str, part: str) -> tuple[str, int]:
        siblings = self._seen.setdefault(parent, set())
        match = _REPEAT.match(part)
        if match is not None and match[1] in siblings:
            return match[1], int(match[2])
        siblings.add(part)
        return part, 0


class Translator:
    """Translates nodes in order. Results whose contents are known need no op."""

    def __init__(self, net: Net) -> None:
        self.ctx = Context(net)
        self.net = net
        self.scopes = Scopes()
        self.unknown: Counter[str] = Counter()

    def frames(self, node: Node) -> tuple[Frame, ...]:
        return frames(node) if node.scopes else self.scopes.frames(node.name)

    def node(self, node: Node, modules: tuple[Frame, ...] | None = None, constant: bool = False) -> list[Op]:
        """The ops of one node; none where its contents are known, unless those are wanted as well."""
        if not constant and is_known(node, self.net.consts):
            return []
        if node.outputs and node.outputs[0] in self.net.weights:
            return []
        if node.op == "Constant" and not node.domain and not self._is_no_array(node):
            return []
        self.ctx.frames = self.frames(node) if modules is None else modules
        ops, meaning = calls_of(self.ctx, node)
        if not meaning:
            self.unknown[f"{node.domain or 'onnx'}::{node.op}"] += 1
        return ops

    def _is_no_array(self, node: Node) -> bool:
        """Whether a Constant has strings or a sparse tensor, whose contents nobody reads here."""
        value = self.net.values.get(node.outputs[0]) if node.outputs else None
        return "sparse_value" in node.attrs or (value is not None and value.dtype is dtypes.string)


def translate(net: Net, without: Collection[str] = ()) -> Translated:
    """The ATen ops of a graph, from its nodes alone. `without`: names of groups that are not looked for."""
    net.filled()
    nodes = list(net.nodes)
    translator = Translator(net)
    numbers = [translator.scopes.number(node.name) if not node.scopes else -1 for node in nodes]
    matches, regrouped = find(translator.ctx, nodes, translator.frames, without=without)
    ops_of: dict[int, list[Op]] = dict(matches)
    stacks = translator.scopes.stacks
    for index, node in enumerate(nodes):
        if index not in ops_of:
            number = numbers[index]
            ops_of[index] = translator.node(node, stacks[number] if number >= 0 else None)
    _materialise(translator, nodes, ops_of)
    ops = [op for index in range(len(nodes)) for op in ops_of[index]]
    renamed = translator.ctx.renamed
    if renamed:  # results that patterns gave another name after an op was made
        edit = Ops(ops)
        edit.renamed = renamed
        ops = edit.done()
    outputs = tuple(renamed.get(name, name) for name in net.outputs)
    return Translated(ops, outputs, _notes(translator, regrouped), (), translator.ctx.transposed)


def drop_unused(graph: Graph, source: object) -> tuple[Graph, Sequence[Note]]:
    """The graph without ops whose results nobody reads. Ops that write in place stay."""
    needed = set(graph.outputs)
    kept: list[Op] = []
    writing = {op.target for op in graph.ops if op.base.endswith("_")}
    for op in reversed(graph.ops):
        if not needed.isdisjoint(op.outputs) or op.target in writing:
            kept.append(op)
            needed.update(op.refs())
    dropped = len(graph.ops) - len(kept)
    if not dropped:
        return graph, ()
    text = "operators whose results are not used were left out"
    return replace(graph, ops=tuple(reversed(kept))), [Note("dropped", "SM253", text, dropped)]


def _materialise(translator: Translator, nodes: list[Node], ops_of: dict[int, list[Op]]) -> None:
    """Adds the ops of tensors whose contents are known, but which other ops read: eager computes them all the same."""
    consts = translator.net.consts
    if not consts:
        return
    pending = [name for ops in ops_of.values() for op in ops for name in op.refs() if name in consts]
    if not pending:
        return
    producer = {name: index for index, node in enumerate(nodes) for name in node.outputs}
    done: set[int] = set()
    while pending:
        name = pending.pop()
        index = producer.get(name)
        if index is None or index in done or ops_of[index] or name not in translator.net.consts:
            continue
        done.add(index)
        node = nodes[index]
        if node.op in ("Shape", "Size", "Constant"):
            continue
        ops = translator.node(node, constant=True)
        if all(op.target.startswith("aten::") for op in ops):
            ops_of[index] = ops
            pending += [ref for op in ops for ref in op.refs()]


def _notes(translator: Translator, regrouped: Counter[str]) -> list[Note]:
    """What a reader should know of the translation."""
    notes = [
        Note("regrouped", "SM252", f"nodes were regrouped as {name}", count)
        for name, count in sorted(regrouped.items())
    ]
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
