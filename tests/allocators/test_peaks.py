"""The quick replay is the full one without its record."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmem.allocators import Event, simulate
from staticmem.allocators.driver import Layout, ascending, descending, shuffled
from staticmem.allocators.events import RELEASE
from staticmem.allocators.peaks import joined, peaks

MIB = 2**20
SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 2 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 10 * MIB - 1, 20 * MIB, 33 * MIB]),
    st.integers(MIB, 64 * MIB),
)
LAYOUTS = st.sampled_from([ascending, descending, shuffled(1), shuffled(5)])


@st.composite
def processes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Calls and sizes: each allocation is released at once, 1 to 15 allocations later, or never."""
    steps = draw(st.lists(st.tuples(SIZES, st.integers(0, 19)), max_size=120))
    calls: list[int] = []
    ends: dict[int, list[int]] = {}
    for id, (_, lifetime) in enumerate(steps):
        calls.append(id)
        if lifetime < 16:
            ends.setdefault(id + lifetime, []).append(id)
        calls += [~gone for gone in ends.get(id, ())]
    return calls, [size for size, _ in steps]


def full(calls: Sequence[int], sizes: Sequence[int], layout: Layout) -> tuple[int, int]:
    events = [Event(call, sizes[call]) if call >= 0 else Event(~call, RELEASE) for call in calls]
    replay = simulate(events, layout=layout)
    return replay.peak_allocated, replay.peak_reserved


@given(processes(), LAYOUTS)
@settings(max_examples=300, deadline=None)
def test_peaks_are_those_of_the_replay(process: tuple[list[int], list[int]], layout: Layout) -> None:
    calls, sizes = process
    assert peaks(calls, sizes, layout) == full(calls, sizes, layout)
    assert peaks(joined(calls, len(sizes)), sizes, layout) == full(calls, sizes, layout)


def test_what_is_released_at_once_is_one_call() -> None:
    assert joined([0, 1, ~1, 2, ~0, ~2, 3, ~3], 4) == [0, 5, 2, ~0, ~2, 7]


@pytest.mark.parametrize(
    ("calls", "sizes", "expected"),
    [
        ([0, ~0], [1], (512, 2 * MIB)),
        ([0, ~0, 1], [9 * MIB, 11 * MIB], (11 * MIB, 20 * MIB)),  # a segment of 20 MiB, split off and merged again
        ([0, ~0, 1], [12 * MIB, 11 * MIB + 1], (12 * MIB, 12 * MIB)),  # less than 1 MiB is not split off
        ([0], [0], (0, 0)),
    ],
)
def test_by_hand(calls: list[int], sizes: list[int], expected: tuple[int, int]) -> None:
    assert peaks(calls, sizes) == expected
    assert peaks(joined(calls, len(sizes)), sizes) == expected
