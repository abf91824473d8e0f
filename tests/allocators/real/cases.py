"""Sequences of allocations to run through PyTorch's allocator: random ones, made to reach every rule.

Sizes are of the scale of a network's: many small ones, some around the limits of the pools, few large ones. Deaths are
mixed: most allocations die young, some live on. The seed of a case is its place in the list.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 2**20
TOTAL = 16 * 2**30

GRAPHS = 0  # streams of a case: the default stream, and the pool of CUDA graphs

# name, settings, capacity in MiB (None: as much as asked), streams, events
VARIANTS: list[tuple[str, str, int | None, int, int]] = [
    ("plain", "", None, 1, 1500),
    ("streams", "", None, 3, 1500),
    ("full", "", 700, 1, 1500),
    ("full-streams", "", 900, 2, 1500),
    ("tiny-device", "", 240, 1, 1500),
    ("max-split", "max_split_size_mb:32", None, 1, 1500),
    ("max-split-full", "max_split_size_mb:32", 800, 1, 1500),
    ("max-split-rounding-full", "max_split_size_mb:64,max_non_split_rounding_mb:40", 800, 2, 1500),
    ("roundup", "roundup_power2_divisions:4", None, 1, 800),
    ("roundup-list", "roundup_power2_divisions:[1:2,4:4,16:8,>:1]", None, 1, 800),
    ("large-segments", "large_segment_size_mb:64", None, 1, 800),
    ("expandable", "expandable_segments:True", None, 1, 1500),
    ("expandable-streams", "expandable_segments:True", None, 3, 1500),
    ("expandable-full", "expandable_segments:True", 600, 2, 1500),
    ("expandable-pages", "expandable_segments:True,large_segment_size_mb:12", 700, 1, 1500),
    ("fraction", "per_process_memory_fraction:0.04", None, 1, 1500),
    ("collect", "garbage_collection_threshold:0.6,per_process_memory_fraction:0.08", None, 1, 2500),
    ("collect-streams", "garbage_collection_threshold:0.3,per_process_memory_fraction:0.06", None, 2, 2500),
    ("graphs", "", None, GRAPHS, 1500),
    ("graphs-full", "", 800, GRAPHS, 1500),
    ("graphs-expandable", "expandable_segments:True", None, GRAPHS, 1500),
    ("graphs-expandable-full", "expandable_segments:True", 800, GRAPHS, 1500),
    ("graphs-max-split-full", "max_split_size_mb:32", 900, GRAPHS, 1500),
    ("graphs-collect", "garbage_collection_threshold:0.3,per_process_memory_fraction:0.08", None, GRAPHS, 2500),
]


def size(rng: random.Random) -> int:
    """Bytes of one allocation; a few are exactly at a limit, or one byte beside it."""
    kind = rng.random()
    if kind < 0.4:
        return rng.randint(1, 64 * 1024)
    if kind < 0.6:
        return rng.randint(64 * 1024, MIB)
    if kind < 0.75:
        return rng.randint(MIB, 10 * MIB)
    if kind < 0.9:
        return rng.choice((1, 2, 4, 8, 16, 24, 48)) * MIB  # the same few sizes again and again, as layers have
    if kind < 0.95:
        return rng.choice((512, MIB, 10 * MIB, 20 * MIB, 32 * MIB, 64 * MIB)) + rng.choice((-1, 0, 1))
    return rng.randint(10 * MIB, 90 * MIB)


def sequence(seed: int, count: int, streams: int, capacity: int | None) -> list[list[int]]:
    rng = random.Random(seed)
    events: list[list[int]] = []
    live: dict[int, int] = {}
    target = rng.randint(30, 120)
    budget = (capacity or 900) * MIB * 0.72  # fragmentation does the rest
    for key in range(count):
        nbytes = size(rng)
        while live and (len(live) > target or sum(live.values()) + nbytes > budget):
            young = rng.random() < 0.7
            dead = rng.choice(list(live)[-12:] if young else list(live))
            del live[dead]
            events.append([dead, -1, 0])
        live[key] = nbytes
        events.append([key, nbytes, rng.randrange(streams) if streams else rng.choice((0, -1))])
        if rng.random() < 0.004:  # the end of a step: nearly everything goes
            for dead in [other for other in live if rng.random() < 0.9]:
                del live[dead]
                events.append([dead, -1, 0])
    return events


def cases() -> Iterator[dict[str, Any]]:
    for seed, (name, settings, capacity, streams, count) in enumerate(VARIANTS):
        yield {
            "name": name,
            "settings": settings,
            "capacity": TOTAL if capacity is None else capacity * MIB,
            "total": TOTAL,
            "fallbacks": {},
            "events": sequence(seed, count, streams, capacity),
        }
    yield from extra()


def extra() -> Iterator[dict[str, Any]]:
    """Cases that lie beside this file as JSON, as `models.py` writes them."""
    for path in sorted(Path(__file__).parent.glob("case-*.json")):
        yield json.loads(path.read_text())
