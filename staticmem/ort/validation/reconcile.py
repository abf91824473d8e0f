"""Prediction and reading of an ONNX Runtime session side by side: meters, nodes, and what explains a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from staticmem.ort.memory.replay import NodeRow
from staticmem.ort.memory.session import SessionPrediction
from staticmem.units import MIB
from staticmem.validate.records import Meter, NodeDifference, Nodes

WORST = 10
CLOSE = 0.02  # of the arena: the acceptance figure of docs/validate.md


@dataclass(frozen=True)
class NodeReading:
    """The arena at the end of a node: bytes. None where the runtime does not say (arena off, before 1.28)."""

    name: str
    op: str
    provider: str
    requested: int | None
    in_use: int | None
    peak: int | None
    held: int | None


@dataclass(frozen=True)
class Readings:
    """What a run left. `workspaces` are bytes that kernels took for themselves, by node."""

    version: str
    provider: str
    runs: tuple[tuple[NodeReading, ...], ...]
    workspaces: dict[str, int]
    peak_rss: int | None
    device: dict[str, Any]
    saved: str | None


def meters(predicted: SessionPrediction, read: Readings) -> tuple[Meter, ...]:
    """The quantities that both sides have, then those that were only read."""
    first, last = _values(read.runs[0]), _values(read.runs[-1])
    weights = predicted.weights
    base = _base(predicted, read)
    start = base if base is not None else weights.total
    result = [
        Meter("weights in the arena", weights.total, weights.total, base, "reserved before the first run"),
        Meter(
            "tensors",
            predicted.tensors,
            predicted.tensors,
            max(first) - start if first else None,
            "first run, largest at the end of a node",
        ),
        Meter(
            "requested", predicted.requested, predicted.requested, max(last, default=None), "last run, weights included"
        ),
        Meter("arena held", predicted.held, predicted.held, _held(read), "after the last run"),
    ]
    workspace = predicted.workspace if predicted.workspace_known else None
    result.append(
        Meter(
            "largest workspace", workspace, workspace, max(read.workspaces.values(), default=0), "taken by one kernel"
        )
    )
    result.append(Meter("weights outside the arena", weights.outside, weights.outside, None, "not told by the runtime"))
    if read.device.get("ran_process") is not None:
        result.append(Meter("device, process", None, None, read.device["ran_process"], "NVML"))
    elif read.device.get("ran_used") is not None:
        grown = read.device["ran_used"] - read.device.get("before_used", 0)
        result.append(Meter("device, growth", None, None, grown, "NVML, all processes"))
    elif read.peak_rss is not None:
        result.append(Meter("process, peak resident", None, None, read.peak_rss, "interpreter and libraries included"))
    return tuple(result)


def _values(rows: Sequence[NodeReading]) -> list[int]:
    return [row.requested for row in rows if row.requested is not None]


def _held(read: Readings) -> int | None:
    held = [row.held for row in read.runs[-1] if row.held is not None]
    return held[-1] if held else None


def _base(predicted: SessionPrediction, read: Readings) -> int | None:
    """What was in the arena before the first node: what the first reading has beyond the first node's own results."""
    rows = [row for row in predicted.rows if row.run == 1]
    if not rows or not read.runs or not read.runs[0] or read.runs[0][0].requested is None:
        return None
    if rows[0].op != read.runs[0][0].op:
        return None
    return read.runs[0][0].requested - rows[0].requested


def nodes(predicted: SessionPrediction, read: Readings) -> Nodes:
    """Compares requested bytes node by node, in the first and the last run."""
    compared = equal = 0
    different: list[NodeDifference] = []
    base = _base(predicted, read)
    for number in sorted({1, len(read.runs)}):
        mine = [row for row in predicted.rows if row.run == number]
        theirs = read.runs[number - 1]
        if base is None or not same_nodes(mine, theirs):
            continue
        for row, reading in zip(mine, theirs, strict=True):
            if reading.requested is None:
                continue
            compared += 1
            got = reading.requested - base
            if got == row.requested:
                equal += 1
            else:
                different.append(NodeDifference(number, row.name, row.op, row.requested, got))
    different.sort(key=lambda row: -abs(row.measured - row.predicted))
    return Nodes(compared, equal, tuple(different[:WORST]))


def same_nodes(mine: Sequence[NodeRow], theirs: Sequence[NodeReading]) -> bool:
    """Whether both executed the same operators in the same order."""
    return [row.op for row in mine] == [row.op for row in theirs]


def verdict(predicted: SessionPrediction, read: Readings, table: tuple[Meter, ...], compared: Nodes) -> str:
    """exact: every node and every meter; agrees: the arena within 2 %; not compared: the runtime told nothing."""
    told = [meter for meter in table if meter.difference is not None]
    if not told or all(row.requested is None for rows in read.runs for row in rows):
        return "not compared"
    core = [meter for meter in told if meter.name in ("weights in the arena", "tensors", "requested", "arena held")]
    if compared.compared and compared.equal == compared.compared and all(m.difference == 0 for m in core):
        return "exact"
    held = next((meter for meter in table if meter.name == "arena held"), None)
    if held is not None and held.difference is not None and held.measured:
        return "agrees" if abs(held.difference) <= CLOSE * held.measured else "differs"
    return "differs"


def explanations(predicted: SessionPrediction, read: Readings, table: tuple[Meter, ...], compared: Nodes) -> list[str]:
    """What is known of a difference, most important first."""
    result: list[str] = []
    mine = [row for row in predicted.rows if row.run == 1]
    if read.runs and not same_nodes(mine, read.runs[0]):
        place = next(
            (i for i, (a, b) in enumerate(zip(mine, read.runs[0], strict=False)) if a.op != b.op),
            min(len(mine), len(read.runs[0])),
        )
        here = mine[place].op if place < len(mine) else "the end"
        there = read.runs[0][place].op if place < len(read.runs[0]) else "the end"
        result.append(
            f"The executed nodes differ from node {place + 1}: {here} was expected, {there} ran; "
            "data decided a branch or a number of iterations, or a node was written out as a function."
        )
    if compared.worst:
        first = compared.worst[0]
        result.append(
            f"{compared.compared - compared.equal} of {compared.compared} nodes differ; the most at {first.op} "
            f"{first.name}, run {first.run}: {first.measured - first.predicted:+,} bytes."
        )
    held = next((meter for meter in table if meter.name == "arena held"), None)
    if held is not None and held.difference and compared.compared and compared.equal == compared.compared:
        result.append(
            f"Requests are equal at every node, the arena differs by {held.difference / MIB:+,.1f} MiB: "
            "a kernel's workspace is not known here, and the arena doubles when it grows."
        )
    expected = {row.name: row.workspace for row in mine}
    more = {name: size for name, size in read.workspaces.items() if size > expected.get(name, 0)}
    if more and held is not None and held.difference:
        name = max(more, key=lambda n: more[n])
        result.append(
            f"Workspaces that were not predicted: {len(more)} nodes, the largest {more[name]:,} bytes at {name}."
        )
    return result
