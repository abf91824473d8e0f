"""What `forward` of published classes gives names to, for files without stack traces.

`published_names.json` has for classes of torchvision, timm and transformers which variable takes the result of each
child module and of each op that `forward` (and what it calls) runs itself. `scripts/classes/class_tables.py` runs
the models and watches; the file has no code, only names. A variable keeps its value until it is assigned again or its
function returns, so that a class that is in the table needs no policy (`frames.policy`).

A result is told by its producer and its number among the results of that producer in one call of `forward`. The
producer is the attribute of the child module (`*` for a number), or the op (`aten::cat`). Names: "" is no name, `xs[]`
an element of a list, `^[]` of the caller's list, `self.x` an attribute, which the module holds on; `x'` is a local of a
function that `forward` calls, `x~` another one of that name. `x -y` takes `x` and lets go of `y`. An entry is one name
for all results of a producer, a list by number, such lists by how many results there are, or `[first, each, last]`:
names of the first results, of those between in turn, and of the last ones. null: calls of the class differ; `calls` may
tell them apart, by the children or the ops that they run. The policy decides for a whole call as soon as one of its
results is not in the table: an optional layer may assign a name again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from functools import cache, lru_cache
from pathlib import Path
from zlib import crc32

from staticmem.ir.classes import alternatives
from staticmem.ir.graph import Graph, Op
from staticmem.ir.record import record
from staticmem.passes.frames.policy import Held, Stack, common_depth

LIBRARIES = ("torchvision.", "timm.", "transformers.")
_RESHAPES = "flatten reshape reshape_as unflatten view_as _unsafe_view".split()
_PERMUTES = "transpose t movedim swapaxes swapdims mT numpy_T".split()
# ONNX files have one op for all of these
_SAME = {
    **{f"aten::{name}": "aten::view" for name in _RESHAPES},
    **{f"aten::{name}": "aten::permute" for name in _PERMUTES},
    "aten::expand_as": "aten::expand",
}
_END = 2**31 - 1  # of a slice; exporters write 2**63 - 1
Entry = str | Sequence[str | Sequence[str] | None] | Mapping[str, Sequence[str | None]] | None
Names = Mapping[str, Mapping[str, Entry]]


@record(frozen=True, slots=True)
class Table:
    """What is known: class -> producer -> name, a list of names by `nth`, or three lists for any number of results.

    `calls` has by class and signature what calls of a class do not agree in, `evaluation` what attributes keep in
    evaluation mode only.
    """

    classes: Names
    calls: Mapping[str, Mapping[str, Mapping[str, Entry]]] = field(default_factory=dict)
    evaluation: Names = field(default_factory=dict)


@record(frozen=True, slots=True)
class Result:
    """A value that a running `forward` receives: from a child that returns, or from an op that it calls."""

    call: Stack  # up to the frame that receives it
    producer: str
    nth: int  # result of that producer in this call
    value: str
    index: int  # of the op that made it
    received: int  # the op after which `forward` goes on with it: the last one of the child

    @property
    def cls(self) -> str:
        """Class of the receiving module."""
        return self.call[-1].cls


@cache
def _text() -> str:
    return Path(__file__).with_name("published_names.json").read_text(encoding="utf-8")


@lru_cache(8)
def published(classes: frozenset[str] | None = None) -> Table:
    """The table of the package, or only these classes of it: reading all of it takes longer than most analyses.

    The file has one class a line, so that a class is found without reading the others.
    """
    text, entries = _text(), {}
    if classes is None:
        entries = json.loads(text)["classes"]
    for cls in classes or ():
        at = text.find(f"\n{json.dumps(cls)}:")
        if at >= 0:
            line = text[at + 1 : text.index("\n", at + 1)].rstrip(",")
            entries.update(json.loads(f"{{{line}}}"))
    parts = ("names", "calls", "evaluation")
    return Table(*({cls: entry[part] for cls, entry in entries.items() if part in entry} for part in parts))


def table_of(graph: Graph) -> Table | None:
    """What the package's table has of the classes of a graph; None where it has nothing of them."""
    frames = {frame.cls for stack in {op.modules for op in graph.ops} for frame in stack}
    classes = [cls for several in frames for cls in alternatives(several) if cls.startswith(LIBRARIES)]
    table = published(frozenset(classes)) if classes else None
    return table if table is not None and table.classes else None


@record(frozen=True, slots=True)
class Decided:
    """What the table decides: values with the level of the frame that receives them, and until which op they live."""

    values: Set[tuple[str, int]]
    until: Mapping[str, int]


