"""What holds for every sequence of events, every setting and every capacity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.process import GRAPH_POOL, RELEASE, Event
from staticmem.allocators.result import Replay
from staticmem.allocators.settings import (
    SMALL_SIZE,
    UNLIMITED,
    Settings,
    ascending,
    descending,
    parse_settings,
    shuffled,
)

MIB = 2**20
SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 2 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 10 * MIB - 1, 20 * MIB, 33 * MIB]),
    st.integers(MIB, 64 * MIB),
)
CONFIGURATIONS = st.sampled_from(
    [
        "",
        "max_split_size_mb:20",
        "roundup_power2_divisions:4",
        "expandable_segments:True",
        "garbage_collection_threshold:0.2,per_process_memory_fraction:0.9",
    ]
).map(parse_settings)
CAPACITIES = st.one_of(st.none(), st.sampled_from([80 * MIB, 200 * MIB, 500 * MIB]))


@st.composite
def sequences(draw: st.DrawFn) -> list[Event]:
    """Allocations, each with the place of its release: 0 to 9 allocations later, or never. Some are in the pool of CUDA
    graphs."""
    steps = draw(st.lists(st.tuples(SIZES, st.integers(0, 12), st.integers(GRAPH_POOL, 1)), max_size=60))
    events: list[Event] = []
    ends: dict[int, list[int]] = {}
    for id, (size, lifetime, stream) in enumerate(steps):
        events.append(Event(id, size, stream))
        if lifetime < 10:
            ends.setdefault(id + lifetime, []).append(id)
        events += [Event(gone, RELEASE) for gone in ends.get(id, ())]
    return events


def check_state(replay: Replay, time: int, expandable: bool) -> None:
    """The segments after one event: tiled by their blocks, no two free blocks side by side, sums as the meters say."""
    segments = replay.segments(time)
    assert sum(s.size for s in segments) == int(replay.reserved[time])
    assert sum(s.allocated for s in segments) == int(replay.allocated[time])
    for one, two in pairwise(segments):
        assert one.address + one.size <= two.address
    for segment in segments:
        at = segment.address
        for block in segment.blocks:
            assert block.address == at
            assert block.size > 0
            assert block.requested <= block.size
            at += block.size
        assert at == segment.address + segment.size
        assert not any(a.id is None and b.id is None for a, b in pairwise(segment.blocks))
        assert segment.expandable == expandable


@given(sequences(), CONFIGURATIONS, CAPACITIES)
@settings(max_examples=120, deadline=None)
def test_every_state_is_sound(events: Sequence[Event], conf: Settings, capacity: int | None) -> None:
    replay = simulate(events, conf, capacity)
    for time in range(len(replay)):
        check_state(replay, time, conf.expandable_segments)
    assert (replay.reserved >= replay.allocated).all()
    if len(replay):
        assert replay.peak_allocated == replay.allocated.max()
        assert replay.peak_reserved >= replay.reserved.max()
    if capacity is not None:
        assert replay.peak_reserved <= capacity
    else:
        assert replay.oom is None


@given(sequences())
@settings(max_examples=60, deadline=None)
def test_allocated_is_live_but_for_blocks_that_were_not_split(events: Sequence[Event]) -> None:
    """A block is larger than its rounded request only by what should_split leaves: up to 1 MiB in the large pool."""
    replay = simulate(events)
    for placement in replay.placements():
        rest = placement.size - -(-placement.requested // 512) * 512
        assert 0 <= rest <= (MIB if placement.size > SMALL_SIZE else 0)


@given(sequences())
@settings(max_examples=60, deadline=None)
def test_reuse_before_growth(events: Sequence[Event]) -> None:
    """A segment is opened only where no free block of the pool and stream is large enough."""
    replay = simulate(events)
    born = {p.born: p for p in replay.placements()}
    for event in replay.segment_events:
        if event.time == 0:
            continue
        placement = born[event.time]
        size = -(-placement.requested // 512) * 512
        for segment in replay.segments(event.time - 1):
            if (segment.stream, segment.small) == (placement.stream, size <= SMALL_SIZE):
                assert all(block.size < size for block in segment.blocks if block.id is None)


@given(sequences(), CONFIGURATIONS, CAPACITIES)
@settings(max_examples=40, deadline=None)
def test_the_same_events_give_the_same_replay(events: Sequence[Event], conf: Settings, capacity: int | None) -> None:
    one, two = (simulate(events, conf, capacity) for _ in range(2))
    assert one == two


@given(sequences())
@settings(max_examples=40, deadline=None)
def test_a_full_device_never_changes_what_is_allocated(events: Sequence[Event]) -> None:
    """Where nothing fails, a capacity changes segments, and blocks only by what is not split off them."""
    free, full = simulate(events), simulate(events, capacity=300 * MIB)
    if full.oom is None:
        live = sum(-(-p.requested // 512) * 512 for p in full.placements() if p.alive(len(full) - 1))
        assert int(full.allocated[-1] if len(full) else 0) >= live
        assert full.peak_reserved <= max(free.peak_reserved, 300 * MIB)


@pytest.mark.parametrize("layout", [ascending, descending, shuffled(1), shuffled(2)])
def test_layouts_only_move_segments(layout: object) -> None:
    events = [Event(id, (id * 7919) % (3 * MIB) + 1) for id in range(200)]
    events += [Event(id, RELEASE) for id in range(0, 200, 3)]
    nominal = simulate(events)
    moved = simulate(events, layout=layout)  # type: ignore[arg-type]
    assert moved.reserved.tolist() == nominal.reserved.tolist()
    check_state(moved, len(moved) - 1, expandable=False)


@settings(max_examples=60, deadline=None)
@given(sequences(), CONFIGURATIONS, CAPACITIES)
def test_the_pool_of_cuda_graphs_gives_nothing_back(
    events: list[Event], configuration: Settings, capacity: int | None
) -> None:
    """But where max_split_size lets a request for the pool itself give back one of its own oversize segments."""
    replay = simulate(events, configuration, capacity)
    pool = [event for event in replay.segment_events if event.stream == GRAPH_POOL]
    if configuration.max_split_size == UNLIMITED:
        assert all(event.change > 0 for event in pool)
    for placement in replay.placements():
        inside = [e for e in pool if e.address <= placement.address < e.address + e.size]
        assert bool(inside) == (placement.stream == GRAPH_POOL)


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_pools_add_up(events: list[Event]) -> None:
    """With as much memory as is asked for, neither knows of the other."""
    private = {e.id for e in events if e.stream == GRAPH_POOL}
    both = simulate(events)
    parts = [simulate([e for e in events if (e.id in private) is wanted]) for wanted in (True, False)]
    assert (both.reserved.tolist() or [0])[-1] == sum((part.reserved.tolist() or [0])[-1] for part in parts)
    assert (both.allocated.tolist() or [0])[-1] == sum((part.allocated.tolist() or [0])[-1] for part in parts)
