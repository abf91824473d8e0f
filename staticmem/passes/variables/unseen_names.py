"""Which values code that no trace shows is likely to have named, and until when: a part of the expected policy.

A value that several statements read has a name: the code could not read it again otherwise. How long the name means it
is a habit, and each habit here follows from what assigns the name again:

- A value that is read on after the code has gone on without it (a skip of a U, an identity, a level of a pyramid) has a
  name of its own, or is in a list, until the function returns: nothing else may take a name that is read later.
- A value that several statements read one after the other (`a = f(h); b = g(h); h = cat(a, b)`) has it until a
  statement joins what was made of it, which takes the name.
- `x = x + f(x)` takes the name at once: no later line needs the older value.
- `x = x + f(y)` keeps `y`, as the sum takes the other name, and `cat([x, f(y)])` until it is done; but a sum does not
  where `y` is an activation of what a call returned (`x = x + self.fc2(gelu(self.fc1(x)))`).
- `x = relu(norm(conv(x)))` assigns when all of it is done.
- What is padded to the size of an older value and joined behind it has a name: its size was read.
- In a loop each name means what the last turn gave it (`ends_of_names_in_loops`), that of a policy's rule as well.
  What is read after its turn is in a list, which lives on, and so are the parts of a `cat`.
- What a line pops off a list has no name.

Frames of PyTorch's layers are known, and those of published classes are not judged so: the policy alone was compared
with them (`ir.stacks.LIBRARIES`).
"""

from __future__ import annotations

from collections.abc import Iterator

from staticmem.ir.graph import Graph, Op, Ref
from staticmem.ir.stacks import LIBRARIES, Stack, call_ends, shared_frames
from staticmem.ops import kinds_of
from staticmem.ops.registry import JOINS, RESHAPES
from staticmem.passes.variables.policy import Held
from staticmem.passes.variables.unseen_bounds import ends_of_names_in_loops

_KNOWN = ("torch.nn.", *LIBRARIES)
_ACTIVATIONS = frozenset(f"aten::{name}" for name in ("relu", "tanh", "sigmoid"))  # that calls are written within
_PADS = frozenset(("aten::pad", "aten::constant_pad_nd"))


def with_likely_names(graph: Graph, held: Held, *, traced: bool = False) -> Held:
    """`held` of the expected policy, with the values that hidden functions are likely to have named, and without what a
    loop has assigned again (of `traced` graphs `unseen_loops` tells that)."""
    names = _Names(graph)
    turns = ends_of_names_in_loops(graph)
    frames, until = dict(held.frames), dict(held.until)
    for name, end in names.ends().items():
        if name not in frames:
            likely = min(end, turns.get(name, end))
            until[name] = max(until.get(name, likely), likely)
    joined = {name for op in graph.ops if op.base in JOINS for name in op.refs()}  # parts of a list, which lives on
    for name in () if traced else turns.keys() & frames.keys() - joined:
        frame = graph.ops[names.maker[name]].modules[: frames[name] + 1]
        if turns[name] < names.calls[frame]:
            del frames[name]
            until[name] = max(until.get(name, 0), turns[name], graph.last_read.get(name, 0))
    return Held(frames, until)


