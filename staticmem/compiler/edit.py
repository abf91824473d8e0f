"""Changes of a node graph in place, as `torch.fx` makes them: replace all uses of a node, erase it, insert others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from staticmem.tracing.nodes import PLACEHOLDER, Argument, Node, collect_nodes


class GraphEditor:
    """The nodes of a graph in order, who reads each, and what the graph returns.

    Nodes are changed in place: the graph that they come from is given up.

    Attributes:
        outputs: of the graph; uses of them are replaced as well.
    """

    def __init__(self, nodes: Iterable[Node], outputs: Sequence[Node | None]) -> None:
        self.outputs = list(outputs)
        self._users: dict[Node, dict[Node, None]] = {}
        self._before: dict[Node, list[Node]] = {}  # inserted nodes, by the node that they stand before
        self._nodes = list(nodes)
        self._placed: dict[Node, dict[int, None]] = {}  # a result of the graph -> where in `outputs` it stands
        for node in self._nodes:
            self._enter(node)
        for place, output in enumerate(self.outputs):
            if output is not None:
                self._placed.setdefault(output, {})[place] = None

    def __iter__(self) -> Iterator[Node]:
        """The nodes that are not erased, in order; those that are inserted meanwhile may be left out."""
        return iter([node for node in self._nodes if node in self._users])

    def alive(self, node: Node) -> bool:
        return node in self._users

    def users(self, node: Node) -> tuple[Node, ...]:
        """The nodes that read a node, without the output of the graph."""
        return tuple(self._users[node])

    def user_count(self, node: Node) -> int:
        """How many read it, the output of the graph as one of them."""
        return len(self._users[node]) + (node in self._placed)

    def is_output(self, node: Node) -> bool:
        return node in self._placed

    def replace(self, node: Node, by: Node) -> None:
        """All that read `node` read `by` from now on."""
        for user in self.users(node):
            replace_arguments(user, node, by)
            del self._users[node][user]
            self._users[by][user] = None
        for place in self._placed.pop(node, {}):
            self.outputs[place] = by
            self._placed.setdefault(by, {})[place] = None

    def change(self, node: Node, target: str, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> None:
        """Makes a node another call with a result of the same form."""
        for read in node.inputs:
            del self._users[read][node]
        node.target = target
        set_arguments(node, args, kwargs)
        for read in node.inputs:
            self._users[read][node] = None

    def erase(self, node: Node) -> None:
        """Takes a node away that nobody reads."""
        assert not self.user_count(node), f"{node} is still read"
        for read in node.inputs:
            self._users[read].pop(node, None)
        del self._users[node]

    def insert(self, nodes: Sequence[Node], before: Node) -> None:
        for node in nodes:
            self._enter(node)
        self._before.setdefault(before, []).extend(nodes)

    def finish(self) -> list[Node]:
        """The nodes in order, without those that nothing depends on. Writes to placeholders stay."""
        self._flatten()
        for node in reversed(self._nodes):
            dead = node in self._users and not self.user_count(node)
            if dead and node.target not in (PLACEHOLDER, "aten::copy_"):
                self.erase(node)
        return list(self)

    def settle(self) -> None:
        """From here on inserted nodes are among those that are gone through."""
        self._flatten()

    def _flatten(self) -> None:
        if not self._before:
            return
        order: list[Node] = []
        stack = self._nodes[::-1]
        while stack:
            node = stack.pop()
            ahead = self._before.pop(node, None)
            if ahead is not None:
                stack.append(node)
                stack += ahead[::-1]
            elif node in self._users:
                order.append(node)
        self._nodes = order

    def _enter(self, node: Node) -> None:
        self._users[node] = {}
        for read in node.inputs:
            self._users[read][node] = None


def set_arguments(node: Node, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> None:
    node.args, node.kwargs = args, kwargs
    nodes: dict[Node, None] = {}
    collect_nodes(args, nodes)
    collect_nodes(kwargs.values(), nodes)
    node.inputs = tuple(nodes)


def replace_arguments(node: Node, argument: Node, by: Node) -> None:
    """A node reads `by` where it read `argument`."""
    kwargs = {name: _one(value, argument, by) for name, value in node.kwargs.items()}
    set_arguments(node, _replaced(node.args, argument, by), kwargs)


def _replaced(args: tuple[Any, ...], node: Node, by: Node) -> tuple[Any, ...]:
    return tuple([_one(arg, node, by) for arg in args])


def _one(arg: Any, node: Node, by: Node) -> Any:
    if arg is node:
        return by
    return _replaced(arg, node, by) if type(arg) is tuple else arg
