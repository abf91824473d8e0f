"""Against PyTorch's own caching allocator: what libc10_cuda did with the same events, recorded by `real/record.py`.

Every address, both meters after every event, retries and the failing request are equal; nothing is compared loosely.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.process import Event, Fallbacks
from staticmem.allocators.result import Replay
from staticmem.allocators.settings import parse_settings

DATA = Path(__file__).parents[1] / "data" / "allocator"
RECORDED = sorted(path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz"))


def replayed(name: str) -> tuple[dict[str, Any], Replay]:
    case = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    events = [Event(*event) for event in case["events"]]
    fallbacks = {int(id): Fallbacks(tuple(sizes)) for id, sizes in case["fallbacks"].items()}
    settings = parse_settings(case["settings"])
    return case, simulate(events, settings, case["capacity"], total=case["total"], fallbacks=fallbacks)


def test_there_are_recordings_of_every_setting() -> None:
    settings = " ".join(replayed(name)[0]["settings"] for name in RECORDED)
    for option in ("expandable", "max_split", "roundup", "garbage", "fraction", "large_segment", "non_split"):
        assert option in settings


@pytest.mark.parametrize("name", RECORDED)
def test_the_replay_is_what_pytorch_did(name: str) -> None:
    case, replay = replayed(name)
    assert [p.address for p in replay.placements()] == case["addresses"]
    assert replay.allocated.tolist() == case["allocated"]
    assert replay.reserved.tolist() == case["reserved"]
    assert replay.retries == case["retries"]
    assert (replay.oom.time if replay.oom else None) == case["oom"]
    assert (replay.peak_allocated, replay.peak_reserved) == (case["peak_allocated"], case["peak_reserved"])


@pytest.mark.parametrize("name", RECORDED)
def test_the_segments_at_the_end_are_those_of_the_snapshot(name: str) -> None:
    case, replay = replayed(name)
    end = replay.oom.time if replay.oom is not None else len(replay) - 1
    found = [
        [s.address, s.size, s.stream, "small" if s.small else "large", s.expandable,
         [[b.address, b.size, b.requested, "active_allocated"] if b.id is not None else
          [b.address, b.size, 0, "inactive"] for b in s.blocks]]
        for s in replay.segments(end)
    ]  # fmt: skip
    for *_, blocks in case["segments"]:
        for block in blocks:  # a free block remembers the last request that it served
            block[2] = block[2] if block[3] != "inactive" else 0
    assert found == sorted(case["segments"])
