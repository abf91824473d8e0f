"""Graphs of ATen calls as `torch.fx` has them after AOTAutograd: functional, decomposed, forward and backward in one.

They differ from `ir.graph` in that nothing is in place, an op with several results has a `getitem` node for each that
is read, and each node has its sizes, strides and element type. Targets are spelt as in `ir.graph`, without the overload
`default`: `aten::mul.Tensor`, `aten::relu`, `prims::convert_element_type`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from staticmem.eager.strides import Form, Shape, Strides, numel
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import NO_KWARGS

PLACEHOLDER = "placeholder"
SAVED = -1  # `Node.must_recompute` of a node that a checkpoint saves
GETITEM = "operator::getitem"  # args: the node with several results, and the index

# An argument of a node: a node, a number, a word, a dtype, or a tuple of them.
Argument: TypeAlias = Any
Result: TypeAlias = "Form | tuple[Form | None, ...] | None"


class Node:
    """One call, or an input of the graph (`PLACEHOLDER`).

    Attributes:
        target: what is called.
        args, kwargs: as in the ATen schema; tensors are nodes.
        form: sizes, strides and dtype of the result; a tuple of them where the call has several results; None where it
            is no tensor.
        inputs: the nodes among its arguments, each once, in order.
        op: index of the op in `Graph.ops` that it comes from, that of the forward for a node of the backward; -1: none.
        name: of a placeholder, the value of the graph, or the output that a tangent belongs to; else "".
        must_recompute: it is in a region of `torch.utils.checkpoint`, by the number of the region; 0: it is not;
            `SAVED`: a selective one saves it.
        recomputed: a node of a backward that computes a value of the forward again.
        on_ctx: the `ctx` of a custom autograd function has it as an attribute, which the backward reads
            (`saved_tensor_with_no_vc_check` of torch/_functorch/autograd_function.py).
    """

    __slots__ = ("args", "form", "inputs", "kwargs", "must_recompute", "name", "on_ctx", "op", "recomputed", "target")

    def __init__(
        self,
        target: str,
        args: tuple[Argument, ...] = (),
        form: Result = None,
        kwargs: Mapping[str, Argument] = NO_KWARGS,
        op: int = -1,
        name: str = "",
        must_recompute: int = 0,
        recomputed: bool = False,
    ) -> None:
        self.target, self.args, self.form, self.kwargs = target, args, form, kwargs
        self.op, self.name, self.must_recompute, self.recomputed = op, name, must_recompute, recomputed
        self.on_ctx = False
        nodes: dict[Node, None] = {}
        collect_nodes(args, nodes)
        if kwargs:
            collect_nodes(kwargs.values(), nodes)
        self.inputs = tuple(nodes)

    @property
    def base(self) -> str:
        """The target without its overload: `aten::mul`."""
        return self.target.split(".", 1)[0]

    @property
    def tensor(self) -> Form:
        """The form of the one tensor that this node gives."""
        assert isinstance(self.form, Form), f"{self} gives no tensor"
        return self.form

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def strides(self) -> Strides:
        return self.tensor.strides

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def ndim(self) -> int:
        return len(self.tensor.shape)

    @property
    def numel(self) -> int:
        return numel(self.tensor.shape)

    def dim(self, dim: int) -> int:
        """A dimension counted from the front.

        Raises:
            ValueError: the tensor has fewer dimensions.
        """
        rank = max(self.ndim, 1)
        if not -rank <= dim < rank:
            raise ValueError(f"dimension {dim} of a tensor with {self.ndim}")
        return dim % rank

    def __repr__(self) -> str:
        return f"{self.name or self.target}: {self.form}"


def collect_nodes(args: Iterable[Argument], nodes: dict[Node, None]) -> None:
    """Adds the nodes among arguments, lists included."""
    for arg in args:
        if type(arg) is Node:
            nodes[arg] = None
        elif type(arg) is tuple:
            collect_nodes(arg, nodes)


def users_of(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """The nodes that read each node, in order; every node has an entry."""
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        users[node] = []
        for read in node.inputs:
            users[read].append(node)
    return users
