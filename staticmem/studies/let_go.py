"""Which variables are worth letting go of: what lives on after its last use because the code still names it.

A recording says what holds each such value. What holds the same values is let go of together, and the step is run again
without them: a peak that moves elsewhere, or does not move, is seen. The training loop's own variables are among them:
the outputs, the batch, and the loss with its graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from staticmem.eager.reasons import Reason
from staticmem.engine.shapes import value_infos
from staticmem.ir.graph import Graph, Holder, SourceLine
from staticmem.liveness.intervals import added_by_held_outputs
from staticmem.passes.requested.let_go import key_of, unused_values
from staticmem.report.model import LetGo
from staticmem.report.sweep import SAME
from staticmem.scenario.edits import BATCH_OF_LOOP, LOSS_OF_LOOP
from staticmem.scenario.request import as_flags
from staticmem.scenario.step import DROPPED, HELD
from staticmem.studies.study import Study
from staticmem.studies.trials import Lever

MOST = 8  # groups of variables that are tried, those with the most bytes
LEAST = 1000  # of the peak, one part of so many: what saves less is not told
LEAST_OF_OUTPUTS = 100  # the same of held outputs: less of them is in a note of the report, with its flag (SM337)
LIMIT = 100_000  # ops over all steps that are run for them; a step of an op takes about 0.1 ms

_OUTPUTS = "--outputs dropped"  # asks for that in place of a variable
_TOO = "outputs after backward"  # which have the loss's graph: both are let go of for one to end
_LOOP = SourceLine("", 0, "", "")  # any, of the training loop


def worth_letting_go(study: Study) -> tuple[LetGo, ...]:
    """What `letting_go` says with the peaks, those that save most first."""
    before, levers = study.lifetimes.peak_bytes, letting_go(study)
    rows = [LetGo(one.does, as_flags(one.options), peak, before - peak, one.note) for one, peak in levers]
    return tuple(sorted(rows, key=lambda row: (row.live_bytes, row.does)))


def _of_loop(study: Study) -> Iterator[dict[str, Holder]]:
    """Variables of the loop that alone have a part of the peak: logits of a classifier are less than a thousandth of
    most."""
    request, scenario, lifetimes = study.request, study.scenario, study.lifetimes
    held, is_training = scenario.outputs == HELD, scenario.training
    least = lifetimes.peak_bytes // LEAST
    if held and added_by_held_outputs(lifetimes) > lifetimes.peak_bytes // LEAST_OF_OUTPUTS:
        yield {_OUTPUTS: ("outputs", "backward" if is_training else "call", _LOOP)}
    if not is_training or request.compile or request.communicators:
        return
    buffers, sizes = lifetimes.trace.buffers, lifetimes.sizes
    of_batch = of_loss = 0  # bytes that nothing else has
    for buffer, holds in lifetimes.holds(lifetimes.peak_tick).items():
        kinds = {hold.kind if hold.who != "loss" else Reason.AUTOGRAD for hold in holds}
        of_batch += sizes[buffer] * (kinds == {Reason.MODEL} and buffers.categories[buffer] == "input")
        of_loss += sizes[buffer] * (kinds == {Reason.AUTOGRAD})
    if of_batch > least and not request.input_grad:
        names = [name for name, category in zip(buffers.names, buffers.categories, strict=True) if category == "input"]
        yield {BATCH_OF_LOOP: (", ".join(dict.fromkeys(names)), "backward", _LOOP)}
    if of_loss > least:
        yield {LOSS_OF_LOOP: ("loss", "after", _LOOP), **({_TOO: ("outputs", "after", _LOOP)} if held else {})}


def letting_go(study: Study) -> Iterator[tuple[Lever, int]]:
    """Changes of the code that let go of a variable, each of which makes the peak smaller, and that peak."""
    request = study.request
    groups, note = [*_of_loop(study)], ""
    if not request.compile and study.graph.recorded is not None:
        of_code = _groups(study.result.graph, study.scenario.training)
        most = min(MOST, max(1, LIMIT // (2 * max(len(study.graph.ops), 1))))
        note = f"the largest {most} of {len(of_code)} were tried" if len(of_code) > most else ""
        groups += of_code[:most]

    def options(some: Iterable[Mapping[str, Holder]]) -> dict[str, Any]:
        asked = {key for group in some for key in group}
        of_code = asked - {_OUTPUTS, _TOO}
        go = {"let_go": (*request.let_go, *sorted(of_code.difference(request.let_go)))} if of_code else {}
        return {**go, "outputs": DROPPED} if _OUTPUTS in asked else go

    def peak_without(some: Iterable[Mapping[str, Holder]]) -> int:
        return study.ask(replace(request, gpu=None, **options(some))).lifetimes.peak_bytes

    before = study.lifetimes.peak_bytes - study.lifetimes.peak_bytes // LEAST
    least = peak_without(groups) if groups else before
    if least >= before:  # fewer cannot do what all do not
        return
    alone = [peak_without([group]) for group in groups]
    needed = groups
    for group in reversed(groups):
        fewer = [one for one in needed if one is not group]
        if fewer and peak_without(fewer) == least:
            needed = fewer
    together = [(needed, least)] if len(needed) > 1 and least < min(alone) else []
    for some, peak in (*together, *(([group], peak) for group, peak in zip(groups, alone, strict=True))):
        if peak >= before:
            continue
        holders = {key: holder for group in some for key, holder in group.items()}
        if _OUTPUTS in holders:
            holders.pop(_TOO, None)
        yield Lever(_does(holders.values()), options(some), SAME, note), peak


def _groups(graph: Graph, training: bool) -> list[dict[str, Holder]]:
    """What has to let go together, by what asks for it: that of the most bytes first."""
    infos = value_infos(graph, training)
    holders: dict[int, dict[str, Holder]] = {}
    sizes: dict[int, int] = {}
    for name, (_, row) in unused_values(graph).items():
        if name in infos:
            storage = infos[name].storage
            holders.setdefault(storage, {}).update({key_of(holder): holder for holder in row})
            sizes[storage] = max(sizes.get(storage, 0), infos[name].nbytes)
    groups: dict[tuple[str, ...], int] = {}
    for storage, named in holders.items():
        groups[tuple(sorted(named))] = groups.get(tuple(sorted(named)), 0) + sizes[storage]
    groups.pop((), None)
    by_key = {key: holder for named in holders.values() for key, holder in named.items()}
    return [{key: by_key[key] for key in keys} for keys in sorted(groups, key=lambda keys: (-groups[keys], keys))]


_TEXTS = {
    "del": "del {} after line {} of {}",
    "None": "{} = None after line {} of {}",
    "before": "{} = None before line {} of {}",
    "item": "let go of items of {} in line {} of {} (pop)",
    "attribute": "do not keep {}, which line {} of {} assigns",
    "backward": "del {} before backward()",
    "after": "del {} after backward()",
    "call": "del {} before the next call",
}


def _does(holders: Collection[Holder]) -> str:
    """The lines to write; variables of one line share it."""
    places: dict[tuple[str, int, str], dict[str, None]] = {}
    for name, how, line in sorted(holders, key=lambda holder: (holder[2].file, holder[2].line, holder[0])):
        places.setdefault((line.file, line.line, how), {})[name] = None
    parts = []
    for (file, number, how), named in places.items():
        joined = (" = " if how in ("None", "before") else ", ").join(named)
        parts.append(_TEXTS[how].format(joined, number, file))
    return "; ".join(parts)
