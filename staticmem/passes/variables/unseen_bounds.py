"""Until when values live in code that no file shows: at most, for the upper end of a band, and by habit, as expected.

A value of a frame may have a name of its own, and then the frame holds it until it returns. Two things bound that. A
`torch.nn` module is known code, and a `Sequential` gives one name to all its results. And a statement that runs again,
in a loop over modules of one list or over calls of one module, assigns its names again: a value is released when the
statement that made it has run once more; of a module of a list twice more, as `checkpoint_sequential` holds the input
of the modules that it runs together (torch/utils/checkpoint.py).

Statements are told apart by what runs: a child module by its path (the numbers of a list left out), an op by the child
that ran before it and by its place after that child. Calls of a module that is in no list run in a loop only where the
same two children ran before them: `self.relu` is called in many lines.

The weights of attention are the one value that functions return beside their result as a habit (`return out, weights`):
the caller may hold them as well. So may it hold the parts of a `cat` that joins what is older than its call: they may
be in a list that the caller passes (`self.layers(x, outputs)`).

As expected, a value that several statements read has a name: the code could not read it again otherwise. How long the
name means it is a habit, and each habit here follows from what assigns the name again:

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

from collections.abc import Collection, Iterator, Set

from staticmem.ir.graph import Frame, Graph, Op, Ref
from staticmem.ir.stacks import LIBRARIES, Stack, call_ends, common_depth, general_path, is_published, shared_frames
from staticmem.ops.registry import FREE_PRODUCTS, JOINS, RESHAPES, RING_ATTENTION, kinds_of
from staticmem.passes.variables.policy import Held, attention_weights, changes_weights

_TORCH = "torch.nn."
_ATTENTION = "aten::scaled_dot_product_attention"
_MOST_OPS = 12  # between the scores of attention and its product with values
_LEAST_IN_LIST = 3  # parts: what joins two is likelier to have them as arguments
_CONTEXT = 2  # children before one that is in no list

_Statement = tuple[object, ...]


def longest_holds(graph: Graph, held: Held) -> Held:
    """`held` of the expected policy, with all that frames of unseen code may hold besides."""
    until = _Calls(graph).holds()
    frames = {name: depth for name, depth in held.frames.items() if name not in until}
    for name, index in held.until.items():
        until[name] = max(until.get(name, index), index)
    return Held(frames, until)


def ends_of_names_in_loops(graph: Graph) -> dict[str, int]:
    """For every value of a frame of unseen code: until when a name may mean it that each turn of a loop assigns.

    A habit and no bound: a module of a list assigns its name a turn later, and the child before it tells a statement.
    The first turn of a loop comes after other children than the rest.
    """
    code = _Calls(graph, turns_in_lists=1, context=1)
    ends = code.holds()
    ends.update((name, end) for name, end in code.assigned_again.items() if name not in graph.read_again)
    return ends


def ends_of_frames(graph: Graph, names: Collection[str]) -> dict[str, int]:
    """For some values: the last op of the call that may have a name for them. A bound of `longest_holds` that takes
    less time: it takes no statement to run again."""
    ops, ends, last_read, outputs = graph.ops, call_ends(graph), graph.last_read, frozenset(graph.outputs)
    maker = {op.outputs[0]: op for op in ops if op.outputs}
    maker.update((name, op) for op in ops if len(op.outputs) > 1 for name in op.outputs)
    bases = ((target, target.split(".", 1)[0]) for target in {op.target for op in ops})
    passed_on = {target for target, base in bases if "softmax" in kinds_of(base) or changes_weights(base)}
    in_lists = _parts_of_callers_lists(graph)
    again = graph.read_again & set(names)
    shared: dict[str, int] = {}  # by all readers of what is read more than once
    for op in ops if again else ():
        for name in op.refs():
            if name in again:
                modules = maker[name].modules
                depth = len(modules) if op.modules is modules else common_depth(modules, op.modules)
                if depth < shared.get(name, depth + 1):
                    shared[name] = depth
    held: dict[str, int] = {}
    end_of: dict[tuple[int, int], int] = {}  # by the identity of a stack, and a level
    for name in names:
        op = maker[name]
        modules = op.modules
        if name in outputs:
            level = 0
        elif name in again:
            level = shared[name] - 1
        else:
            reader = ops[last_read[name]].modules if name in last_read else modules
            level = (len(modules) if reader is modules else common_depth(modules, reader)) - 1
        for frame in (level, level - 1) if op.target in passed_on or name in in_lists else (level,):
            end = end_of.get((id(modules), frame))
            if end is None:
                named = 0 <= frame < len(modules) and not modules[frame].cls.startswith(_TORCH)
                end = end_of[id(modules), frame] = ends[modules[: frame + 1]] if named else -1
            if end >= 0:
                held[name] = max(end, held.get(name, 0))
    return held


class _Call:
    """A running call of a module: what it has run so far."""

    __slots__ = ("child", "children", "older", "open", "place")

    def __init__(self) -> None:
        self.child: Frame | None = None  # that runs now
        self.children: list[_Statement] = []
        self.place = 0  # ops of the frame itself since the last child
        self.older: dict[_Statement, tuple[str, ...]] = {}  # what they assigned the time before
        self.open: dict[_Statement, tuple[int, tuple[str, ...]]] = {}  # what statements assigned, and when


class _Calls:
    def __init__(self, graph: Graph, *, turns_in_lists: int = 2, context: int = _CONTEXT) -> None:
        self.graph = graph
        self.turns_in_lists = turns_in_lists  # after which a module of a list has its name assigned again
        self.context = context
        self.ends = call_ends(graph)
        self.shared = shared_frames(graph)
        self.passed_on = attention_weights(graph) | _parts_of_callers_lists(graph)
        self.chains = _chains(graph)
        self.calls: dict[Stack, _Call] = {}
        self.until: dict[str, int] = {}
        self.assigned_again: dict[str, int] = {}  # when the statement that made a value ran again

    def holds(self) -> dict[str, int]:
        for index, op in enumerate(self.graph.ops):
            if not op.modules:
                continue
            statements = [self._statement(op, level) for level in range(len(op.modules))]
            for name in op.outputs:
                level = self.shared.get(name, len(op.modules)) - 1
                if name in self.passed_on and level > 0:
                    level -= 1
                if level >= 0:
                    self._assign(name, op, level, statements[level], index)
        return self.until

    def _statement(self, op: Op, level: int) -> _Statement:
        """The statement of the frame at `level` that runs the op."""
        modules = op.modules
        call = self.calls.setdefault(modules[: level + 1], _Call())
        if len(modules) == level + 1:
            call.place, call.child = call.place + 1, None
            return op.base.rstrip("_"), call.place, call.children[-1] if call.children else ()
        child = modules[level + 1]
        if child is not call.child and child != call.child:
            call.child, call.place = child, 0
            parts = child.path.split(".")
            in_list = any(
                part.isdigit() for part in parts[modules[level].path.count(".") + bool(modules[level].path) :]
            )
            before = () if in_list else tuple(statement[0] for statement in call.children[-self.context :])
            call.children.append((general_path(child.path), before))
        return call.children[-1]

    def _assign(self, name: str, op: Op, level: int, statement: _Statement, index: int) -> None:
        frame = op.modules[level]
        stack = op.modules[: level + 1]
        if frame.cls.startswith(_TORCH) or stack in self.chains:
            return
        received = index if len(op.modules) == level + 1 else self.ends[op.modules[: level + 2]]
        call = self.calls[stack]
        assigned, names = call.open.get(statement, (received, ()))
        if assigned != received:  # the statement has run before
            longer = self.turns_in_lists > 1 and _runs_in_list(statement)
            older = call.older.get(statement, ()) if longer else names
            self.assigned_again.update(dict.fromkeys(older, received))
            # what is read later is in a container, which lives on
            self.until.update((old, received) for old in older if self.graph.last_read.get(old, -1) <= received)
            call.older[statement] = names
            names = ()
        call.open[statement] = (received, (*names, name))
        self.until[name] = self.ends[stack]


def _runs_in_list(statement: _Statement) -> bool:
    """Whether a statement is the call of a module of a list."""
    return len(statement) == 2 and statement[1] == () and str(statement[0]).endswith("*")


def _chains(graph: Graph) -> set[Stack]:
    """Calls of modules that run nothing but numbered children, one after the other: a Sequential of any class."""
    own: set[Stack] = set()
    others: set[Stack] = set()
    for stack in {op.modules for op in graph.ops}:
        own.update((stack,) if stack else ())
        for level in range(len(stack) - 1):
            if not stack[level + 1].path[len(stack[level].path) :].lstrip(".").isdigit():
                others.add(stack[: level + 1])
    callers = {stack[:level] for stack in own for level in range(1, len(stack))}
    return callers - own - others


def _parts_of_callers_lists(graph: Graph) -> Set[str]:
    """What calls made that join it with something older: it may be in a list that their callers have."""
    stack_of: dict[str, Stack] = {}
    parts: set[str] = set()
    for op in graph.ops:
        names = op.refs() if op.base in JOINS else ()
        if len(names) >= _LEAST_IN_LIST:
            depths = {name: common_depth(stack_of.get(name, ()), op.modules) for name in names}
            own = {name for name, depth in depths.items() if depth == len(op.modules)}
            parts.update(own if len(own) < len(depths) else ())
        stack_of.update(dict.fromkeys(op.outputs, op.modules))
    return parts


def keys_and_values(graph: Graph) -> Set[str]:
    """Keys and values of masked attention, which code may keep as attributes in evaluation mode: a cache for the next
    call. An export in training mode does not have those statements, and no file has one without an op."""
    maker: dict[str, Op] = {}
    kept: set[str] = set()
    for op in graph.ops:
        first, second, third = (*(a.name if isinstance(a, Ref) else "" for a in op.args[:3]), "", "", "")[:3]
        masked = op.base == RING_ATTENTION or (op.base == _ATTENTION and _is_masked(op))
        if masked and _may_cache(op):
            kept.update((second, third))
        elif op.base in FREE_PRODUCTS and _may_cache(op):
            keys = _masked_keys(first, maker)
            kept.update((keys, second) if keys else ())
        maker.update(dict.fromkeys(op.outputs, op))
    return kept & maker.keys()


def _is_masked(op: Op) -> bool:
    """Whether a call of scaled_dot_product_attention has a mask, or is causal."""
    mask = op.args[3] if len(op.args) > 3 else op.kwargs.get("attn_mask")
    causal = op.args[5] if len(op.args) > 5 else op.kwargs.get("is_causal")
    return isinstance(mask, Ref) or causal is True


def _may_cache(op: Op) -> bool:
    return not is_published(op) and not (op.modules and op.modules[-1].cls.startswith(_TORCH))


def _masked_keys(weights: str, maker: dict[str, Op]) -> str:
    """The keys that weights of attention are computed of, where scores are masked before the softmax; or ""."""
    normed = masked = False
    for _ in range(_MOST_OPS):
        op = maker.get(weights)
        if op is None:
            return ""
        if op.base in FREE_PRODUCTS and normed:
            keys = op.args[1] if len(op.args) > 1 else None
            return keys.name if masked and isinstance(keys, Ref) else ""
        normed = normed or "softmax" in kinds_of(op.base)
        masked = masked or (normed and "masking" in kinds_of(op.base))
        sources = [a for a in op.args[:2] if isinstance(a, Ref)]
        if op.base == "aten::where":
            sources = [a for a in op.args[1:3] if isinstance(a, Ref) and a.name in maker]
        if not sources:
            return ""
        weights = sources[0].name
    return ""


_KNOWN = ("torch.nn.", *LIBRARIES)
_ACTIVATIONS = frozenset(f"aten::{name}" for name in ("relu", "tanh", "sigmoid"))  # that calls are written within
_PADS = frozenset(("aten::pad", "aten::constant_pad_nd"))


def with_likely_names(graph: Graph, held: Held, *, traced: bool = False) -> Held:
    """`held` of the expected policy, with the values that hidden functions are likely to have named, and without what a
    loop has assigned again (of `traced` graphs `unseen_code` tells that)."""
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
