"""A predicted memory snapshot against a real one: peaks, the last step allocation by allocation, and who is missing."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from staticmem.report.formats import JSON, Format
from staticmem.report.text import PLAIN, View, printable
from staticmem.validate.snapshots import Allocation, Snapshot

WORK = 20_000_000  # pairs of equal sizes that an alignment looks at: more takes minutes
TAILS = (1.0, 1.1, 1.5, 3.0)  # times the predicted step: how far back the real one is looked for, in turn
ENOUGH = 0.9  # of the predicted step: with so many pairs nobody looks further back
MOMENTS = 10
TOP = 10


@dataclass(frozen=True)
class Moment:
    """A point of the last step that both have: bytes allocated after it on each side."""

    share: float  # of the step's matched allocations, 0 to 1
    what: str
    predicted: int
    measured: int


@dataclass(frozen=True)
class Group:
    """Allocations of one side under one name: how many, and their bytes together."""

    what: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Category:
    """Bytes that the predicted step allocates in a category, and those of them that the real one has too."""

    name: str
    predicted: int
    matched: int


@dataclass(frozen=True)
class SnapshotComparison:
    """All of it. Bytes; peaks are (predicted, measured). `aligned` False: too long, only sizes were counted."""

    allocated: tuple[int, int]
    reserved: tuple[int, int]
    predicted_at: str
    measured_at: str
    allocations: tuple[int, int]
    matched: int
    aligned: bool
    categories: tuple[Category, ...] = ()
    predicted_only: tuple[Group, ...] = ()
    measured_only: tuple[Group, ...] = ()
    moments: tuple[Moment, ...] = ()
    notes: tuple[str, ...] = field(default=())


def compare(predicted: Snapshot, measured: Snapshot) -> SnapshotComparison:
    """The comparison. The predicted snapshot is one that this package made: its frames say tensor and step."""
    mine = last_step(predicted)
    theirs, pairs, aligned = _last_step(mine, measured.allocations)
    notes = [] if aligned else ["the step is too long to be aligned: allocations were paired by size alone"]
    if measured.before:
        notes.append(f"{measured.before:,} bytes were allocated before the real recording began")
    first, last = (pairs[0][1], pairs[-1][1]) if pairs else (0, -1)
    used = {j for _, j in pairs}
    paired = {i for i, _ in pairs}
    alone = [theirs[j] for j in range(first, last + 1) if j not in used]
    return SnapshotComparison(
        allocated=(predicted.peak_allocated[0], measured.peak_allocated[0]),
        reserved=(predicted.peak_reserved[0], measured.peak_reserved[0]),
        predicted_at=_when(predicted),
        measured_at=_when(measured),
        allocations=(len(mine), max(last - first + 1, 0)),
        matched=len(pairs),
        aligned=aligned,
        categories=_categories(mine, paired),
        predicted_only=_groups([a for i, a in enumerate(mine) if i not in paired], ours=True),
        measured_only=_groups(alone, ours=False),
        moments=_moments(predicted, measured, [(mine[i], theirs[j]) for i, j in pairs]) if aligned else (),
        notes=tuple(notes),
    )


def _last_step(
    mine: Sequence[Allocation], real: Sequence[Allocation]
) -> tuple[list[Allocation], list[tuple[int, int]], bool]:
    """The end of the recording that the predicted step is paired with, and the pairs.

    Steps are alike: an alignment with all of a recording would take the step before where the last one differs.
    """
    best: tuple[list[Allocation], list[tuple[int, int]], bool] | None = None
    for tail in TAILS:
        theirs = list(real[-round(tail * len(mine)) :])
        pairs, aligned = _pairs(mine, theirs)
        if best is None or len(pairs) > len(best[1]):
            best = theirs, pairs, aligned
        enough = len(mine) if tail == TAILS[0] else ENOUGH * len(mine)  # of few blocks more, one look sees all
        if len(best[1]) >= enough or len(theirs) == len(real):
            break
    assert best is not None
    return best


def last_step(snapshot: Snapshot) -> list[Allocation]:
    """The allocations of the last step, by the frames that a predicted snapshot has; all where it has none."""
    steps = [_step(a) for a in snapshot.allocations]
    last = max((s for s in steps if s is not None), default=None)
    return [a for a, s in zip(snapshot.allocations, steps, strict=True) if s == last]


def _step(allocation: Allocation) -> int | None:
    for name, _, _ in reversed(allocation.frames):
        if name.startswith("step ") and name[5:].isdigit():
            return int(name[5:15])
    return None


def _pairs(mine: Sequence[Allocation], theirs: Sequence[Allocation]) -> tuple[list[tuple[int, int]], bool]:
    """Indices of both sides that belong together, in order; the end of the recording is the end of the step."""
    a, b = [x.size for x in mine], [x.size for x in theirs]
    end = 0
    while end < min(len(a), len(b)) and a[-1 - end] == b[-1 - end]:
        end += 1
    tail = [(len(a) - k, len(b) - k) for k in range(end, 0, -1)]
    a, b = a[: len(a) - end], b[: len(b) - end]
    counts = Counter(b)
    if sum(counts[size] for size in a) > WORK:
        return [*_match_by_size(a, b), *tail], False
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    pairs = [(m.a + k, m.b + k) for m in blocks for k in range(m.size)]
    return pairs + tail, True


def _match_by_size(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    places: dict[int, list[int]] = {}
    for j, size in enumerate(b):
        places.setdefault(size, []).append(j)
    return sorted(((i, places[s].pop()) for i, s in reversed(list(enumerate(a))) if places.get(s)), key=lambda p: p[1])


def _categories(mine: Sequence[Allocation], paired: set[int]) -> tuple[Category, ...]:
    total: Counter[str] = Counter()
    matched: Counter[str] = Counter()
    for i, allocation in enumerate(mine):
        name = _category(allocation)
        total[name] += allocation.size
        matched[name] += allocation.size if i in paired else 0
    return tuple(Category(name, size, matched[name]) for name, size in total.most_common())


def _category(allocation: Allocation) -> str:
    return allocation.frames[1][0] if len(allocation.frames) > 1 else "unknown"


def _groups(allocations: Sequence[Allocation], ours: bool) -> tuple[Group, ...]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for allocation in allocations:
        name = _own_name(allocation) if ours else _place(allocation)
        sizes[name] += allocation.size
        counts[name] += 1
    return tuple(Group(name, counts[name], size) for name, size in sizes.most_common(TOP))


def _own_name(allocation: Allocation) -> str:
    """The kernel and the kind of tensor of a predicted allocation."""
    if not allocation.frames:
        return "unknown"
    return f"{allocation.frames[0][2]} ({_category(allocation)})"


def _place(allocation: Allocation) -> str:
    """The innermost frames of a real allocation: C++ ones, and the line of Python below them."""
    if not allocation.frames:
        return "no stack"
    inner = allocation.frames[0]
    python = next((f for f in allocation.frames if f[0].endswith(".py")), None)
    shown = inner[2] or inner[0]
    return shown if python is None or python is inner else f"{shown} < {python[0]}:{python[1]} {python[2]}"


def _when(snapshot: Snapshot) -> str:
    """Where allocated memory peaks: the allocation that reaches it."""
    event = snapshot.peak_allocated[1]
    allocation = next((a for a in snapshot.allocations if a.born == event), None)
    share = f"{event + 1:,} of {len(snapshot.allocated):,} events"
    if allocation is None:
        return share
    step = _step(allocation)
    return f"{share}, {_place(allocation)}" + (f", step {step}" if step is not None else "")


def _moments(
    predicted: Snapshot, measured: Snapshot, pairs: Sequence[tuple[Allocation, Allocation]]
) -> tuple[Moment, ...]:
    """Allocated memory of both sides at points of the step, and at the point of the predicted peak."""
    if not pairs:
        return ()
    count = len(pairs)
    chosen = {round(k * (count - 1) / (MOMENTS - 1)) for k in range(MOMENTS)}
    chosen.add(max(range(count), key=lambda k: predicted.allocated[pairs[k][0].born]))
    moments = []
    for k in sorted(chosen):
        mine, theirs = pairs[k]
        levels = predicted.allocated[mine.born], measured.allocated[theirs.born]
        moments.append(Moment(k / max(count - 1, 1), _own_name(mine), *levels))
    return tuple(moments)


def render(comparison: SnapshotComparison, view: View = PLAIN) -> str:
    """Lines for people; the last one is the sum of it."""
    mine, theirs = comparison.allocated
    share = f"{mine / theirs - 1:+.2%}" if theirs else "nothing"
    matching = f"{comparison.matched:,} of {comparison.allocations[0]:,} allocations match"
    total = f"Allocated {share} of the real peak; {matching}."
    if view.quiet:
        return view.line(total)
    size = view.size
    lines = [f"{'Meter':<10}  {'predicted':>12}  {'measured':>12}  {'difference':>10}"]
    for name, (mine, theirs) in (("allocated", comparison.allocated), ("reserved", comparison.reserved)):
        share = f"{mine / theirs - 1:+.2%}" if theirs else "-"
        lines.append(f"{name:<10}  {size(mine):>12}  {size(theirs):>12}  {share:>10}")
    moments = (("predicted", comparison.predicted_at), ("measured", comparison.measured_at))
    lines += ["", *[f"Peak, {what:<9}  {printable(moment)}" for what, moment in moments], ""]
    lines.append(
        f"Last step: {comparison.matched:,} of {comparison.allocations[0]:,} predicted allocations are in the real one"
    )
    for c in comparison.categories:
        lines.append(f"  {printable(c.name):<16}  {size(c.predicted):>12}  matched {size(c.matched):>12}")
    for title, groups in (
        ("Predicted, and not in the real step", comparison.predicted_only),
        ("In the real step, and not predicted", comparison.measured_only),
    ):
        if groups:
            lines += ["", title]
            lines += [f"  {size(g.nbytes):>12}  {g.count:>6,}  {printable(g.what)}" for g in groups]
    if comparison.moments:
        lines += ["", "Allocated over the step: predicted, measured"]
        for m in comparison.moments:
            lines.append(
                f"  {m.share:>5.0%}  {size(m.predicted):>12}  {size(m.measured):>12}  {printable(m.what)}".rstrip()
            )
    if comparison.notes:
        lines += ["", *(f"Note: {printable(note)}." for note in comparison.notes)]
    return "\n".join([*lines, "", total]) + "\n"


FORMATS = (Format("table", "txt", render), JSON)
