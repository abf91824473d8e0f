"""Names that `forward` of published classes gives results: staticmem/passes/frames/published_names.json.

`class_tables.py` calls this for every model that it runs (`watch`). For every call of a class of torchvision, timm or
transformers: which name takes each result that the call receives, and which names let go then, so that replaying the
entries holds every result for as long as Python did. Calls of a class that differ are told apart by the children that
they ran; where that is not enough the entry is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from class_watch import Held, Observed

from staticmem.ir.graph import Frame
from staticmem.passes.frames.published_names import Entry, Result, call_ends, place, results, signature

LAST = "?"  # a result of the last op of a call: whatever takes it lets go at once
LIBRARIES = ("torchvision.", "timm.", "transformers.")
Stack = tuple[Frame, ...]


@dataclass
class _Hold:
    """A result of a call: the name that holds it longest, and the last op during which any name of the call does."""

    result: Result
    name: str
    until: int  # op of the graph; -1 where no name ever holds it
    object: int
    drops: list[str] = field(default_factory=list)  # names that let go when this is received


def calls_named(seen: Observed) -> Iterator[tuple[Stack, list[tuple[Result, str]]]]:
    """Every call of a published class with the entries of its results in order."""
    received: dict[Stack, list[Result]] = {}
    for result in results(seen.graph):
        received.setdefault(result.call, []).append(result)
    last = call_ends(seen.graph)
    passed = {(result.value, len(result.call)) for each in received.values() for result in each}
    for call, found in received.items():
        if call[-1].cls.startswith(LIBRARIES):
            yield call, _entries(_holds(seen, call, found, last, passed), last[call])


def _holds(
    seen: Observed, call: Stack, found: Sequence[Result], last: Mapping[Stack, int], passed: Set[tuple[str, int]]
) -> list[_Hold]:
    """What the results of a call are held by. `passed`: values that a module receives, and how deep that is."""
    end = last[call]
    shots = _shots(seen, call, end)
    above = _shots(seen, call[:-1], last[call[:-1]]) if len(call) > 1 else []
    objects = [seen.objects[r.value] for r in found]
    # a no-op gives the object back that the call was given, which its caller holds until it returns
    given = {key for ids in (shots[0][1].values() if shots else ()) for key in ids}
    made = []
    for position, result in enumerate(found):
        key = objects[position]
        again = next((p for p in range(position + 1, len(found)) if objects[p] == key), None)
        until_again = end if again is None else found[again].received
        before = {n for k, names in shots if k <= result.received for n in names if key in names[n]}
        while_it_is = [(k, names) for k, names in _from(shots, result.received + 1) if k <= until_again]
        now = {n for _, names in while_it_is for n in names if key in names[n]}
        until = _until(shots, key, result.received, end, None)
        kept = {n: (_until(shots, key, result.received, end, n), n not in before, "@" not in n) for n in sorted(now)}
        name = max(kept, key=lambda n: kept[n], default="") if key not in given else ""
        kept_on = again is None and (result.value, len(call) - 1) not in passed and _held(above, key, end + 1)
        if name.endswith("[]") and not name.startswith("self.") and kept_on:
            name = "^[]"
        made.append(_Hold(result, _label(name), until, key))
    return made


def _shots(seen: Observed, call: Stack, end: int) -> list[tuple[int, Held]]:
    """What the call's names held before which op, as long as it ran."""
    return [(k, held) for k, held in seen.calls[call].shots if k <= end]


def _from(shots: Sequence[tuple[int, Held]], index: int) -> list[Any]:
    """What is held when op `index` begins, and what changes later."""
    began = [s for s in shots if s[0] <= index]
    return [*([(index, began[-1][1])] if began else []), *(s for s in shots if s[0] > index)]


def _held(shots: Sequence[Any], key: int, index: int) -> bool:
    """Whether some name holds an object when op `index` begins."""
    return any(key in ids for _, names in _from(shots, index)[:1] for ids in names.values())


def _until(shots: Sequence[Any], key: int, made: int, end: int, name: str | None) -> int:
    """The last op during which `name` (None: any) holds an object."""
    changes = _from(shots, made + 1)
    until = -1
    for position, (_, names) in enumerate(changes):
        if any(key in names[n] for n in names if name is None or n == name):
            until = changes[position + 1][0] - 1 if position + 1 < len(changes) else end
    return until if made < end else -1


def _label(name: str) -> str:
    """`x@1.140234` is a local of a function that `forward` calls: `x'`; in one that this calls, `x''`."""
    base, at, rest = name.partition("@")
    return base + "'" * int(rest.partition(".")[0]) + ("[]" if rest.endswith("[]") else "") if at else base


def _entries(holds: list[_Hold], end: int) -> list[tuple[Result, str]]:
    """Names, with what they let go of: replayed, every result is held for as long as it was."""
    final = {hold.object: hold for hold in holds}  # an op in place gives the same object once more
    for hold in holds:
        if hold.name and not hold.name.endswith("[]") and final[hold.object] is hold:
            while _overwritten(hold, holds) < min(hold.until, end):
                hold.name += "~"
    for hold in holds:
        if not hold.name or hold.name.startswith(("^", "self.")) or hold.until >= end:
            continue
        if _overwritten(hold, holds) > hold.until:
            at = max(
                (h for h in holds if hold.result.received <= h.result.received <= hold.until),
                key=lambda h: h.result.received,
            )
            if hold.name.endswith("[]"):
                group = [h for h in holds if h.name == hold.name and final[h.object] is h]
                if any(h.until != hold.until for h in group):
                    for number, h in enumerate(group):
                        h.name = f"{hold.name[:-2]}.{number}"
            if at is hold:
                hold.name = ""
            elif hold.name not in at.drops:
                at.drops.append(hold.name)
    return [(h.result, LAST if h.result.received >= end else " -".join([h.name, *h.drops])) for h in holds]