class _Names:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.calls = graph, call_ends(graph)
        self.shared = shared_frames(graph)
        self.maker = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
        self.readers: dict[str, list[int]] = {}
        for index, op in enumerate(graph.ops):
            for name in op.refs():
                if self.maker.get(name, index) < index:  # a damaged file may read what comes later
                    self.readers.setdefault(name, []).append(index)

    def ends(self) -> dict[str, int]:
        ends: dict[str, int] = self._inline()
        outputs = frozenset(self.graph.outputs)
        for name, indices in self.readers.items():
            level = self.shared[name] - 1
            origin = self.maker[name]
            frames = self.graph.ops[origin].modules[level:]
            if level < 0 or name in outputs or not frames or frames[0].cls.startswith(_KNOWN):
                continue
            end = self._end(name, origin, indices, level)
            if end is not None:
                ends[name] = max(end, ends.get(name, end))
        return ends

    def _end(self, name: str, origin: int, indices: list[int], level: int) -> int | None:
        ops = self.graph.ops
        last = indices[-1]
        frame = ops[origin].modules[: level + 1]
        returned = self.calls[frame]
        statements = list(dict.fromkeys(self._statement(index, level) for index in indices))
        reader = ops[last]
        own = len(reader.modules) == level + 1
        if any(".pop(" in line.text for line in reader.stack):  # what a line takes off a list has no name
            return None
        if own and "arithmetic" in kinds_of(reader.base) and reader.args[:1] == (Ref(name),):  # `x = x + f(x)`
            return None
        if own and reader.base in JOINS and len(statements) == 1:
            return returned if self._is_second_part(name, origin, reader, level) else None
        if len(statements) < 2:
            return None if own else self._end_beside_step(origin, statements[0], level)
        if (own and self._is_join(reader, level, origin)) or any(True for _ in self._others(origin, statements, level)):
            return returned
        return next((i for i in range(last + 1, returned) if self._is_join(ops[i], level, origin)), returned)

    def _end_beside_step(self, origin: int, call: int, level: int) -> int | None:
        """Until when a value has a name that a call reads, whose result the frame joins with an older value, or adds to
        it: `x = x + self.out(y)` takes the older one's name, `cat([x, self.up(y)])` needs both."""
        ops = self.graph.ops
        readers = self.readers.get(ops[call].outputs[0], []) if len(ops[call].outputs) == 1 else []
        step = ops[readers[0]] if len(readers) == 1 else ops[call]
        others = [name for name in dict.fromkeys(step.refs()) if name not in ops[call].outputs]
        if len(step.modules) != level + 1 or len(others) != 1 or self.maker.get(others[0], -1) >= origin:
            return None
        if step.base in JOINS:
            return readers[0]
        keeps = step.base == "aten::add" and step.refs()[0] in others and self._is_made_by_frame(origin, level)
        return self.calls[step.modules] if keeps else None

    def _is_made_by_frame(self, index: int, level: int) -> bool:
        """Whether an op of a frame made a value, or what it is a view of, of more than what a call returned."""
        op = self.graph.ops[index]
        sources = [self.maker[name] for name in op.refs() if name in self.maker]
        if len(op.modules) != level + 1 or max(sources, default=-1) >= index:
            return False
        if sources and ("view" in kinds_of(op.base) or op.base in RESHAPES):
            return self._is_made_by_frame(sources[0], level)
        return len(sources) != 1 or len(self.graph.ops[sources[0]].modules) <= level + 1

    def _inline(self) -> dict[str, int]:
        """What the frame had a name for when a statement began that ends with an activation: `x = relu(norm(conv(x)))`
        assigns when all of it is done. And what `x + (q - x).detach()` reads, which has a name and is read by it."""
        ops, ends = self.graph.ops, dict[str, int]()
        for index, op in enumerate(ops):
            level = len(op.modules) - 1
            first = op.args[0] if op.args else None
            if level < 0 or not isinstance(first, Ref) or op.modules[level].cls.startswith(_KNOWN):
                continue
            if op.base in _ACTIVATIONS:
                start = self._start_of_chain(first.name, level)
                if start is not None:
                    ends[start] = index
            elif op.base == "aten::add" and len(op.args) > 1 and isinstance(op.args[1], Ref):
                step = self._maker_before_detach(op.args[1].name)
                if step is not None and step.base == "aten::sub" and step.args[1:2] == (first,):
                    ends.update((name, index) for name in step.refs()[:1] if name in self.maker)
        return ends

    def _maker_before_detach(self, name: str) -> Op | None:
        """The op that made a value, or what the value is a detached view of."""
        place = self.maker.get(name, -1)
        while place >= 0:
            op = self.graph.ops[place]
            source = op.args[0] if op.base == "aten::detach" else None
            before = self.maker.get(source.name, -1) if isinstance(source, Ref) else place
            if before >= place:  # no detach, or one that a damaged file has of what comes later
                return op
            place = before
        return None

    def _start_of_chain(self, name: str, level: int) -> str | None:
        """The value of the frame that calls of children made another of, one after the other; None where none did."""
        ops = self.graph.ops
        began = name
        while name in self.maker and len(ops[self.maker[name]].modules) > level + 1:
            place = self.maker[name]
            began = name
            name = self._first_read(ops[place].modules[: level + 2])
            if self.maker.get(name, -1) >= place:  # a file may read what comes later: that leads nowhere
                return None
        origin = self.maker.get(name)
        if began == name or origin is None or len(ops[origin].modules) < level + 1 or self.shared[name] != level + 1:
            return None
        return name

    def _first_read(self, call: Stack) -> str:
        """The first value from outside that a call of a module reads."""
        ops, index, outside = self.graph.ops, self.calls[call], ""
        while index >= 0 and ops[index].modules[: len(call)] == call:
            read = [name for name in ops[index].refs() if name in self.maker]
            outside = next((n for n in read[::-1] if ops[self.maker[n]].modules[: len(call)] != call), outside)
            index -= 1
        return outside

    def _statement(self, index: int, level: int) -> int:
        """The last op of the call, from the frame at `level`, that an op is in; the op itself, if it is the frame's."""
        modules = self.graph.ops[index].modules
        return index if len(modules) == level + 1 else self.calls[modules[: level + 2]]

    def _others(self, origin: int, statements: list[int], level: int) -> Iterator[int]:
        """Statements between the first and the last reader that read something else, and allocate."""
        ops = self.graph.ops
        read = set(statements)
        for index in range(statements[0] + 1, statements[-1]):
            op = ops[index]
            if self._statement(index, level) in read or "view" in kinds_of(op.base):
                continue
            if not self._is_join(op, level, origin):
                yield index

    def _is_join(self, op: Op, level: int, origin: int) -> bool:
        """Whether an op of the frame reads two values that ops made, one of them after `origin`."""
        makers = {self.maker[name] for name in op.refs() if name in self.maker}
        return len(op.modules) == level + 1 and len(makers) > 1 and max(makers) > origin

    def _is_second_part(self, name: str, origin: int, join: Op, level: int) -> bool:
        """Whether a value was padded to the size of an older one that it is joined behind: both have names."""
        maker, parts = self.graph.ops[origin], join.refs()
        source = next((n for n in maker.refs() if n in self.maker), None)
        if len(parts) != 2 or parts[1] != name or len(maker.modules) != level + 1 or source is None:
            return False
        return maker.base in _PADS and self.maker.get(parts[0], -1) < self.maker[source]
