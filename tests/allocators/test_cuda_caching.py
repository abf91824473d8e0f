"""The documented rules, one case each. References are to c10/cuda/CUDACachingAllocator.cpp of pytorch."""

from __future__ import annotations

import pytest
from reference import alloc, free

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.process import Event, Fallbacks
from staticmem.allocators.settings import Settings, parse_settings

MIB = 2**20
KIB = 2**10


def reserved(*sizes: int, settings: Settings | None = None) -> int:
    events = [alloc(id, size) for id, size in enumerate(sizes)]
    return simulate(events, settings or Settings()).peak_reserved


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1,), 2 * MIB),  # get_allocation_size: kSmallBuffer
        ((MIB,), 2 * MIB),  # kSmallSize is small
        ((MIB, MIB), 2 * MIB),  # two in one segment
        ((MIB, MIB, 1), 4 * MIB),
        ((MIB + 1,), 20 * MIB),  # kLargeBuffer
        ((10 * MIB - 512,), 20 * MIB),  # below kMinLargeAlloc
        ((10 * MIB,), 10 * MIB),  # from there on a segment of its own
        ((10 * MIB + 1,), 12 * MIB),  # kRoundLarge
        ((8 * MIB, 8 * MIB), 20 * MIB),  # two cuBLAS workspaces share a segment
        ((8 * MIB, 8 * MIB, 8 * MIB), 40 * MIB),
    ],
)
def test_segments(sizes: tuple[int, ...], expected: int) -> None:
    assert reserved(*sizes) == expected


def test_sizes_are_rounded_to_512_bytes() -> None:
    replay = simulate([alloc(0, 1), alloc(1, 513), alloc(2, 1024)])
    assert [p.size for p in replay.placements()] == [512, 1024, 1024]
    assert replay.peak_allocated == 2560


def test_nothing_is_allocated_for_an_empty_tensor() -> None:
    replay = simulate([alloc(0, 0), free(0)])
    assert (replay.peak_allocated, replay.peak_reserved) == (0, 0)


def test_large_blocks_split_only_where_more_than_1_mib_remains() -> None:
    """should_split: remaining > kSmallSize. Else the whole block is handed out, and counts as allocated."""
    events = [alloc(0, 20 * MIB), free(0), alloc(1, 19 * MIB)]
    assert simulate(events).allocated.tolist() == [20 * MIB, 0, 20 * MIB]
    events = [alloc(0, 20 * MIB), free(0), alloc(1, 19 * MIB - 512)]
    assert simulate(events).allocated.tolist() == [20 * MIB, 0, 19 * MIB - 512]


def test_small_blocks_split_where_512_bytes_remain() -> None:
    replay = simulate([alloc(0, MIB - 512), alloc(1, MIB + 512 - 512)])
    assert replay.peak_allocated == 2 * MIB - 512


def test_best_fit_takes_the_smallest_block_then_the_lowest_address() -> None:
    """BlockComparatorSize: by size, then by address."""
    sizes = [30 * MIB, 20 * MIB, 20 * MIB, 40 * MIB]
    events = [alloc(id, size) for id, size in enumerate(sizes)] + [free(id) for id in (3, 2, 1, 0)]
    events += [alloc(10, 20 * MIB), alloc(11, 20 * MIB), alloc(12, 19 * MIB + 512)]
    placed = {p.id: p.address for p in simulate(events).placements()}
    assert (placed[10], placed[11], placed[12]) == (placed[1], placed[2], placed[0])


def test_a_free_block_merges_with_both_neighbours() -> None:
    events = [alloc(id, 256 * KIB) for id in range(8)] + [free(2), free(4), free(3), alloc(9, 768 * KIB)]
    replay = simulate(events)
    placed = {p.id: p.address for p in replay.placements()}
    assert placed[9] == placed[2]
    assert replay.peak_reserved == 2 * MIB


def test_streams_share_nothing() -> None:
    events = [alloc(0, 30 * MIB, 0), free(0), alloc(1, 30 * MIB, 1)]
    assert simulate(events).peak_reserved == 60 * MIB


def test_pools_share_nothing() -> None:
    assert simulate([alloc(0, 30 * MIB), free(0), alloc(1, MIB)]).peak_reserved == 32 * MIB


# -- capacity ------------------------------------------------------------------------------------------------------


def test_cached_segments_go_back_before_an_allocation_fails() -> None:
    """malloc: alloc_block, then release_cached_blocks, then alloc_block again."""
    events = [alloc(0, 60 * MIB), free(0), alloc(1, 80 * MIB)]
    replay = simulate(events, capacity=100 * MIB)
    assert replay.oom is None
    assert replay.retries == 1
    assert replay.reserved.tolist() == [60 * MIB, 60 * MIB, 80 * MIB]
    assert [e.action for e in replay.segment_events] == ["segment_alloc", "segment_free", "segment_alloc"]


def test_a_segment_that_is_split_stays() -> None:
    events = [alloc(0, 60 * MIB), free(0), alloc(1, 2 * MIB), alloc(2, 80 * MIB)]
    replay = simulate(events, capacity=100 * MIB)
    assert replay.oom is not None
    assert (replay.oom.id, replay.oom.requested, replay.oom.segment) == (2, 80 * MIB, 80 * MIB)
    assert (replay.oom.reserved, replay.oom.free, replay.oom.largest_cached) == (60 * MIB, 40 * MIB, 58 * MIB)
    assert len(replay) == 3


