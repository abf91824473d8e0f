"""Until when values may live in code that no file shows: the upper end of a band.

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
"""

from __future__ import annotations

from collections.abc import Collection, Set

from staticmem.ir.graph import Frame, Graph, Op, Ref
from staticmem.ir.stacks import Stack, call_ends, common_depth, general_path, is_published, shared_frames
from staticmem.ops.registry import FREE_PRODUCTS, JOINS, RING_ATTENTION, kinds_of
from staticmem.passes.variables.attention_weights import attention_weights, changes_weights
from staticmem.passes.variables.policy import Held

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
