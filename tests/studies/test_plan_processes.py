"""Runs of several instants against PyTorch's own code and allocator, recorded on a stub of CUDA by `real/runs.py`."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import Builder
from staticmem.config.plan import Instant, ModelSource, Plan
from staticmem.studies import Study
from staticmem.studies.gathering import batches_until_full
from staticmem.studies.plan import PlanStudy

ROOT = Path(__file__).parents[2]


@cache
def recorded(name: str = "runs") -> list[dict[str, Any]]:
    """The plans with what was read of each."""
    plans: list[dict[str, Any]] = json.loads(gzip.decompress((ROOT / f"tests/data/allocator/{name}.gz").read_bytes()))
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


def numbers(name: str) -> range:
    return range(len(recorded(name)))


@pytest.mark.parametrize("number", sampled(numbers("runs"), every=8))
def test_memory_after_every_instant_is_what_pytorch_had(number: int) -> None:
    row = recorded()[number]
    assert readings(row) == row["readings"]


@pytest.mark.parametrize("number", sampled(numbers("evaluations"), every=4))
def test_evaluations_gather_as_the_containers_of_trainer_do(number: int) -> None:
    row = recorded("evaluations")[number]
    assert readings(row) == row["readings"]


# Of 200 images, in thousands of calls: behind those that are replayed the count goes on by what the last ones take.
REPLAYED_IN_PART = {0: 0.01, 8: 0.03, 9: 0.01}


@pytest.mark.parametrize("number", sampled(range(12), every=3))
def test_a_gpu_is_full_after_as_many_batches_as_pytorch_gathers(number: int) -> None:
    row = recorded("filling")[number]
    study = WithoutWorkspaces(plan_of(row), {})
    *before, last = study.plan.instants
    full = batches_until_full(study.play_last, before, last, study.device, row["mib"] * 2**20)
    assert full == pytest.approx(row["batches"], rel=REPLAYED_IN_PART.get(number, 0))


def readings(row: dict[str, Any]) -> list[list[int]]:
    """Peaks of allocated and reserved memory in each instant of a plan, and both at its end."""
    study = WithoutWorkspaces(plan_of(row), {})
    played = study.play(study.plan.instants)
    replay = simulate(played.process.events)
    found = []
    for moment in played.moments:
        start, end = max(moment.start - 1, 0), max(moment.end, moment.start)
        at_end = (replay._allocated[end - 1], replay._reserved[end - 1]) if end else (0, 0)
        peaks = replay.peak_between(start, end) if moment.start else replay.peak_between(0, end)
        found.append([*peaks, *at_end])
    return found
