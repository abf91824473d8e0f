"""The memory of a run of several instants as frozen values.

Field names are those of the JSON (`schemas/run-1.schema.json`). Bytes are integers. Within schema major 1, fields are
only added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from staticmem.report.model import Band, GpuFit, HostInfo
from staticmem.report.shown import Shown

SCHEMA = "staticmem.run/1"


@dataclass(frozen=True, slots=True)
class LengthsInfo:
    """Batches of many lengths of an instant: the least, median and longest length in its steps, along `dim`.

    There are so many `shapes` of batches, of which `shapes_run` were run; the tensors of others lie on polynomials
    through these, but those of `rounded_bytes` in all are as in the next larger shape; with `rounds_up` all are. Behind
    the steps comes, twice, the longest batch that the data allow, `worst_batch` x `worst_length`. `reserved_bytes` is
    the peak of the steps before it, which they reach first in step `settled_after`. A run of so many steps draws a
    sample as long as `worst_length` with the probability `worst_chance`.
    """

    dim: str
    least: int
    median: int
    most: int
    shapes: int
    shapes_run: int
    rounds_up: bool
    rounded_bytes: int
    worst_batch: int
    worst_length: int
    reserved_bytes: int = 0
    settled_after: int = 0
    worst_chance: float = 0.0


@dataclass(frozen=True, slots=True)
class LargestLengths:
    """The largest size of batches of many lengths with which a run fits with its whole band: `of` is `tokens`, a
    budget, or `batch`; 0: the least does not fit. `fails_at` is the least larger one that was tried and does not.

    With it the longest batch is `worst_batch` x `worst_length`, which a run meets with the probability `worst_chance`,
    and the run needs at most `device_high_bytes`. `seed` is of the order of samples, `replays` how many sizes were
    tried.
    """

    of: str
    size: int
    fails_at: int
    replays: int
    device_high_bytes: int
    worst_batch: int
    worst_length: int
    worst_chance: float
    seed: int


@dataclass(frozen=True, slots=True)
class InstantReport:
    """One instant of a run. `does` is its word in the plan, `times` how many steps or batches it has.

    The meters are peaks while it lasts: expected bytes, and the band of device memory. `left_bytes` are tensors that
    are alive when it is over, `cached_bytes` what the allocator keeps free then, and `returned_bytes` what it gave back
    to the driver meanwhile. `runs_out`: the card has not enough memory for it; then `ran` of its steps were done
    before, and all figures are those of a card with enough memory. `full_after`: of an evaluation that gathers on the
    GPU, after how many batches this is full, by expected bytes; 0: it never is, or no GPU is named.
    """

    name: str
    does: str
    model: str
    times: int
    live_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    device_low_bytes: int
    device_high_bytes: int
    left_bytes: int
    cached_bytes: int
    returned_bytes: int
    runs_out: bool
    ran: int
    full_after: int = 0
    lengths: LengthsInfo | None = None


@dataclass(frozen=True, slots=True)
class RunChange:
    """A change of the plan after which the run fits, as it was replayed; `device_bytes` is its peak with that."""

    does: str
    device_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class RunReport(Shown):
    """A run: its instants in order, and where its peaks are. `bands` are of the whole run, for each meter.

    `gpu` is the verdict on the card; None: no card is named, and figures are those of an H100. `changes` are tried
    where the run does not fit or is tight, the cheapest first. `points` are the timeline: for each, the number of the
    instant and the bytes of allocated and of reserved memory, context apart (`context_bytes`), the peaks since the
    point before. `cause`: the instant that runs out, or needs the most, ran before with less; this one, between the
    two, took the most since. `retries` is how often the allocator gave cached memory back to have enough,
    `returned_bytes` how much. `largest` is there where it was asked for.
    """

    kind: ClassVar[str] = "run"

    schema: str
    models: tuple[str, ...]
    card: str
    gpu: GpuFit | None
    instants: tuple[InstantReport, ...]
    live_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    context_bytes: int
    device: Band
    peak: str
    changes: tuple[RunChange, ...] = ()
    assumed: tuple[str, ...] = ()
    points: tuple[tuple[int, ...], ...] = ()
    retries: int = 0
    returned_bytes: int = 0
    host: HostInfo | None = None
    cause: str = ""
    largest: LargestLengths | None = None