def decided_by_names(graph: Graph, table: Table, training: bool = False) -> Decided:
    """What a table says of a graph's values."""
    return _held_by_names(graph, _with_alternatives(graph, table), training)


def with_published_names(graph: Graph, held: Held, decided: Decided) -> Held:
    """`held` of the policy, with what the table says where it says something."""
    if not decided.values:
        return held
    frames = {v: depth for v, depth in held.frames.items() if (v, depth) not in decided.values}
    shared = shared_frames(graph)
    kept = {v: i for v, i in held.until.items() if (v, shared.get(v, 0) - 1) not in decided.values}
    for value, index in decided.until.items():
        kept[value] = max(kept.get(value, index), index)
    return Held(frames, kept)


def _with_alternatives(graph: Graph, table: Table) -> Table:
    """`table` with the classes that a file leaves several possible for: what is the same in all that have it.

    A result that some of them do not have speaks against those. Nothing is known where one of them is not in the table.
    """
    added: dict[str, Mapping[str, Entry]] = {}
    for cls in {frame.cls for stack in {op.modules for op in graph.ops} for frame in stack}:
        several = [table.classes[one] for one in alternatives(cls) if one in table.classes]
        if 1 < len(several) == len(alternatives(cls)):
            producers = {producer for entries in several for producer in entries}
            added[cls] = {p: _agreed([entries[p] for entries in several if p in entries]) for p in producers}
    return replace(table, classes={**table.classes, **added}) if added else table


def _agreed(entries: list[Entry]) -> Entry:
    """What entries of one producer have in common, result by result."""
    if all(entry == entries[0] for entry in entries):
        return entries[0]
    length = min((len(entry) for entry in entries if isinstance(entry, list)), default=0)
    rows = [{_name(entry, nth, length) for entry in entries} for nth in range(length)]
    return [row.pop() if len(row) == 1 else None for row in rows] or None


def results(graph: Graph, only: Collection[str] | None = None) -> Iterator[Result]:
    """Every result that some `forward` receives, in order; of the classes in `only` where it is given."""
    shared = shared_frames(graph)
    last = call_ends(graph)
    counts: dict[tuple[Stack, str], int] = {}
    for index, op in enumerate(graph.ops):
        modules = op.modules
        for name in op.outputs:
            for level in range(max(0, shared.get(name, len(modules)) - 1), len(modules)):
                producer = "" if only is not None and modules[level].cls not in only else _producer(op, level)
                if producer:
                    call = modules[: level + 1]
                    nth = counts.get((call, producer), 0)
                    counts[call, producer] = nth + 1
                    received = index if len(modules) == level + 1 else last[modules[: level + 2]]
                    yield Result(call, producer, nth, name, index, received)


def shared_frames(graph: Graph) -> dict[str, int]:
    """How many frames a value's maker shares with all of its readers."""
    stack_of: dict[str, Stack] = {}
    shared: dict[str, int] = {}
    for op in graph.ops:
        for name in op.refs():
            if name in stack_of:
                depth = common_depth(stack_of[name], op.modules)
                shared[name] = min(shared.get(name, depth), depth)
        stack_of.update(dict.fromkeys(op.outputs, op.modules))
    return {**shared, **{name: 1 for name in graph.outputs if name in stack_of}}


def call_ends(graph: Graph) -> dict[Stack, int]:
    """The last op of every module call."""
    ends: dict[Stack, int] = {}
    for index, op in enumerate(graph.ops):
        following = graph.ops[index + 1].modules if index + 1 < len(graph.ops) else ()
        if following is not op.modules:
            for level in range(len(op.modules)):
                ends[op.modules[: level + 1]] = index
    return ends


def _producer(op: Op, level: int) -> str:
    """The op, or the child module that it runs in; "" for a slice that takes all, which eager may leave out."""
    if len(op.modules) == level + 1:
        base = op.base.rstrip("_")
        return "" if base == "aten::alias" or _takes_all(op) else _SAME.get(base, base)
    outer, inner = op.modules[level].path, op.modules[level + 1].path
    prefix = f"{outer}." if outer else ""
    child = inner[len(prefix) :].split(".", 1)[0] if inner.startswith(prefix) else inner
    return "*" if child.isdigit() else child


def _takes_all(op: Op) -> bool:
    if op.base != "aten::slice":
        return False
    given = dict(zip(("start", "stop", "step"), op.args[2:5], strict=False))
    start, stop, step = given.get("start", 0), given.get("stop"), given.get("step", 1)
    return start in (0, None) and step in (1, None) and (stop is None or (type(stop) is int and stop >= _END))