def _overwritten(hold: _Hold, holds: list[_Hold]) -> int:
    """When the name takes another result."""
    if hold.name.endswith("[]"):
        return 1 << 62
    at = holds.index(hold)
    return next((h.result.received for h in holds[at + 1 :] if h.name == hold.name), 1 << 62)


Names = list[str | None]
Counts = dict[int, Names]  # how often a producer gave a result in a call -> the names


@dataclass
class Seen:
    """What all calls of a class have shown: by producer, by the children that a call ran, by those and its ops."""

    together: dict[str, Counts] = field(default_factory=dict)
    apart: dict[str, dict[str, Counts]] = field(default_factory=dict)
    by_ops: dict[str, dict[str, dict[str, Counts]]] = field(default_factory=dict)  # of each of those
    caches: dict[str, Names] = field(default_factory=dict)  # attributes that only evaluation mode sets


def collect(observed: Observed, seen: dict[str, Seen]) -> None:
    """Adds what one model shows."""
    for call, entries in calls_named(observed):
        found = seen.setdefault(call[-1].cls, Seen())
        names: dict[str, Names] = {}
        for result, name in entries:
            names.setdefault(result.producer, []).append(name)
        _merge(found.together, names)
        call_of = [result for result, _ in entries]
        key = signature(call_of)
        _merge(found.apart.setdefault(key, {}), names)
        _merge(found.by_ops.setdefault(key, {}).setdefault(signature(call_of, ops=True), {}), names)


def collect_caches(observed: Observed, seen: Mapping[str, Seen]) -> None:
    """Adds what the same model keeps in attributes in evaluation mode, where that runs the same calls."""
    for call, entries in calls_named(observed):
        found = seen.get(call[-1].cls)
        if found is None:
            continue
        for producer in {result.producer for result, name in entries if name.startswith("self.")}:
            names = [name for result, name in entries if result.producer == producer]
            trained = found.together.get(producer, {}).get(len(names))
            if trained is not None and names != trained:
                found.caches[producer] = [n if n.startswith("self.") else None for n in names]


def _merge(found: dict[str, Counts], names: Mapping[str, Names]) -> None:
    for producer, own in names.items():
        known = found.setdefault(producer, {}).setdefault(len(own), list(own))
        for nth, name in enumerate(own):
            if known[nth] == LAST:
                known[nth] = name
            elif name not in (LAST, known[nth]):
                known[nth] = None


def entry(producer: str, counts: Counts) -> Entry:
    """One name where all results have it (of an op only if it was seen more than once), a pattern, or lists."""
    every = {name for names in counts.values() for name in names if name != LAST}
    if every == {None}:
        return None
    if len(every) < 2 and ("::" not in producer or max(counts) > 1):
        return every.pop() if every else ""
    found = _pattern(counts) if max(counts) > 3 else None
    if found is not None:
        return found
    merged: Names = [None] * max(counts)
    for nth in range(len(merged)):
        here = {names[nth] for names in counts.values() if nth < len(names)}
        here = here - {LAST} or {""}
        merged[nth] = here.pop() if len(here) == 1 else None
    if None in merged and len(counts) > 1 and not any(None in names for names in counts.values()):
        return {str(n): [_plain(name) for name in names] for n, names in sorted(counts.items())}
    return merged


def _plain(name: str | None) -> str | None:
    return "" if name == LAST else name


def _pattern(counts: Counts) -> Entry:
    """`[first, each, last]`: names of the first results, of those between in turn, of the last ones; for any number."""
    if any(None in names for names in counts.values()):
        return None
    for size in range(1, 5):
        for first in range(3):
            for last in range(3):
                if first + size + last >= max(counts):
                    continue
                made: list[set[str | None]] = [set() for _ in range(first + size + last)]
                for n, names in counts.items():
                    for nth, name in enumerate(names):
                        made[place(nth, n, first, size, last)].add(name)
                if all(len(here - {LAST}) < 2 for here in made):
                    flat = [str(next(iter(here - {LAST}), "")) for here in made]
                    return [flat[:first], flat[first : first + size], flat[first + size :]]
    return None


def table(seen: Mapping[str, Seen]) -> dict[str, Any]:
    """By class: `names`; `calls` where calls differ, by signature, only what `names` leaves open; `evaluation`."""
    classes: dict[str, dict[str, Any]] = {}
    for cls, found in sorted(seen.items()):
        made = {p: entry(p, n) for p, n in sorted(found.together.items())}
        if not any(made.values()):
            continue
        classes[cls] = {"names": made}
        open_ = {p for p, e in made.items() if e is None or (isinstance(e, list) and None in e) or isinstance(e, dict)}
        calls: dict[str, dict[str, Entry]] = {}
        for key, producers in sorted(found.apart.items()):
            told = _told(open_, producers)
            for finer, own in sorted(found.by_ops.get(key, {}).items()):
                calls.setdefault(finer, {}).update(_told(open_ - set(told), own))
            calls.setdefault(key, {}).update(told)
        calls = {key: told for key, told in sorted(calls.items()) if told}
        if calls:
            classes[cls]["calls"] = calls
        if found.caches:
            classes[cls]["evaluation"] = dict(sorted(found.caches.items()))
    return classes


def _told(open_: Set[str], producers: Mapping[str, Counts]) -> dict[str, Entry]:
    """What some calls agree in, of what all calls leave open."""
    told = {p: e for p in sorted(open_ & set(producers)) if (e := entry(p, producers[p])) is not None}
    return {p: e for p, e in told.items() if not (isinstance(e, list) and None in e)}


__all__ = ["Seen", "calls_named", "collect", "collect_caches", "entry", "table"]
