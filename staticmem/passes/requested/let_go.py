"""Values that the model's code lets go of after their last use: `del conv5`, `conv5 = None`, an item that is popped.

A recording says which values the code holds and does not read again, and all that holds each (`Recorded.unused`). A
value ends once all of these let go; the base of views, which nothing else holds, ends with the views.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress

from staticmem.errors import UsageError, closest
from staticmem.ir.graph import Graph, Holder, Note, Recorded
from staticmem.scenario.edits import OF_LOOP

ALL = "all"  # every variable


def key_of(holder: Holder) -> str:
    """`conv5@model.py:41`: what asks for a holder to let go. Items of a container are one."""
    return f"{holder[0]}@{holder[2].file}:{holder[2].line}"


def _is_asked(holder: Holder, asked: Collection[str]) -> bool:
    return not {ALL, holder[0], key_of(holder)}.isdisjoint(asked)


def unused_values(graph: Graph) -> Mapping[str, tuple[str, tuple[Holder, ...]]]:
    """`Recorded.unused` without what a module has from the call before, and what it keeps for the next to read."""
    recorded = graph.recorded
    if recorded is None:
        return {}
    before = [value.name for value, _ in recorded.kept]
    needed = {*before, *recorded.lasting}
    if len(before) == len(recorded.lasting):  # else calls differ
        read = {*graph.outputs, *(name for op in graph.ops for name in op.refs())}
        needed -= {name for name, then in zip(recorded.lasting, before, strict=True) if then not in read}
    return {name: row for name, row in recorded.unused.items() if name not in needed}


def let_go(graph: Graph, asked: Sequence[str]) -> tuple[Graph, Sequence[Note]]:
    """The graph whose values end after their last use that these variables hold.

    Raises:
        UsageError: the file does not say what its variables hold, or has no such variable (SM287).
    """
    asked = [name for name in asked if name not in OF_LOOP]  # the step has these
    if not asked:
        return graph, ()
    recorded, unused = graph.recorded, unused_values(graph)
    if recorded is None:
        what, why = "--let-go needs a recording of the code", "A graph alone does not say which variables there are."
        instead = f"Export the model with 'staticmem export', or name {' or '.join(OF_LOOP)} of the training loop."
        raise UsageError(what, why, instead, "SM287")
    other = recorded.other_call  # of code whose calls differ
    rows = [*unused.values(), *(unused_values(other).values() if other is not None else ())]
    holders = {holder for _, row in rows for holder in row}
    for name in asked:
        if name != ALL and not any(_is_asked(holder, (name,)) for holder in holders):
            what = f"no variable '{name}' holds a tensor after its last use"
            why = "The code lets go of it by itself, reads it again, or has no such variable."
            hint = closest(name, {*OF_LOOP, *(text for holder in holders for text in (holder[0], key_of(holder)))})
            raise UsageError(what, why, hint or "'staticmem levers' lists the variables that pay.", "SM287")
    gone = {name for name, (_, row) in unused.items() if all(_is_asked(holder, asked) for holder in row)}
    at = {"": -1, **{op.name: index for index, op in enumerate(graph.ops)}}
    return replace(graph, recorded=_ended(recorded, {name: at[unused[name][0]] for name in gone})), ()


def _ended(recorded: Recorded, ends: Mapping[str, int]) -> Recorded:
    """With these ends of values. What a module does not keep after its call is not there when the next begins."""
    kept, lasting = recorded.kept, recorded.lasting
    if len(kept) == len(lasting):
        bases = {base for (_, base), name in zip(kept, lasting, strict=True) if name not in ends}
        stays = [name not in ends or value.name in bases for (value, _), name in zip(kept, lasting, strict=True)]
        kept, lasting = tuple(compress(kept, stays)), tuple(compress(lasting, stays))
    return replace(recorded, last_held={**recorded.last_held, **ends}, kept=kept, lasting=lasting)
