"""The sizing report as frozen values; formats read it and none computes.

Field names are those of the JSON (`schemas/sizing-1.schema.json` is generated from these classes). Bytes are integers.
Within schema major 1, fields are only added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from staticmem.devices.sizing import Fit
from staticmem.report.model import ModelInfo, NoteInfo, OpCount, ScenarioInfo

SCHEMA = "staticmem.sizing/1"
ACCUMULATE = "accumulate"  # of `Count.strategy`: one device, and micro-batches
FITS, TIGHT = Fit.FITS.value, Fit.TIGHT.value


@dataclass(frozen=True, slots=True)
class Count:
    """How many of a card a strategy needs: the fewest of 2, 4, 8, ... on which it fits with its whole band; 1 where
    one holds the step safely, as it is or, in place of several that would checkpoint too, with `checkpointing`.
    `devices` is None where none is enough, and `why` says what stands in the way.

    `device_bytes` is the need of the rank with the most. `checkpointing` says that the blocks had to be checkpointed.
    With a global batch `batch` is that of each device in a micro-batch, and `accumulate` the number of micro-batches of
    the strategy "accumulate", which is one device; else None and 1.
    """

    strategy: str
    devices: int | None
    device_bytes: int | None
    checkpointing: bool
    why: str
    batch: int | None = None
    accumulate: int = 1


@dataclass(frozen=True, slots=True)
class Price:
    """What the user's price file says: `buy` for a card, `hour` for an hour of one. `source` is the provider and the
    day of a price that was fetched, empty for one of a file."""

    currency: str
    buy: float | None
    hour: float | None
    source: str = ""


@dataclass(frozen=True, slots=True)
class CardRow:
    """One card. `device_*_bytes` is what the step needs on it; `fit`, `why`, `condition`, `missing_bytes` and
    `least_usable_bytes` are as in `gpu` of a report.

    `headroom_bytes` is what the expected need leaves of the usable memory.
    `fit_with_checkpointing` is the same word with the blocks checkpointed, None where that does not apply.
    `device_compiled_bytes` is what the step needs with the model under torch.compile, None where that was not asked.
    `max_batch` and `safe_batch` are `batch` and `safe_batch` of `LargestBatch` (0: not even the smallest), None where
    the batch is fixed or was not searched; see `Sizing.exact_batches`. `max_size`, `safe_size` and
    `safe_size_with_checkpointing` are the same of the dimension `Sizing.dim`, where that was asked for. `obstacle` says
    why the card is no candidate, whatever its memory; empty where it is one. `tflops` are dense, by type;
    `bandwidth_gb_s` is in 10^9 bytes a second.
    `assumed` names figures of the card without a source.
    """

    slug: str
    name: str
    vendor: str
    form: str | None
    architecture: str
    nominal_bytes: int
    nvml_bytes: int
    usable_bytes: int
    device_low_bytes: int
    device_bytes: int
    device_high_bytes: int
    fit: str
    headroom_bytes: int
    missing_bytes: int
    fit_with_checkpointing: str | None
    max_batch: int | None
    safe_batch: int | None
    safe_batch_with_checkpointing: int | None
    device_compiled_bytes: int | None
    counts: tuple[Count, ...]
    bandwidth_gb_s: int | None
    tflops: Mapping[str, float]
    tdp_w: int | None
    link: str | None
    year: int | None
    price_class: str | None
    price: Price | None
    assumed: tuple[str, ...]
    obstacle: str = ""
    max_size: int | None = None
    safe_size: int | None = None
    safe_size_with_checkpointing: int | None = None
    why: str = ""
    condition: str = ""
    least_usable_bytes: int | None = None

    @property
    def largest(self) -> tuple[int | None, int | None, int | None]:
        """What was searched, batches or sizes: the largest, the largest safe one, and that with checkpointing."""
        sizes = (self.max_size, self.safe_size, self.safe_size_with_checkpointing)
        batches = (self.max_batch, self.safe_batch, self.safe_batch_with_checkpointing)
        return batches if sizes == (None, None, None) else sizes


@dataclass(frozen=True, slots=True)
class Point:
    """The need at a batch or a resolution on the card `Sizing.curves_of`; None with checkpointing where it does not
    apply."""

    batch: int | None
    resolution: tuple[int, ...] | None
    live_bytes: int
    device_bytes: int
    device_with_checkpointing_bytes: int | None


@dataclass(frozen=True, slots=True)
class Lever:
    """A change of the step, as `staticmem levers` has it: what it saves of the memory that `Sizing.levers_of` names.

    `flags` do it; `device_bytes` is None where live memory is compared.
    """

    what: str
    flags: str
    live_bytes: int
    device_bytes: int | None
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """All of it. `date` is given by the user, or None; `data_checked` is the date of the catalog.

    `blocks` is the class of the modules that checkpointing would take, None where the model repeats nothing.
    `exact_batches`: safe batches are the largest ones; else they are safe, at most an eighth below the largest, and
    `max_batch` was not searched. `curves_of` is the name of the card that `batches` and `resolutions` are of.
    `levers_of` says what `levers` save: device memory of a card by its name, or None: live memory. `dim` is the open
    dimension, or the prompt of generation, whose largest sizes rows have in place of batches.
    """

    schema: str
    version: str
    date: str | None
    data_checked: str
    model: ModelInfo
    scenario: ScenarioInfo
    step: str
    parameters: int
    live_bytes: int
    recommendation: str
    recommended: str | None
    cards: tuple[CardRow, ...]
    strategies: tuple[str, ...]
    batches: tuple[Point, ...]
    resolutions: tuple[Point, ...]
    blocks: str | None
    levers: tuple[Lever, ...]
    coverage: OpCount
    unknown_ops: tuple[str, ...]
    assumptions: tuple[NoteInfo, ...]
    warnings: tuple[NoteInfo, ...]
    not_included: tuple[str, ...]
    command: str
    exact_batches: bool = True
    curves_of: str = ""
    levers_of: str | None = None
    global_batch: int | None = None
    dim: str | None = None
