"""Loops with several models against PyTorch's own code and allocator, recorded on a stub of CUDA by `real/loops.py`.

`loops.zip` has the recordings of the modules of each case, as `staticmem.export` writes them.
"""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled

import staticmem
from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.from_trace import Builder
from staticmem.config.config import of_node
from staticmem.devices.kernels import KernelWorkspaces, Need
from staticmem.documents import of_plain
from staticmem.errors import StaticmemError
from staticmem.report.run import RunReport
from staticmem.studies import Study
from staticmem.studies.plan import PlanStudy

DATA = Path(__file__).parents[1] / "data" / "allocator"
REAL = Path(__file__).parents[1] / "allocators" / "real"


@cache
def cases() -> dict[str, Any]:
    sys.path.insert(0, str(REAL))
    try:
        import loops
    finally:
        sys.path.remove(str(REAL))
    return dict(loops.CASES)


@cache
def recorded() -> dict[str, list[list[int]]]:
    """Of each case what was read after each instant."""
    readings: dict[str, list[list[int]]] = json.loads(gzip.decompress((DATA / "loops.gz").read_bytes()))
    return readings


def models_of(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The models of a case as a plan names them."""
    models: dict[str, dict[str, Any]] = {}
    parts = cases()[name].parts
    with zipfile.ZipFile(DATA / "loops.zip") as packed:
        for key, text in json.loads(packed.read("index.json")).items():
            case, _, model = key.rpartition("/")
            if case == name:
                path = folder / f"{model}.pt2"
                with zipfile.ZipFile(path, "w") as archive:
                    archive.writestr("model/archive_format", "pt2")
                    archive.writestr("model/extra/staticmem_recording.txt", packed.read(f"{text}.txt"))
                models[model] = {"path": str(path), "parts": parts.get(model, {})}
    return models


class OnStub(KernelWorkspaces):
    """What kernels of PyTorch take; the stub's libraries take nothing."""

    def needs(self, kernel: int) -> list[Need]:
        return [need for need in super().needs(kernel) if not need.what.startswith(("cuBLAS", "cublasLt", "cuDNN"))]


class StubStudy(PlanStudy):
    def builder(self, study: Study) -> Builder:
        if id(study) not in self._builders:
            trace = study.result.trace
            self._builders[id(study)] = Builder(trace, OnStub(trace, self.device.setup))
        return self._builders[id(study)]


def names() -> list[str]:
    return [name for name in json.loads(gzip.decompress((DATA / "loops.gz").read_bytes())) if name != "torch"]


def test_there_are_forty_cases_and_more() -> None:
    assert len(names()) == len(cases()) >= 40


@pytest.mark.parametrize("name", sampled(names(), every=6))
def test_a_loop_of_several_models_has_pytorchs_memory_after_every_instant(name: str, tmp_path: Path) -> None:
    plan = {"models": models_of(name, tmp_path), "instants": list(cases()[name].instants())}
    config = of_node(of_plain({"version": 1, "plan": plan}, "plan", ""), "")
    assert config.plan is not None
    study = StubStudy(config.plan, {})
    played = study.play(study.plan.instants)
    replay = simulate(played.process.events)
    found = []
    for moment in played.moments:
        start, end = max(moment.start - 1, 0), max(moment.end, moment.start)
        at_end = (replay._allocated[end - 1], replay._reserved[end - 1]) if end else (0, 0)
        peaks = replay.peak_between(start, end) if moment.start else replay.peak_between(0, end)
        found.append([*peaks, *at_end])
    assert found == recorded()[name]


def plan_of(*instants: Any, folder: Path, name: str = "dpo", **models: Any) -> RunReport:
    """A plan over the models of a case."""
    return staticmem.plan(
        {"version": 1, "plan": {"models": {**models_of(name, folder), **models}, "instants": [*instants]}}
    )


STEP = {"step": {"model": "dpo", "loss": "none", "optimizer": "adamw", "batch": 2}}


def test_parts_are_there_once_and_stay_when_the_module_ends(tmp_path: Path) -> None:
    policy, both, joined = plan_of(
        *({"load": name} for name in ("policy", "reference", "dpo")), STEP, folder=tmp_path
    ).instants[:3]
    assert both.left_bytes == 2 * policy.left_bytes > 0
    assert joined.left_bytes == both.left_bytes
    ended = plan_of({"load": "dpo"}, {"end": "dpo"}, {"end": "policy"}, STEP, folder=tmp_path).instants
    assert [one.left_bytes for one in ended[:3]] == [both.left_bytes, both.left_bytes, policy.left_bytes]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"polcy": "policy"}, "has no module 'polcy'"),
        ({"policy.trunk": "policy"}, "have no parameter in common"),
        ({"policy": "polcy"}, "is 'polcy'"),
        ({"policy": "dpo"}, "is 'dpo'"),
    ],
)
def test_parts_that_share_nothing_are_errors(parts: dict[str, str], text: str, tmp_path: Path) -> None:
    models = models_of("dpo", tmp_path)
    models["dpo"]["parts"] = parts
    with pytest.raises(StaticmemError) as error:
        staticmem.plan({"version": 1, "plan": {"models": models, "instants": [{"load": "policy"}, STEP]}})
    assert text in str(error.value)


def test_a_parameter_that_changes_its_size_is_an_error(tmp_path: Path) -> None:
    half = {"evaluate": {"model": "policy", "batch": 2, "dtype": "bf16"}}
    with pytest.raises(StaticmemError, match="is there with"):
        plan_of({"load": "reference"}, STEP, half, folder=tmp_path)


def test_an_average_takes_what_its_update_makes(tmp_path: Path) -> None:
    copied = {"copy": {"model": "reference", "of": "policy"}}
    average = {"average": {"model": "reference", "temporaries": 3}}
    _, after, updated = plan_of(copied, {"load": "policy"}, average, STEP, folder=tmp_path).instants[:3]
    largest = 2000 * 128 * 4  # the embedding, and the head
    assert updated.live_bytes == after.left_bytes + 3 * largest
    with pytest.raises(StaticmemError, match="`of`"):
        plan_of({"copy": {"model": "policy", "of": "policy"}}, STEP, folder=tmp_path)
