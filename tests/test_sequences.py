"""Allocation by allocation against PyTorch: what a forward and a backward allocate, in which order, and what is alive.

`data/traces/` has a recorded step each: of every kernel that allocates its phase, the name that the dispatcher has for
it, the sizes of its results in bytes and the bytes that are alive once it has run. docs/internals/measurements.md says
how they were recorded. The recorder computes some sums out of place that PyTorch adds in place; those rows are marked,
and may have a counterpart here or not.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prepared import run_step
from sampling import sampled

from staticmem.frontends import open_model
from staticmem.ir import dtypes
from staticmem.ir.model_file import resolve
from staticmem.liveness import Lifetimes
from staticmem.passes.pipeline import bind
from staticmem.scenario.step import Scenario

HERE = Path(__file__).parent
TOLERANCE = 0.001  # of the peak, for live bytes: which small values code keeps in variables is a policy (ADR 5)
FOLDERS = (HERE.parent / "models", HERE / "data" / "graphs")
# factories that make the same tensor, in the same place
SAME = {"aten.new_empty.default": "aten.empty.memory_format", "aten.new_zeros.default": "aten.zeros.default"}
TRACES = sorted((HERE / "data" / "traces").glob("*.json.gz"))


@dataclass(frozen=True)
class Row:
    """A kernel that allocates: sizes in order of size, `live` bytes after it."""

    phase: str
    kernel: str
    sizes: tuple[int, ...]
    live: int
    optional: bool = False

    @property
    def call(self) -> tuple[str, str, tuple[int, ...]]:
        return self.phase, SAME.get(self.kernel, self.kernel), self.sizes


@cache
def recorded(path: Path) -> tuple[dict[str, Any], tuple[Row, ...]]:
    """The scenario of a recorded step, and its rows."""
    scenario = json.loads(gzip.decompress(path.read_bytes()))
    rows = tuple(
        Row(phase, kernel, tuple(sorted(sizes)), live, bool(marked))
        for phase, kernel, sizes, live, *marked in scenario.pop("kernels")
    )
    return scenario, rows


def ours(scenario: dict[str, Any]) -> Iterator[Row]:
    """The same rows of this project's trace."""
    path = next(found for folder in FOLDERS if (found := folder / f"{scenario['graph']}.pt2").exists())
    model = open_model(str(path))
    graph = bind(model, resolve(model, batch=scenario["batch"]))
    known = {f.name for f in fields(Scenario)}
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in scenario.items() if k in known}
    options["amp"] = dtypes.parse(scenario["amp"]) if "amp" in scenario else None
    trace = run_step(graph, Scenario(mode="train", outputs="dropped", **options)).trace
    lifetimes = Lifetimes(trace)
    made: dict[int, list[int]] = {}  # by kernel, in order
    for buffer in trace.buffers:
        if buffer.size and trace.kernels[buffer.kernel].phase in ("forward", "backward"):
            made.setdefault(buffer.kernel, []).append(buffer.id)
    for index, buffers in made.items():
        kernel = trace.kernels[index]
        sizes = tuple(sorted(trace.buffers[b].size for b in buffers))
        yield Row(kernel.phase, kernel.name, sizes, lifetimes.live[lifetimes.born[buffers[-1]]])


def aligned(theirs: tuple[Row, ...], mine: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Pairs of rows in order; fails at the first that is missing, is too much or allocates something else."""
    position = 0
    for row in theirs:
        found = mine[position] if position < len(mine) else None
        if found is not None and found.call == row.call:
            position += 1
            yield row, found
        elif not row.optional:
            pytest.fail(f"PyTorch: {row}\nhere, kernel {position}: {found}")
    assert position == len(mine), f"more than PyTorch: {mine[position]}"


@pytest.mark.parametrize("path", sampled(TRACES, 3), ids=lambda path: path.name.removesuffix(".json.gz"))
def test_same_allocations_and_same_live_bytes(path: Path) -> None:
    scenario, theirs = recorded(path)
    for row, found in aligned(theirs, list(ours(scenario))):
        near = abs(found.live - row.live) <= TOLERANCE * scenario["peak_bytes"]
        assert row.optional or near, f"PyTorch: {row}\nhere: {found}"


def test_the_traces_are_there() -> None:
    assert len(TRACES) >= 10
    assert all(len(recorded(path)[1]) > 10 for path in TRACES)
