"""How long the code that stack traces show in part may hold a value: the upper end of a band.

What lines leave open, and what is assumed of it here:

- A line calls code that no trace shows (a method, a function of the file): it may hold all that it made until the line
  is done.
- A line is a part of a statement, or assigns what a call returned in a container: all that later ops read of what it
  made, and all that the code which returned had names for, may be held until the line runs again or the frame returns.
- A list that no line assigns is read (`sum(skips)`, `preds[-1]`): all that the frame has names for may be in it.
- A value that is read after its line has run again is in a container, which lives until the frame returns.
"""

from __future__ import annotations

import re
from collections.abc import Set

from staticmem.ir.graph import Graph
from staticmem.passes.variables.line_texts import (
    ASSIGN,
    assigns_one_result,
    calls_hidden_code,
    parsed_statement,
    returned_names,
)
from staticmem.passes.variables.source_lines import Execution, PythonFrame, is_of_torch

_LISTS = re.compile(
    r"\b(?:cat|concat|stack|sum|tuple|list)\(\s*([A-Za-z_]\w*)\s*[,)]|\b([A-Za-z_]\w*)\[-\d|\b(\w+)\.pop\("
)


def longest_holds_of_lines(graph: Graph) -> tuple[dict[str, int], Set[str]]:
    """For every op result that a Python frame may hold: the index of the last op during which it may; and the results
    that a call returns beside its own (`return f(x), out`), which outlive it."""
    longest = _Longest(graph)
    return longest.run(), longest.passed_on


class _Longest(Execution):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.returned: list[str] = []  # what frames that returned had names for, during the running statement
        self.passed_on: set[str] = set()
        self.listy = _with_unseen_lists(graph)

    def _finish(self, frame: PythonFrame, now: int) -> None:
        if is_of_torch(frame.line):
            super()._finish(frame, now)
            self.returned = []
            return
        text, indices = frame.line.text, range(frame.since, now + 1)
        returned, self.returned = self.returned, []
        before = {name: tuple(values) for name, values in frame.names.items()}
        for values in before.values():
            self._hold(values)
        hidden = calls_hidden_code(text, self.children)
        ops, depth = self.graph.ops, self.frames.index(frame) + 1
        results = [name for index in indices for name in ops[index].outputs]
        super()._finish(frame, now)
        read_later = [name for name in results if self.last_read.get(name, -1) > now]
        if hidden:  # what modules of the model's own make inside themselves is in frames of their own
            own = [op for op in (ops[index] for index in indices) if all(map(is_of_torch, op.stack[depth:]))]
            for name in (
                *(n for op in own for n in op.outputs),
                *(n for op in own for n in op.refs() if n in self.made_by),
            ):
                if self.made_by.get(name, -1) >= frame.since:
                    self.until(name, now)
        one = assigns_one_result(text) and set(read_later) <= set(self.latest)
        if not one:
            unclear = dict.fromkeys(
                (*read_later, *(self.latest if ASSIGN.match(text) or parsed_statement(text) is None else ()))
            )
            if len(set(read_later) - set(self.latest)) or not assigns_one_result(text):
                unclear.update(dict.fromkeys(returned))
            slot = f"?{frame.line.line}"
            self._hold(tuple(unclear))
            self._forget(frame, slot, now)
            frame.names[slot] = list(unclear)
        key = (frame.line.file, frame.line.function)
        for name, values in before.items():  # names that were assigned again
            kept = frame.names.get(name, ())
            for value in values:
                if value not in kept and (key in self.listy or self.last_read.get(value, -1) > now):
                    self._hold((value,))
                    frame.names.setdefault("?[]", []).append(value)
            self._drop(list(values), now)

    def _return_to(self, depth: int, now: int) -> None:
        while len(self.frames) > depth:
            frame = self.frames[-1]
            values = [value for held in frame.names.values() for value in held]
            for name in returned_names(frame.line.text):
                self.passed_on.update(frame.names.get(name, ()))
            super()._return_to(len(self.frames) - 1, now)
            self.returned = [*self.returned, *values, *(v for held in frame.names.values() for v in held)]

    def until(self, value: str, index: int) -> None:
        self.least[value] = max(self.least.get(value, index), index)

    def run(self) -> dict[str, int]:
        self.least: dict[str, int] = {}
        released = super().run()
        for name, index in self.least.items():
            released[name] = max(released.get(name, index), index)
        return released


def _with_unseen_lists(graph: Graph) -> set[tuple[str, str]]:
    """Functions that read a list which no line of theirs assigns."""
    texts: dict[tuple[str, str], set[str]] = {}
    for stack in {id(op.stack): op.stack for op in graph.ops}.values():
        for line in stack:
            texts.setdefault((line.file, line.function), set()).add(line.text)
    keys: set[tuple[str, str]] = set()
    for key, lines in texts.items():
        assigned = {name.strip(" *") for text in lines if (m := ASSIGN.match(text)) for name in m[1].split(",")}
        read = {name for text in lines for match in _LISTS.findall(text) for name in match if name}
        if read - assigned - {"self", "x"}:
            keys.add(key)
    return keys
