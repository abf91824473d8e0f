"""In-place ops without writes: the tensor that was written to, and all views of it, have new values from then on.

Source: torch/_subclasses/functional_tensor.py, aten/src/ATen/FunctionalStorageImpl.cpp (a write to a view goes to its
base by the inverse of the view; other views are made again from the base).
"""

from __future__ import annotations

from typing import Any

from staticmem.compiler.aot.tracer import Tracer
from staticmem.compiler.nodes import PLACEHOLDER, Node


class Storages:
    """What the names of a trace share. `env` has the values of names; a write replaces those that are affected."""

    def __init__(self, t: Tracer, env: dict[str, Any]) -> None:
        self.t, self.env = t, env
        self.of_module: dict[Node, Node] = {}  # the present value of a placeholder -> the placeholder

    def write(self, old: Node, new: Node) -> Node:
        """`old` has the value `new` from now on."""
        if any(
            isinstance(value, Node) and value is not old and _base(value) is _base(old) for value in self.env.values()
        ):
            raise ValueError("an op writes to a tensor that has views, which is not traced")
        placeholder = old if old.target == PLACEHOLDER else self.of_module.get(old)
        if placeholder is not None:
            self.t.writes[placeholder] = new
            self.of_module[new] = placeholder
        for name, value in self.env.items():
            if value is old:
                self.env[name] = new
        return new


def _base(node: Node) -> Node:
    from staticmem.ops import kinds_of

    while "view" in kinds_of(node.base) and node.inputs:
        node = node.inputs[0]
    return node
