"""Walking an ONNX graph from a node to what its inputs come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

from staticmem.ir.graph import Arg, Frame, Op
from staticmem.ir.onnx_graph import Node, is_known
from staticmem.ops.onnx import Context

_PYTORCH_2 = re.compile(r"pytorch [2-9]\.")
Pattern = Callable[["Matcher", Node], bool]


class Matcher:
    """Def-use of nodes, and the groups that were found."""

    def __init__(
        self,
        ctx: Context,
        nodes: Sequence[Node],
        frames: Callable[[Node], tuple[Frame, ...]],
        only: Collection[int] | None = None,
    ) -> None:
        self.ctx, self.net, self.frames = ctx, ctx.net, frames
        self.groups: dict[int, list[Op]] = {}
        self.only, self.nodes = only, nodes

    @cached_property
    def index(self) -> dict[int, int]:
        """Places of nodes, by identity."""
        return {id(node): i for i, node in enumerate(self.nodes)}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """The node that makes a value."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        """The nodes that use a value, once for each use; the caller is one."""
        readers: dict[str, list[Node]] = {}
        consts = self.net.consts
        for node in self.nodes:
            if is_known(node, consts):
                continue  # size computations read tensors without using them
            for name in node.inputs:
                nodes = readers.get(name)
                if nodes is None:
                    readers[name] = [node]
                else:
                    nodes.append(node)
        for name in self.net.outputs:
            readers.setdefault(name, []).append(_CALLER)
        return readers

    def is_own_arithmetic(self, since: int) -> bool:
        """Whether nodes that would make up an op are the model's own code: PyTorch's TorchScript exporter, of 2.0 and
        later, writes the op as one node from the opset `since` on."""
        net = self.net
        return not net.aliases and net.opset >= since and _PYTORCH_2.match(net.producer) is not None

    def free(self, node: Node) -> bool:
        """Whether no group has the node yet."""
        index = self.index[id(node)]
        return index not in self.groups and (self.only is None or index in self.only)

    def maker(self, name: str, *ops: str) -> Node | None:
        """The node that makes a value, if it is one of these operators and belongs to no group."""
        node = self.producer.get(name)
        if node is None or node.domain or node.op not in ops or not self.free(node):
            return None
        return node

    def inner(self, name: str, *ops: str) -> Node | None:
        """As `maker`, if the value has one reader: it disappears with the group."""
        return self.maker(name, *ops) if len(self.readers.get(name, ())) == 1 else None

    def reader(self, name: str, *ops: str) -> Node | None:
        """The only node that reads a value."""
        readers = self.readers.get(name, ())
        if len(readers) != 1 or readers[0].op not in ops or not self.free(readers[0]):
            return None
        return readers[0]

    def number(self, name: str) -> float | None:
        """A scalar constant."""
        array = self.net.consts.get(name)
        if array is None or array.size != 1 or name in self.net.weights:
            return None
        return float(array.reshape(-1)[0])

    def split(self, node: Node) -> tuple[str, float] | None:
        """The tensor and the number of a commutative operator."""
        if len(node.inputs) != 2:
            return None
        a, b = node.inputs
        number = self.number(b)
        if number is not None:
            return a, number
        number = self.number(a)
        return (b, number) if number is not None else None

    def take(self, root: Node, ops: list[Op], *others: Node) -> bool:
        """Records a group: `ops` stand where `root` was."""
        for node in others:
            self.groups[self.index[id(node)]] = []
        self.groups[self.index[id(root)]] = ops
        return True

    def op(
        self,
        root: Node,
        target: str,
        *args: Arg,
        outputs: Sequence[str] | None = None,
        kwargs: Mapping[str, Arg] | None = None,
    ) -> Op:
        """An op with the module frames of a node."""
        self.ctx.frames = self.frames(root)
        return self.ctx.op(root, target, *args, outputs=outputs, kwargs=kwargs)


_CALLER = Node("", "", "", (), ())


def close(a: float | None, b: float) -> bool:
    """Whether a constant is this number, up to the precision of half floats."""
    return a is not None and abs(a - b) <= 2e-3 * max(abs(b), 1e-12)
