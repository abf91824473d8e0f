"""The band of reserved memory: what its replays change, and how wide it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_from_trace import step

from staticmem.allocators.band import REPLAYS, JitteredSizes, ReservedBand, has_strays, interval, jitters, reserved_band
from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import process_of_trace
from staticmem.allocators.process import Workspace

MIB = 2**20


def test_the_band_has_the_prediction_in_it_and_is_the_same_each_time() -> None:
    found = process_of_trace(step())
    nominal = simulate(found.events)
    band = reserved_band(found, nominal=nominal)
    assert isinstance(band, ReservedBand)
    assert band == reserved_band(found)
    assert band.values[0] == nominal.peak_reserved
    assert len(band.values) == REPLAYS
    assert band.low <= band.expected <= band.high
    assert not band.tight
    assert reserved_band(found, capacity=nominal.peak_reserved - MIB).tight


def test_jitters_are_pairs_around_the_prediction() -> None:
    scales = [scale for scale, _ in jitters(11)]
    assert scales[0] == 1
    assert min(scales) == 0.96
    assert max(scales) == 1.04
    assert abs(sum(scales) - 11) < 1e-9


class Straying:
    """One workspace for each kernel with a result, which may be larger than it is said to be."""

    def __init__(self, strays: tuple[int, int] | None) -> None:
        self.strays = strays

    def taken(self) -> list[tuple[int, Sequence[Workspace]]]:
        return [(kernel, (Workspace(2 * MIB, strays=self.strays),)) for kernel in range(7)]


def test_strays_widen_the_band_and_leave_the_median() -> None:
    known, unknown = process_of_trace(step(), Straying(None)), process_of_trace(step(), Straying((0, 300 * MIB)))
    assert set(unknown.strays.values()) == {(0, 300 * MIB)}
    sure, unsure = reserved_band(known), reserved_band(unknown)
    assert unsure.expected == sure.expected
    assert unsure.values[: REPLAYS - 4] == sure.values[: REPLAYS - 4]
    assert unknown.bound(True) == [300 * MIB if id in unknown.strays else n for id, n in enumerate(unknown.sizes)]


def test_one_stray_in_eight_is_drawn_in_some_replays_and_none_in_the_others() -> None:
    found = process_of_trace(step(), Straying((0, 300 * MIB)))
    sizes = JitteredSizes(found)
    drawn = {draw: sizes.scaled(1.0, draw) != sizes.scaled(1.0) for draw in range(1, 400)}
    assert not any(drawn[draw] for draw in drawn if not has_strays(draw))
    with_strays = [drawn[draw] for draw in drawn if has_strays(draw)]
    kernels = len({found.origins[id].kernel for id in found.strays})
    assert sum(with_strays) / len(with_strays) == pytest.approx(1 - (7 / 8) ** kernels, abs=0.15)


def test_the_interval_is_that_of_one_more_draw() -> None:
    """Eleven draws: t of ten degrees of freedom, 1.812, by s = 45 ** 0.5 segments, by (12 / 11) ** 0.5."""
    values = [-10, 10, 10, -10, 0, 0, 0, 0, 0, 5, -5]
    assert interval([n * 2 * MIB for n in values]) == round(1.812 * 45**0.5 * (12 / 11) ** 0.5) * 2 * MIB
    assert interval([2 * MIB] * 11) == 0
    assert interval([2 * MIB]) == 0
