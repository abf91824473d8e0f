"""The arena and the memory pattern of the ONNX Runtime, with sizes that can be counted by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticmem.ort.memory.arena import ALIGNMENT, Arena, ArenaFullError, Chunk, PatternPlanner

MIB = 1 << 20


def test_first_region_is_one_mebibyte() -> None:
    arena = Arena()
    arena.allocate(1)
    assert (arena.held, arena.requested, arena.in_use) == (MIB, 1, 256)


def test_region_doubles_until_the_request_fits() -> None:
    arena = Arena()
    arena.allocate(3 * MIB)
    assert arena.held == 4 * MIB
    # 4 MiB is less than twice 3 MiB: the whole chunk is taken, and the next request needs a region
    assert arena.in_use == 4 * MIB
    arena.allocate(256)
    assert arena.held == 8 * MIB


def test_same_as_requested_grows_by_the_rounded_request() -> None:
    arena = Arena("kSameAsRequested")
    arena.allocate(1000)
    arena.allocate(1000)
    assert arena.held == 2048


def test_extension_stops_doubling_at_a_gibibyte() -> None:
    arena = Arena()
    for _ in range(14):
        arena.allocate(arena._next)
    assert max(arena.regions) == 1 << 30
    assert arena.regions[-2:] == [1 << 30, 1 << 30]


def test_freed_neighbours_join() -> None:
    arena = Arena()
    chunks = [arena.allocate(size) for size in (300 * 1024, 300 * 1024, 300 * 1024)]
    for chunk in chunks:
        arena.free(chunk)
    whole = arena.allocate(MIB)
    assert whole is not None
    assert whole.size == MIB
    assert arena.held == MIB


def test_reserved_memory_is_outside_the_regions() -> None:
    arena = Arena()
    arena.reserve(1000)
    assert (arena.held, arena.requested, arena.reserved) == (1000, 1000, 1000)
    arena.allocate(8)
    assert arena.held == MIB + 1000


def test_limit() -> None:
    arena = Arena(limit=2 * MIB)
    arena.allocate(MIB)
    with pytest.raises(ArenaFullError) as caught:
        arena.allocate(2 * MIB)
    assert (caught.value.needed, caught.value.left) == (2 * MIB, MIB)


@given(st.lists(st.tuples(st.integers(0, 3 << 20), st.booleans()), max_size=60))
def test_arena_keeps_its_books(calls: list[tuple[int, bool]]) -> None:
    arena = Arena()
    live: list[tuple[Chunk | None, int]] = []
    for size, free in calls:
        if free and live:
            arena.free(live.pop(size % len(live))[0])
        else:
            live.append((arena.allocate(size), size))
        assert arena.requested == sum(size for _, size in live)
        assert arena.in_use == sum(chunk.size for chunk, _ in live if chunk is not None)
        assert arena.requested <= arena.in_use <= arena.held == sum(arena.regions)
        places = sorted((c.address, c.size) for c, _ in live if c is not None)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
        assert all(n % ALIGNMENT == 0 for _, n in places)
    for chunk, _ in live:
        arena.free(chunk)
    assert (arena.in_use, arena.requested) == (0, 0)
    assert sum(size for size, _ in arena._free) == arena.held
    assert len(arena._free) == len(arena.regions)


def test_pattern_takes_the_best_gap() -> None:
    planner = PatternPlanner()
    for name, size in (("a", 512), ("b", 256), ("c", 1024), ("d", 256)):
        planner.allocate(name, size)
    planner.free("a")
    planner.free("c")
    planner.allocate("e", 512)  # fits the gap of a exactly, that of c with waste
    assert planner.offsets["e"] == 0
    planner.allocate("f", 768)
    assert planner.offsets["f"] == 768
    assert planner.peak == 2048


def test_pattern_uses_the_end_that_was_freed() -> None:
    planner = PatternPlanner()
    planner.allocate("a", 256)
    planner.allocate("b", 1024)
    planner.free("b")
    planner.allocate("c", 512)
    assert (planner.offsets["c"], planner.peak) == (256, 1280)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=40))
def test_pattern_never_overlaps(calls: list[tuple[int, bool]]) -> None:
    planner = PatternPlanner()
    live: dict[str, int] = {}
    for number, (size, free) in enumerate(calls):
        if free and live:
            name = sorted(live)[size % len(live)]
            planner.free(name)
            del live[name]
            continue
        planner.allocate(str(number), size * 256)
        live[str(number)] = size * 256
        places = sorted((planner.offsets[n], s) for n, s in live.items())
        assert all(a + s <= b for (a, s), (b, _) in itertools.pairwise(places))
        assert max(a + s for a, s in places) <= planner.peak
