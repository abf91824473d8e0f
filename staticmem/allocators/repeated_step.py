"""Steps of a loop that differ from an earlier one in ids and sizes alone: its calls are shifted, not worked out again.

A run of a thousand steps has few different ones. What a step asks for is given by its script, by what it finds on the
GPU, and by whether its batch has the sizes of the one before. Where these are as they were, it releases the same of
what the step before has left, and differs in ids and in the bytes of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from staticmem.allocators.from_trace import Builder, of_its_size
from staticmem.allocators.process import Mark

Key: TypeAlias = "tuple[str, str, str, int]"  # owner, category, name, and its number among buffers of that name
_BY_BUFFER = ("buffers", "kernels", "scales", "sources")  # lists of a builder, by id
_BY_ID = ("whats", "fallbacks", "bounds", "strays", "streams")  # its dictionaries, of some ids


class Conditions(NamedTuple):
    """What a step finds, without the ids that differ from step to step.

    `left`: buffers that the step before has left; `batch`: whether its batch stays, and how many tensors it has;
    `gradients`: those of the step before; `lasting`: ids of what lasts; `once`: how many workspaces are there to stay,
    and how many kernels were searched for.
    """

    left: tuple[int, ...]
    batch: tuple[bool, int]
    gradients: tuple[Key, ...]
    lasting: Mapping[Key, int]
    once: tuple[int, int]


class Handed(NamedTuple):
    """Ids that go from a step to the next: what is left by its buffers, the batch, and gradients."""

    left: dict[int, int]
    batch: list[int]
    gradients: dict[Key, int]

    @property
    def ids(self) -> list[int]:
        return [*self.left.values(), *self.batch, *self.gradients.values()]


@dataclass(frozen=True)
class Position:
    """How far a process is: its ids, calls, marks, and choices by size."""

    ids: int
    calls: int
    marks: int
    choices: int

    @classmethod
    def of(cls, builder: Builder) -> Position:
        return cls(len(builder.sizes), len(builder.calls), len(builder.marks), len(builder.by_size))


@dataclass(frozen=True)
class RepeatedStep:
    """A step that was worked out. An id of its own is written as its distance from the step's first; where it may also
    be one that the step before handed over, that is `~place` among those (`Handed.ids`)."""

    conditions: Conditions
    script: Sequence[Any]  # of the step, which tells it from others
    calls: list[int]
    handed_over: list[tuple[int, int]]  # which calls release what was handed, and its place
    columns: list[list[Any]]
    fixed: list[tuple[int, int]]  # ids that are no buffers, and their bytes
    facts: list[list[tuple[int, Any]]]
    marks: list[tuple[str, int]]
    choices: list[tuple[int, tuple[int, ...], list[int]]]  # by size, as `Builder.by_size` has them
    left: list[tuple[int, int]]
    batch: list[int]
    gradients: list[tuple[Key, int]]

    @classmethod
    def of(
        cls, builder: Builder, conditions: Conditions, start: Position, handed: Handed, after: Handed
    ) -> RepeatedStep | None:
        """The step that a builder has made since `start`; None where it differs from others by more than ids and sizes:
        it releases what lasts, or runs CUDA graphs."""
        if builder.private or builder.trace.cuda_graphs:
            return None
        places = {id: ~place for place, id in enumerate(handed.ids)}
        first, count = start.ids, len(builder.sizes)
        places.update({id: id - first for id in range(first, count)})
        calls: list[int] = []
        handed_over: list[tuple[int, int]] = []
        for call in builder.calls[start.calls :]:
            place = places.get(call if call >= 0 else ~call)
            if place is None or call in builder.empties:
                return None
            if place < 0:
                handed_over.append((len(calls), ~place))
            calls.append(place if call >= 0 else ~place)
        if any(id not in places for id in after.ids):
            return None
        nbytes, buffers = builder.trace.buffers.nbytes, builder.buffers[first:]
        own = list(zip(buffers, builder.sizes[first:], strict=True))
        if any(buffer >= 0 and nbytes[buffer] != size for buffer, size in own):
            return None
        return cls(
            conditions=conditions,
            script=builder.script,
            calls=calls,
            handed_over=handed_over,
            columns=[getattr(builder, name)[first:] for name in _BY_BUFFER],
            fixed=[(id, size) for id, (buffer, size) in enumerate(own) if buffer < 0],
            facts=[
                [(id - first, fact) for id, fact in getattr(builder, name).items() if id >= first] for name in _BY_ID
            ],
            marks=[(mark.phase, mark.event - start.calls) for mark in builder.marks[start.marks :]],
            choices=builder.by_size[start.choices :],
            left=[(buffer, places[id]) for buffer, id in after.left.items()],
            batch=[places[id] for id in after.batch],
            gradients=[(key, places[id]) for key, id in after.gradients.items()],
        )

    def is_that_of(self, builder: Builder, conditions: Conditions) -> bool:
        """Whether a step that finds this is this one with other ids and sizes."""
        trace = builder.trace
        return self.conditions == conditions and all(
            of_its_size(trace, buffer, others) == gone for buffer, others, gone in self.choices
        )

    def repeat(self, builder: Builder, step: int, handed: Handed) -> Handed:
        """Adds this step to a process as the `step`-th, with the sizes of `builder`; gives what it hands on."""
        first, began, ids = len(builder.sizes), len(builder.calls), handed.ids
        calls = [call + first if call >= 0 else call - first for call in self.calls]
        for at, place in self.handed_over:
            calls[at] = ~ids[place]
        nbytes = builder.trace.buffers.nbytes
        sizes = [nbytes[buffer] for buffer in self.columns[0]]
        for id, size in self.fixed:
            sizes[id] = size
        builder.starts.append(first)
        builder.calls += calls
        builder.sizes += sizes
        for name, column in zip(_BY_BUFFER, self.columns, strict=True):
            getattr(builder, name).extend(column)
        for name, facts in zip(_BY_ID, self.facts, strict=True):
            getattr(builder, name).update({first + id: fact for id, fact in facts})
        builder.by_size += self.choices
        builder.marks += [Mark(step, phase, began + at) for phase, at in self.marks]

        def resolved(places: Iterable[int]) -> list[int]:
            return [first + place if place >= 0 else ids[~place] for place in places]

        left = zip([buffer for buffer, _ in self.left], resolved(place for _, place in self.left), strict=True)
        gradients = zip([key for key, _ in self.gradients], resolved(place for _, place in self.gradients), strict=True)
        return Handed(dict(left), resolved(self.batch), dict(gradients))