def signature(call: Iterable[Result], ops: bool = False) -> str:
    """Tells calls of a class apart by the children that gave a result, as eight hexadecimal digits; `ops`: also by the
    ops that `forward` ran itself, such as the roll of shifted windows."""
    producers = sorted({result.producer for result in call if ops or "::" not in result.producer})
    return f"{crc32(','.join(producers).encode()):08x}"


def place(nth: int, count: int, first: int, each: int, last: int) -> int:
    """Where the name of the `nth` of `count` results is among those of the first, the repeated and the last ones."""
    if nth < first:
        return nth
    return first + each + nth - (count - last) if nth >= count - last else first + (nth - first) % each


def _name(entry: Entry, nth: int, count: int) -> str | None:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        return (entry.get(str(count)) or [None] * count)[nth]
    parts = [part for part in entry if isinstance(part, list)]
    if len(parts) == 3:
        first, each, last = parts
        flat: list[str] = [*first, *each, *last]
        return flat[place(nth, count, len(first), len(each), len(last))]
    name = entry[nth] if nth < len(entry) else None
    return name if isinstance(name, str) else None


def _held_by_names(graph: Graph, table: Table, training: bool) -> Decided:
    last = call_ends(graph)
    names_of: dict[Stack, dict[str, list[str]]] = {}  # what the names of a call mean now
    decided: set[tuple[str, int]] = set()
    until: dict[str, int] = {}

    def hold(values: Iterable[str], index: int) -> None:
        for value in values:
            until[value] = max(until.get(value, index), index)

    named = _with_names(graph, table, training)
    unclear = {result.call for result, entry in named if entry is None and _matters(result, table)}
    for result, entry in named:
        if entry is None or result.call in unclear:
            continue
        decided.add((result.value, len(result.call) - 1))
        names = names_of.setdefault(result.call, {})
        name, *gone = entry.split(" -")
        if name.startswith("^"):
            hold([result.value], last[result.call[:-1] or result.call])
        elif name.endswith("[]"):
            names.setdefault(name, []).append(result.value)
        elif name:
            hold(names.get(name, ()), result.received)
            names[name] = [result.value]
        for let_go in gone:
            hold(names.pop(let_go, ()), result.received)
    for call, names in names_of.items():
        for name, values in names.items():
            hold(values, len(graph.ops) - 1 if name.startswith("self.") else last[call])
    return Decided(decided, until)


def _with_names(graph: Graph, table: Table, training: bool) -> list[tuple[Result, str | None]]:
    """All results of known classes with what the table has for them."""
    received = list(results(graph, table.classes))
    counts: Counter[tuple[Stack, str]] = Counter((result.call, result.producer) for result in received)
    calls: dict[Stack, list[Result]] = {}
    for result in received:
        if result.cls in table.calls:
            calls.setdefault(result.call, []).append(result)
    special: dict[Stack, Mapping[str, Entry]] = {}
    for call, each in calls.items():  # what calls like this one agree in
        by_signature = table.calls[call[-1].cls]
        special[call] = {**by_signature.get(signature(each, ops=True), {}), **by_signature.get(signature(each), {})}
    named: list[tuple[Result, str | None]] = []
    for result in received:
        producer, nth, count = result.producer, result.nth, counts[result.call, result.producer]
        name = _name(table.classes[result.cls].get(producer), nth, count)
        if name is None and result.call in special:
            name = _name(special[result.call].get(producer), nth, count)
        if not training and result.cls in table.evaluation:
            cached = table.evaluation[result.cls].get(producer)
            if isinstance(cached, list) and len(cached) == count:
                name = _name(cached, nth, count) or name
        named.append((result, name))
    return named


def kept_in_evaluation(graph: Graph, table: Table) -> dict[str, int]:
    """Values that attributes keep in evaluation mode only, such as LeViT's attention biases, and until when."""
    if not table.evaluation:
        return {}
    named = _with_names(graph, Table(table.evaluation, {}, table.evaluation), training=False)
    return {result.value: len(graph.ops) - 1 for result, name in named if name and name.startswith("self.")}


def _matters(result: Result, table: Table) -> bool:
    """Whether an unknown result makes a whole call unclear: of a child that the table lacks (an optional layer),
    or one that differed. An op that it does not have may be an exporter's."""
    return "::" not in result.producer or result.producer in table.classes[result.cls]
