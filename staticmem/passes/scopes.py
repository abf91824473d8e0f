"""Module paths from the node names of the TorchScript exporter: `/layer1/layer1.0/relu_1/Relu`.

torch/csrc/jit/passes/onnx/naming.cpp builds them from the attribute names of modules. A child of a container that is
itself called repeats the container's name (`layer1.0`), and the second call of a module has `_1` after its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from staticmem.ir.graph import Frame

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
        found = self._numbers.get(scope)
        if found is None:
            if not _NAME.match(name):
                return 0
            found = self._numbers[scope] = len(self.stacks)
            self.stacks.append(self._build(scope))
        # identifiers of ASCII are most of what the pattern takes, and asking for them is cheaper
        elif not (leaf.isidentifier() and leaf.isascii() and leaf[0] != "_") and not _NAME.match(name):
            return 0
        return found

    def told(self, classes: Mapping[str, str]) -> None:
        """Gives frames the classes of their paths."""
        if not classes:
            return
        same: dict[Frame, Frame] = {}  # the same objects for all nodes of a module: they are compared all the time
        for number, stack in enumerate(self.stacks):
            self.stacks[number] = tuple(
                same.setdefault(f, Frame(f.path, classes.get(f.path, ""), f.call)) for f in stack
            )

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
        found = self._frames.get((path, call))
        if found is None:
            found = self._frames[path, call] = Frame(path, "", call)
        return found

    def _repeat(self, parent: str, part: str) -> tuple[str, int]:
        siblings = self._seen.setdefault(parent, set())
        match = _REPEAT.match(part)
        if match is not None and match[1] in siblings:
            return match[1], int(match[2])
        siblings.add(part)
        return part, 0
