"""The quick replay is the full one without its record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from staticmem.allocators.band import WIDTH, Replays
from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.peaks import LargePool, Peaks, joined, large_ids, outline, reserve, serve
from staticmem.allocators.process import RELEASE, Event, Mark, Origins, Process
from staticmem.allocators.settings import Layout, ascending, descending, shuffled
from staticmem.allocators.stretches import Stretches

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


def peaks(calls: Sequence[int], sizes: Sequence[int], layout: Layout = ascending) -> Peaks:
    return serve(calls, sizes, layout).peaks


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


@given(processes(), st.lists(st.integers(0, 2), min_size=120, max_size=120))
@settings(max_examples=200, deadline=None)
def test_each_stream_has_pools_of_its_own(process: tuple[list[int], list[int]], drawn: list[int]) -> None:
    """As the whole replay has it. A stream cannot use what another one has free, so that each reserves what it would
    alone."""
    calls, sizes = process
    streams = {id: stream for id, stream in zip(range(len(sizes)), drawn, strict=False) if stream}
    asked = Process(tuple(calls), tuple(sizes), Origins([], [], [0], {}), (), (), {}, streams=streams)
    whole, quick = simulate(asked.events), outline(calls, sizes, streams)
    assert (quick.peak_allocated, quick.peak_reserved) == (whole.peak_allocated, whole.peak_reserved)
    alone = [[c for c in calls if streams.get(c if c >= 0 else ~c, 0) == stream] for stream in range(3)]
    assert quick.peak_reserved == sum(peaks(some, sizes).reserved for some in alone)


@given(processes())
@settings(max_examples=100, deadline=None)
def test_rounding_is_that_of_the_replay(process: tuple[list[int], list[int]]) -> None:
    calls, sizes = process
    found = outline(calls, sizes)
    alive = [id for id in calls[: found.peak_allocated_at + 1] if id >= 0]
    alive = [id for id in alive if ~id not in calls[: found.peak_allocated_at + 1]]
    assert found.peak_allocated - found.rounding == sum(-(-sizes[id] // 512) * 512 for id in alive)


@given(processes(), st.lists(st.integers(0, 240), max_size=12), LAYOUTS)
@example(([0, -1, 1, 2, 3, 4, -4, -5], [0, 0, 0, 1, 0]), [6], ascending)  # a stretch that releases alone
@settings(max_examples=200, deadline=None)
def test_stretches_are_those_of_the_replay(
    process: tuple[list[int], list[int]], drawn: list[int], layout: Layout
) -> None:
    calls, sizes = process
    stops = sorted({0, len(calls), *(stop for stop in drawn if stop < len(calls))})
    asked = Process(tuple(calls), tuple(sizes), Origins([], [], [0], {}), (), (), {})
    whole = Stretches.of(simulate(asked.events, layout=layout), stops)
    assert Stretches.serve(asked, stops, layout=layout) == whole
    for start, end in pairwise(stops):
        allocated, reserved = whole.at_stop(start)
        most = whole.peaks[stops.index(start)]
        assert whole.between(start, end) == (max(allocated, most[0]), max(reserved, most[1]))
        assert whole.at_stop(end) <= whole.between(start, end)


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


def test_segments_are_numbered_in_order() -> None:
    """A layout that shuffles goes by the number: one number for all would put segments over each other."""
    asked: list[tuple[int, int, int]] = []

    def layout(number: int, offset: int, size: int) -> int:
        asked.append((number, offset, size))
        return ascending(number, offset, size)

    peaks([0, 1, 2], [12 * MIB, 14 * MIB, 1], layout)
    assert asked == [(0, 0, 12 * MIB), (1, 12 * MIB, 14 * MIB), (2, 26 * MIB, 2 * MIB)]


@pytest.mark.parametrize("layout", [ascending, descending, *(shuffled(seed) for seed in range(6))])
def test_of_equal_blocks_the_one_at_the_lower_address_is_taken(layout: Layout) -> None:
    """Segments of 12 and 14 MiB, each with a free rest of 6 MiB behind a live block. A request takes one of the rests;
    when the live blocks are gone, 14 MiB fit into the second segment only if that was the rest of the first."""
    calls = [0, 1, ~0, 2, ~1, 3, 4, ~2, ~3, 5]
    sizes = [size * MIB for size in (12, 14, 6, 8, 6, 14)]
    lower = layout(0, 0, sizes[0]) < layout(1, sizes[0], sizes[1])
    assert peaks(calls, sizes, layout) == full(calls, sizes, layout) == (26 * MIB, (26 if lower else 40) * MIB)


@given(processes(), LAYOUTS, st.lists(st.integers(0, 2), min_size=120, max_size=120))
@settings(max_examples=300, deadline=None)
def test_segments_alone_are_those_of_the_replay(
    process: tuple[list[int], list[int]], layout: Layout, drawn: list[int]
) -> None:
    calls, sizes = process
    streams = {id: stream for id, stream in enumerate(drawn[: len(sizes)]) if stream}
    blocks = [-(-size // 512) * 512 for size in sizes]
    events = [Event(c, sizes[c], streams.get(c, 0)) if c >= 0 else Event(~c, RELEASE) for c in calls]
    whole = simulate(events, layout=layout).peak_reserved
    for asked in (calls, joined(calls, len(sizes))):
        large, small = reserve(asked, blocks, layout, streams=streams)
        assert large + small == whole
        assert reserve(asked, blocks, layout, large, streams) == (large, small)
        assert not large or reserve(asked, blocks, layout, large - 1, streams)[0] > large - 1


# -- the outline, and the large pool alone ---------------------------------------------------------------------------


def made(calls: list[int], sizes: list[int], third: int, bounds: dict[int, tuple[int, int]] | None = None) -> Process:
    """A process whose third step begins with call `third`."""
    marks = (Mark(0, "setup", 0), Mark(1, "forward", 0), Mark(2, "forward", 0), Mark(3, "forward", third))
    origins = Origins([-1] * len(sizes), [0] * len(sizes), [0, 0], {})
    return Process(tuple(calls), tuple(sizes), origins, marks, (True,) * len(sizes), {}, bounds or {})


@given(processes())
@settings(max_examples=300, deadline=None)
def test_an_outline_says_when_and_how_large_the_peaks_are(process: tuple[list[int], list[int]]) -> None:
    calls, sizes = process
    found = outline(calls, sizes)
    replay = simulate([Event(call, sizes[call]) if call >= 0 else Event(~call, RELEASE) for call in calls])
    assert (found.peak_allocated, found.peak_reserved) == (replay.peak_allocated, replay.peak_reserved)
    assert (found.peak_allocated_at, found.peak_reserved_at) == (replay.peak_allocated_at, replay.peak_reserved_at)
    assert {place.id: place.size for place in replay.placements()} == {
        id: size for id, size in enumerate(found.blocks) if size
    }


@given(processes(), st.sampled_from([1.0, 1.04, 4.0]), st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_the_large_pool_with_the_small_one_as_predicted(
    process: tuple[list[int], list[int]], growth: float, share: float
) -> None:
    calls, sizes = process
    nominal = outline(calls, sizes)
    third = int(len(calls) * share)
    short, long = made(calls, sizes, third), made(calls, sizes, len(calls))
    pool = LargePool(short, nominal, large_ids(short, growth))
    kept = [sizes[id] for id in pool.ids]
    assert all(size > MIB / growth for size in kept)
    whole = LargePool(long, nominal, large_ids(long, growth))
    assert whole.peaks_and_rounding([sizes[id] for id in whole.ids])[0] == (
        nominal.peak_allocated,
        nominal.peak_reserved,
    )
    earlier = peaks(calls[:third], sizes)
    without = pool.peaks_and_rounding(kept)[0]
    assert earlier.allocated <= without.allocated <= nominal.peak_allocated
    assert earlier.reserved <= without.reserved <= nominal.peak_reserved


def test_a_workspace_that_may_be_large_is_in_the_large_pool() -> None:
    """As predicted the workspace of 0.5 MiB is in the small pool; at most it opens a segment of 12 MiB."""
    process = made([0, 1, ~1], [4 * MIB, MIB // 2], 3, {1: (0, 12 * MIB)})
    nominal = outline(process.calls, process.sizes)
    pool = LargePool(process, nominal, large_ids(process, 1 + WIDTH))
    assert pool.ids == (0, 1)
    assert nominal[::2][:2] == (4 * MIB + MIB // 2, 22 * MIB)
    assert pool.peaks_and_rounding([4 * MIB, 0])[0] == (4 * MIB, 22 * MIB)
    assert pool.peaks_and_rounding([4 * MIB, 12 * MIB])[0] == (16 * MIB, 22 * MIB)
    assert pool.peaks_and_rounding([4 * MIB, 18 * MIB])[0] == (22 * MIB, 40 * MIB)


def test_a_band_without_large_requests_is_what_is_predicted() -> None:
    process = made([0, 1, ~0, 2, 3], [4096, *[MIB * 3 // 4] * 3], 5)
    nominal = outline(process.calls, process.sizes)
    _, reserved = Replays(process, nominal).bands()
    assert reserved == (4 * MIB,) * 3


def test_allocated_memory_is_as_uncertain_as_the_rounding_of_blocks() -> None:
    """Of 4 x 1.5 MiB in a segment of 20 MiB the rest is split off each time: nothing is rounded. A block of 12 MiB that
    serves 11.5 MiB is given whole; of a batch that is a little smaller or larger the rest is another one."""
    split = made([0, 1, 2, 3], [3 * MIB // 2] * 4, 4)
    allocated, _ = Replays(split, outline(split.calls, split.sizes)).bands()
    assert allocated == (6 * MIB, 6 * MIB, 6 * MIB)
    whole = made([0, ~0, 1, 2], [12 * MIB, 23 * MIB // 2, 4 * MIB], 4)
    allocated, _ = Replays(whole, outline(whole.calls, whole.sizes)).bands()
    assert allocated.expected == 16 * MIB
    assert 15.5 * MIB <= allocated.low < 16 * MIB < allocated.high < 17 * MIB
