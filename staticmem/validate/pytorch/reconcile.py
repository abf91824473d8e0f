"""Prediction and reading of a step with PyTorch side by side: meters, ops, and what explains a difference."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staticmem.devices.meters import DeviceMeters
from staticmem.liveness import Lifetimes
from staticmem.units import MIB
from staticmem.validate.pytorch.prediction import Predicted
from staticmem.validate.records import Meter, NodeDifference, Nodes

WORST = 10
CLOSE = 0.001  # of the peak of live memory: the acceptance figure of docs/validate.md
LIMIT = 100_000  # rows; aligning more costs more than it tells
# names of one thing: factories that make the same tensor in the same place, and batch norm on each device
_SAME = {
    "aten.new_empty.default": "aten.empty.memory_format",
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.cudnn_batch_norm.default": "aten.native_batch_norm.default",
    "aten.cudnn_batch_norm_backward.default": "aten.native_batch_norm_backward.default",
}


@dataclass(frozen=True)
class Row:
    """A kernel that allocates, of either side: bytes of its results, and what is alive after it.

    `node` is the graph's op, -1 for none; `optional` what PyTorch may write in place where nothing watches it.
    """

    phase: str
    op: str
    node: int
    sizes: tuple[int, ...]
    live: int
    optional: bool = False

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self.phase, _SAME.get(self.op, self.op), self.sizes


@dataclass(frozen=True)
class TorchReadings:
    """What a run left. Bytes; None where this device does not have the meter.

    `cublas` and `cublaslt` are workspaces of one product, `kept` is what of both stays after it.
    """

    version: str
    stand_ins: Mapping[str, int]
    device: Mapping[str, Any]
    rows: tuple[Row, ...] = ()
    live_peak: int | None = None
    live_at: Sequence[str] = ()
    forward_end: int | None = None
    scalars: int = 0
    allocated: int | None = None
    reserved: int | None = None
    reserved_now: int | None = None
    context: int | None = None
    process: int | None = None
    kept: int | None = None
    cublas: int | None = None
    cublaslt: int | None = None
    cudnn: int | None = None


@dataclass(frozen=True)
class Alignment:
    """Rows of both sides in order: pairs, and those that only one side has."""

    pairs: tuple[tuple[Row, Row], ...]
    predicted_only: tuple[Row, ...]
    measured_only: tuple[Row, ...]


def predicted_rows(lifetimes: Lifetimes) -> list[Row]:
    """The kernels of a predicted step that allocate."""
    trace = lifetimes.trace
    buffers_of: dict[int, list[int]] = {}
    for buffer in trace.buffers:
        if buffer.size and trace.kernels[buffer.kernel].phase != "setup":
            buffers_of.setdefault(buffer.kernel, []).append(buffer.id)
    rows = []
    for index, buffers in buffers_of.items():
        kernel = trace.kernels[index]
        if kernel.name == "loss of the previous step":
            continue
        sizes = tuple(sorted(trace.buffers[b].size for b in buffers))
        rows.append(Row(kernel.phase, kernel.name, kernel.op, sizes, lifetimes.live[lifetimes.born[buffers[-1]]]))
    return rows


def align(mine: Sequence[Row], theirs: Sequence[Row]) -> Alignment:
    """Pairs rows in order, by phase, name and sizes, then by phase and sizes between those.

    Results that PyTorch writes in place where nothing watches it may be alone.
    """
    pairs: list[tuple[Row, Row]] = []
    left: list[Row] = []
    right: list[Row] = []
    i = j = 0
    while i < len(mine) and j < len(theirs):  # nearly all of it is equal: what difflib has to see is short
        if mine[i].key == theirs[j].key:
            pairs.append((mine[i], theirs[j]))
            i, j = i + 1, j + 1
        elif theirs[j].optional:
            j += 1
        else:
            break
    a, b = mine[i:], theirs[j:]
    if len(a) + len(b) > LIMIT:
        return Alignment(tuple(pairs), tuple(a), tuple(b))
    matcher = difflib.SequenceMatcher(None, [r.key for r in a], [r.key for r in b], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            pairs += zip(a[i1:i2], b[j1:j2], strict=True)
        else:
            _between(a[i1:i2], b[j1:j2], pairs, left, right)
    return Alignment(tuple(pairs), tuple(left), tuple(right))


def _between(
    mine: Sequence[Row], theirs: Sequence[Row], pairs: list[tuple[Row, Row]], left: list[Row], right: list[Row]
) -> None:
    """Kernels of another name that allocate the same, in order; the others are alone."""
    rest = [row for row in theirs if not row.optional]
    for row in mine:
        position = next(
            (k for k, other in enumerate(rest) if (other.phase, other.sizes) == (row.phase, row.sizes)), None
        )
        if position is None:
            left.append(row)
        else:
            right += rest[:position]
            pairs.append((row, rest[position]))
            rest = rest[position + 1 :]
    right += rest


def nodes(alignment: Alignment) -> Nodes:
    """How many ops allocate the same with the same bytes alive, and those where live bytes differ the most."""
    alone = len(alignment.predicted_only) + len(alignment.measured_only)
    equal, different = 0, []
    for mine, theirs in alignment.pairs:
        if mine.live == theirs.live:
            equal += 1
        else:
            different.append(NodeDifference(1, f"{mine.phase} {theirs.op}", mine.op, mine.live, theirs.live))
    different.sort(key=lambda row: -abs(row.measured - row.predicted))
    return Nodes(len(alignment.pairs) + alone, equal, tuple(different[:WORST]))


def cpu_bands(prediction: Predicted) -> dict[str, tuple[int, int]]:
    """Live memory: its peak, and what is alive when the forward ends."""
    peak = prediction.lifetimes.peak_bytes
    bands = {"live, peak": (peak, peak)}
    mark = prediction.result.trace.marks.get("forward_end")
    if mark is not None:
        end = prediction.lifetimes.level_before(mark)
        bands["live, end of forward"] = (end, end)
    return bands


def cuda_bands(device_meters: DeviceMeters) -> dict[str, tuple[int, int]]:
    """The meters of the allocator and of the driver that are predicted."""
    named = (
        ("allocated", device_meters.allocated),
        ("reserved", device_meters.reserved),
        ("device", device_meters.device),
    )
    return {name: (band.low, band.high) for name, band in named}


def cpu_meters(prediction: Predicted, read: TorchReadings) -> tuple[Meter, ...]:
    """Live memory, predicted and counted."""
    bands = cpu_bands(prediction)
    where = "/".join(part for part in read.live_at if part)
    note = f"last step, reached at {where}" if where else "last step"
    return (
        _meter("live, peak", bands, read.live_peak, note),
        _meter("live, end of forward", bands, read.forward_end, "last step"),
    )


def _meter(name: str, bands: Mapping[str, tuple[int, int]], measured: int | None, note: str) -> Meter:
    low, high = bands.get(name, (None, None))
    return Meter(name, low, high, measured, note)


def cuda_meters(device_meters: DeviceMeters, read: TorchReadings) -> tuple[Meter, ...]:
    """The meters of the allocator and of the driver."""
    how = str(read.device.get("meter", "not read"))
    after = None
    if read.process is not None and read.context is not None and read.reserved_now is not None:
        after = read.process - read.reserved_now - read.context
    bands = cuda_bands(device_meters)
    return (
        _meter("allocated", bands, read.allocated, "max_memory_allocated()"),
        _meter("reserved", bands, read.reserved, "max_memory_reserved()"),
        _meter("device", bands, read.process, how),
        Meter("context", None, None, read.context, "after torch.cuda.init() and one kernel"),
        Meter("libraries", None, None, after, "device less reserved memory and context"),
        Meter("cuBLAS workspace", None, None, read.cublas, "of one product"),
        Meter("cublasLt workspace", None, None, read.cublaslt, "of one product with a bias, beyond cuBLAS"),
        Meter("workspaces kept", None, None, read.kept, "of both, after the calls"),
    )


def cpu_verdict(meters: Sequence[Meter], compared: Nodes) -> str:
    """exact: both meters and every op; agrees: both meters within 0.1 %."""
    told = [m for m in meters if m.difference is not None and m.measured]
    if not told:
        return "not compared"
    if all(m.difference == 0 for m in told) and compared.equal == compared.compared:
        return "exact"
    return "agrees" if all(abs(m.difference or 0) <= CLOSE * (m.measured or 1) for m in told) else "differs"


def cuda_verdict(meters: Sequence[Meter]) -> str:
    """agrees: every meter that was read is inside its band."""
    told = [m for m in meters if m.difference is not None]
    if not told:
        return "not compared"
    return "agrees" if all(m.difference == 0 for m in told) else "differs"


def explanations(alignment: Alignment, meters: Sequence[Meter]) -> list[str]:
    """What is known of differences: by op, most bytes first."""
    result = []
    for rows, text in (
        (alignment.predicted_only, "predicted and not seen"),
        (alignment.measured_only, "seen and not predicted"),
    ):
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for row in rows:
            sizes[f"{row.phase} {row.op}"] += sum(row.sizes)
            counts[f"{row.phase} {row.op}"] += 1
        if sizes:
            listed = "; ".join(f"{name} {counts[name]} times, {size:,} bytes" for name, size in sizes.most_common(5))
            result.append(f"Allocations {text}: {listed}.")
    renamed = Counter((mine.op, theirs.op) for mine, theirs in alignment.pairs if mine.op != theirs.op)
    if renamed:
        listed = "; ".join(f"{a} is {b} ({count})" for (a, b), count in renamed.most_common(5))
        result.append(f"Kernels of another name that allocate the same: {listed}.")
    for meter in meters:
        if meter.difference and meter.measured and meter.low is not None:
            share = meter.difference / meter.measured
            result.append(f"{meter.name}: {meter.difference / MIB:+,.2f} MiB ({share:+.2%}) outside of the prediction.")
    return result
