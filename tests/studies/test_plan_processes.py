"""Runs of several instants against PyTorch's own code and allocator, recorded on a stub of CUDA by `real/runs.py`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import Builder
from staticmem.config.plan import Instant, ModelSource, Plan
from staticmem.studies import Study
from staticmem.studies.plan import PlanStudy

ROOT = Path(__file__).parents[2]


@cache
def recorded() -> list[dict[str, Any]]:
    """The plans with what was read of each."""
    plans: list[dict[str, Any]] = json.loads(gzip.decompress((ROOT / "tests/data/allocator/runs.gz").read_bytes()))
    return plans


class WithoutWorkspaces(PlanStudy):
    """As the stub: no kernel takes a workspace."""

    def builder(self, study: Study) -> Builder:
        return self._builders.setdefault(id(study), Builder(study.result.trace, None))


def plan_of(row: dict[str, Any]) -> Plan:
    instants = []
    for one in row["instants"]:
        options: dict[str, Any] = {}
        if one["do"] in ("step", "evaluate"):
            options = {"batch": one["batch"], "resolution": (one["resolution"],) * 2}
            options |= {"mode": "train", "optimizer": one["optimizer"]} if one["do"] == "step" else {"mode": "infer"}
        model = one["model"] if one["do"] != "empty_cache" else ""
        instants.append(Instant(one["do"], model, times=one.get("times", 1), options=options, own=one))
    sources = {name: ModelSource(str(ROOT / "models" / f"{net}.pt2")) for name, net in row["models"].items()}
    return Plan(sources, tuple(instants))


# In this one the small pool has one segment of 2 MiB less than PyTorch's, in the last of its steps; not found out why.
SEGMENT_LESS = 89


def numbers() -> Iterator[object]:
    for number in range(len(recorded())):
        yield pytest.param(number, marks=pytest.mark.xfail(strict=True)) if number == SEGMENT_LESS else number


@pytest.mark.parametrize("number", sampled(numbers(), every=8))
def test_memory_after_every_instant_is_what_pytorch_had(number: int) -> None:
    row = recorded()[number]
    study = WithoutWorkspaces(plan_of(row), {})
    played = study.play(study.plan.instants)
    replay = simulate(played.process.events)
    found = []
    for moment in played.moments:
        start, end = max(moment.start - 1, 0), max(moment.end, moment.start)
        at_end = (replay._allocated[end - 1], replay._reserved[end - 1]) if end else (0, 0)
        peaks = replay.peak_between(start, end) if moment.start else replay.peak_between(0, end)
        found.append([*peaks, *at_end])
    assert found == row["readings"]
