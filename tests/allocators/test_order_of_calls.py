"""The calls of a step come in PyTorch's order, recorded on a stub of CUDA by `real/orders.py`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import pytest

from staticmem.allocators.from_trace import process_of_trace
from staticmem.studies import Request, Study
from staticmem.units import round_up

ROOT = Path(__file__).parents[2]
ORDERS = ROOT / "tests" / "data" / "allocator" / "orders.gz"
BLOCK = 512  # bytes of which a block is a multiple


def in_order(calls: Iterable[int]) -> list[int]:
    """Calls by the bytes of their blocks. Releases that follow on one another may come in any order: the blocks that
    are free behind them are the same."""
    blocks = [round_up(size, BLOCK) if size > 0 else -round_up(-size, BLOCK) for size in calls if size]
    return [size for is_release, run in groupby(blocks, lambda size: size < 0) for size in _sorted(run, is_release)]


def _sorted(run: Iterable[int], is_release: bool) -> list[int]:
    return sorted(run) if is_release else list(run)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "resnet50"])
def test_a_step_asks_in_pytorchs_order(name: str) -> None:
    recorded = json.loads(gzip.decompress(ORDERS.read_bytes()))[name]
    study = Study.open(str(ROOT / "models" / f"{name}.pt2"), Request(batch=4, resolution=(64, 64), optimizer="sgd"))
    process = process_of_trace(study.result.trace, steps=3)
    starts = [mark.event for mark in process.marks if mark.phase == "forward" and mark.step in (2, 3)]
    calls = [process.sizes[call] if call >= 0 else -process.sizes[~call] for call in process.calls[slice(*starts)]]
    assert len(recorded) > 300
    assert in_order(calls) == in_order(recorded)