def test_a_fallback_is_taken_where_a_request_does_not_fit() -> None:
    events = [alloc(0, 60 * MIB), alloc(1, 80 * MIB), alloc(2, MIB), free(1)]
    replay = simulate(events, capacity=100 * MIB, fallbacks={1: Fallbacks((50 * MIB, 30 * MIB))})
    assert replay.oom is None
    assert replay.fallbacks == ((1, 30 * MIB),)
    assert replay.peak_allocated == 91 * MIB
    without = simulate(events, capacity=100 * MIB, fallbacks={1: Fallbacks((0,))})
    assert without.peak_allocated == 61 * MIB


def test_requests_of_one_plan_keep_to_what_one_of_them_took() -> None:
    """PyTorch caches the plan that ran: the next step asks for its workspace, though the first would fit now."""
    events = [alloc(0, 60 * MIB), alloc(1, 80 * MIB), free(1), free(0), alloc(2, 80 * MIB), free(2), alloc(3, 80 * MIB)]
    sizes = (30 * MIB,)
    fallbacks = {1: Fallbacks(sizes, "a"), 2: Fallbacks(sizes, "a"), 3: Fallbacks(sizes, "b")}
    replay = simulate(events, capacity=100 * MIB, fallbacks=fallbacks)
    assert replay.fallbacks == ((1, 30 * MIB), (2, 30 * MIB))
    assert [place.requested for place in replay.placements()] == [60 * MIB, 30 * MIB, 30 * MIB, 80 * MIB]
    gone = {1: Fallbacks((0,), "a"), 2: Fallbacks((0,), "a")}
    assert simulate(events[:-1], capacity=100 * MIB, fallbacks=gone).fallbacks == ((1, 0), (2, 0))


def test_an_oversize_block_is_not_split_and_serves_no_small_request() -> None:
    """get_free_block, should_split with max_split_size."""
    settings = parse_settings("max_split_size_mb:32")
    events = [alloc(0, 64 * MIB), free(0), alloc(1, 20 * MIB), alloc(2, 50 * MIB)]
    replay = simulate(events, settings)
    assert replay.reserved.tolist() == [64 * MIB, 64 * MIB, 84 * MIB, 84 * MIB]
    assert replay.allocated.tolist()[-1] == 84 * MIB  # 14 MiB more than asked: less than max_non_split_rounding


def test_garbage_collection_gives_old_segments_back() -> None:
    """garbage_collect_cached_blocks: only with a memory fraction, above the threshold, oldest first."""
    events = [alloc(0, 40 * MIB), alloc(1, 44 * MIB), free(0), free(1), alloc(2, 60 * MIB)]
    settings = parse_settings("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9")
    assert simulate(events, settings, capacity=160 * MIB).peak_reserved == 84 * MIB
    settings = parse_settings("garbage_collection_threshold:0.5")
    assert simulate(events, settings, capacity=160 * MIB).peak_reserved == 144 * MIB


def test_expandable_segments_grow_by_pages_and_leave_no_gaps() -> None:
    settings = parse_settings("expandable_segments:True")
    replay = simulate([alloc(0, 30 * MIB), alloc(1, 30 * MIB)], settings)
    assert replay.peak_reserved == 60 * MIB
    assert [p.address - replay.segments()[0].address for p in replay.placements()] == [0, 30 * MIB]
    assert len(replay.segments()) == 1
    assert [e.size for e in replay.segment_events] == [40 * MIB, 20 * MIB]


def test_expandable_segments_and_a_tensor_larger_than_the_card() -> None:
    """The range of a segment is 9/8 of the card: a request above it runs out of memory, or has no end of memory."""
    settings, events = parse_settings("expandable_segments:True"), [alloc(0, 30 * MIB), alloc(1, 500 * MIB)]
    replay = simulate(events, settings, capacity=80 * MIB)
    assert replay.oom is not None
    assert replay.oom.id == 1
    assert simulate(events, settings, capacity=None, total=80 * MIB).peak_reserved == 540 * MIB
    whole = [alloc(0, 600 << 30)]
    assert simulate(whole, settings).peak_reserved == 600 << 30


def test_events_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="not alive"):
        simulate([free(0)])
    with pytest.raises(ValueError, match="which is alive"):
        simulate([alloc(0, 1), alloc(0, 1)])


def test_fragmentation_adds_up() -> None:
    events = [alloc(0, 1000), alloc(1, 5 * MIB), alloc(2, 30 * MIB), free(2), Event(3, 40 * MIB)]
    replay = simulate(events)
    f = replay.fragmentation()
    assert f.reserved == 2 * MIB + 20 * MIB + 30 * MIB + 40 * MIB
    assert f.releasable == 30 * MIB
    assert f.stuck == 2 * MIB - 1024 + 15 * MIB
    assert f.rounding == 24
    assert f.reserved == f.requested + f.rounding + f.releasable + f.stuck
    assert f.largest_free == 30 * MIB
