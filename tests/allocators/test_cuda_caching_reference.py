"""The replay against the plainest program that follows the same source: every address, size and failure."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import Reference, alloc, free
from test_cuda_caching_invariants import sequences

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.process import EMPTY_CACHE, RELEASE, Event
from staticmem.allocators.settings import BASE, Settings, parse_settings

MIB = 2**20
CONFIGURATIONS = st.sampled_from(
    [
        "",
        "max_split_size_mb:20",
        "max_split_size_mb:32,max_non_split_rounding_mb:24",
        "large_segment_size_mb:12",
        "roundup_power2_divisions:[1:2,4:8,>:4]",
        "per_process_memory_fraction:0.6",
        "garbage_collection_threshold:0.2,per_process_memory_fraction:0.9",
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.7,max_split_size_mb:20",
    ]
).map(parse_settings)
CAPACITIES = st.one_of(st.none(), st.sampled_from([60 * MIB, 110 * MIB, 200 * MIB, 500 * MIB]))


@st.composite
def emptied(draw: st.DrawFn) -> list[Event]:
    """With `torch.cuda.empty_cache()` now and then."""
    events = draw(sequences())
    for at in sorted(draw(st.sets(st.integers(0, max(len(events), 1)), max_size=2)), reverse=True):
        events.insert(at, Event(-1, EMPTY_CACHE))
    return events


@given(emptied(), CONFIGURATIONS, CAPACITIES)
@settings(max_examples=300, deadline=None)
@example(  # garbage collection in two rounds: of what is free, the older half goes first, then the rest
    [
        *(alloc(id, size * MIB) for id, size in enumerate((30, 32, 34, 36))),
        *(event for id in range(4) for event in (free(id), alloc(10 + id, 1), free(10 + id), alloc(20 + id, 2 * MIB))),
        alloc(30, 90 * MIB),
    ],
    parse_settings("garbage_collection_threshold:0.2,per_process_memory_fraction:0.9"),
    500 * MIB,
)
@example(  # oversize blocks go back together, the largest first, until there is room
    [
        *(alloc(id, size * MIB) for id, size in enumerate((22, 24, 40, 26))),
        *(free(id) for id in (0, 1, 3)),
        alloc(4, 50 * MIB),
    ],
    parse_settings("max_split_size_mb:20"),
    116 * MIB,
)
def test_the_replay_does_what_the_source_says(events: Sequence[Event], conf: Settings, capacity: int | None) -> None:
    replay = simulate(events, conf, capacity)
    plain = Reference(conf, capacity, BASE).run(events)
    assert list(zip(replay.allocated.tolist(), replay.reserved.tolist(), strict=True)) == plain.served
    assert {p.id: (p.address, p.size) for p in replay.placements()} == plain.places
    assert (None if replay.oom is None else replay.oom.id) == plain.failed
    assert replay.retries == plain.retries
    if replay.oom is not None:
        assert replay.oom.reserved == plain.reserved
        assert replay.oom.largest_cached == max((f[0] for s in plain.segments for f in s.free()), default=0)
    sizes = {p.id: p.requested for p in replay.placements()}
    assert sizes == {e.id: e.nbytes for e in events[: len(replay)] if e.nbytes not in (RELEASE, EMPTY_CACHE, 0)}
