"""The band of reserved memory: what its replays change, and how wide it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_from_trace import step

from staticmem.allocators.band import JITTERS, WIDTH, JitteredSizes, Replays, jitters
from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import process_of_trace
from staticmem.allocators.peaks import outline
from staticmem.allocators.process import Process, Workspace
from staticmem.units import Band

MIB = 2**20


def _bands(process: Process) -> tuple[Band, Band]:
    return Replays(process, outline(process.calls, process.sizes)).bands()


def test_what_is_replayed_without_change_is_expected() -> None:
    found = process_of_trace(step())
    nominal = simulate(found.events)
    allocated, reserved = _bands(found)
    assert (allocated.expected, reserved.expected) == (nominal.peak_allocated, nominal.peak_reserved)
    assert allocated.low <= allocated.expected <= allocated.high
    assert reserved.low <= reserved.expected <= reserved.high
    assert _bands(found) == (allocated, reserved)


def test_the_large_pool_stands_for_whole_replays() -> None:
    """Of one step nothing is left out but the third repetition; small requests are as predicted."""
    found = process_of_trace(step())
    _, quick = _bands(found)
    _, whole = Replays(found, simulate(found.events)).bands()
    assert abs(quick.low - whole.low) <= 4 * MIB
    assert abs(quick.high - whole.high) <= 4 * MIB


def test_jitters_are_pairs_around_the_prediction() -> None:
    scales = [scale for scale, _ in jitters(JITTERS)]
    assert (min(scales), max(scales)) == (1 - WIDTH, 1 + WIDTH)
    assert abs(sum(scales) - JITTERS) < 1e-9
    assert [scale for scale, _ in jitters(2)] == [1 + WIDTH, 1 - WIDTH]


class Straying:
    """One workspace for each kernel with a result, which may be larger than it is said to be."""

    def __init__(self, strays: tuple[int, int] | None) -> None:
        self.strays = strays

    def taken(self) -> list[tuple[int, Sequence[Workspace]]]:
        return [(kernel, (Workspace(2 * MIB, strays=self.strays),)) for kernel in range(7)]


def test_strays_widen_the_band_and_leave_what_is_expected() -> None:
    known, unknown = process_of_trace(step(), Straying(None)), process_of_trace(step(), Straying((0, 300 * MIB)))
    assert set(unknown.strays.values()) == {(0, 300 * MIB)}
    (_, sure), (_, unsure) = _bands(known), _bands(unknown)
    assert unsure.expected == sure.expected
    assert unsure.high >= 300 * MIB > sure.high
    assert unknown.bound(True) == [300 * MIB if id in unknown.strays else n for id, n in enumerate(unknown.sizes)]


def test_one_stray_in_eight_is_drawn() -> None:
    found = process_of_trace(step(), Straying((0, 300 * MIB)))
    sizes = JitteredSizes(found)
    drawn = [sizes.scaled(1.0, draw) != sizes.scaled(1.0) for draw in range(1, 400)]
    kernels = len({found.origins[id].kernel for id in found.strays})
    assert sum(drawn) / len(drawn) == pytest.approx(1 - (7 / 8) ** kernels, abs=0.15)
