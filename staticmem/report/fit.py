"""How a training step fits a card, and settings that run it so, as frozen values; formats read them and none computes.

Field names are those of the JSON (`schemas/fit-1.schema.json` is generated from these classes). Bytes are integers.
Within schema major 1, fields are only added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from staticmem.report.model import LetGo
from staticmem.report.shown import Shown

SCHEMA = "staticmem.fit/1"
PRECISION, OPTIMIZER, ADAPTERS = CHANGES = ("precision", "optimizer", "adapters")  # what may be allowed, in this order


@dataclass(frozen=True, slots=True)
class Concession:
    """Something that a way to train gives up. `changes`: "none" but memory and time, "numerics", or "training"."""

    what: str
    changes: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step of the optimizer costs one device: floating-point operations (products, convolutions, attention),
    those of them that checkpoints compute again, and bytes that it sends to other devices. No time follows from them.
    """

    operations: int
    again_operations: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: `concessions` are what it gives up against the step as asked, none where it is that one.

    `batch` samples of a micro-batch on each of `devices`, `accumulate` of them a step, `parallel` their strategy.
    `flags` ask `staticmem analyze` for the same step; its figures are these: the need of one device, and `fit`. The
    command `analyze` prints them, `check` fails where the expected need grows above the upper end of today's.
    `missing_bytes` is what a card would have to have more to hold it, or, where it is tight, what the upper end of the
    need is above 95 % of the usable memory; 0 where it fits. `why` it is tight or cannot run, and the `condition` on
    which it runs, are as in `gpu` of a report.
    """

    concessions: tuple[Concession, ...]
    batch: int
    accumulate: int
    devices: int
    parallel: str | None
    flags: str
    live_bytes: int
    device_low_bytes: int
    device_bytes: int
    device_high_bytes: int
    fit: str
    missing_bytes: int
    analyze: str
    check: str
    why: str = ""
    condition: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """The way as the settings of a library: the file's name and text.

    `flags`, the figures and the commands are as those of `Way`, of the step as this library runs it. `notes` say what
    the text does not set, and where the library differs from what was predicted.
    """

    library: str
    file: str
    flags: str
    live_bytes: int
    device_low_bytes: int
    device_bytes: int
    device_high_bytes: int
    fit: str
    analyze: str
    check: str
    notes: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class Fit(Shown):
    """The answer. `fits`: `way` is safe on the card, with its cost and settings; else it is the nearest that was tried.

    `samples` of a step over all devices. `allowed` are the changes of training that were allowed, of "precision",
    "optimizer" and "adapters"; `would_fit` those that would have to be allowed too, where that is enough. `assumed`:
    what the card's size does not say, and what was asked and has no effect. `let_go`: what the code could let go of.
    """

    kind: ClassVar[str] = "fit"

    schema: str
    model: str
    gpu: str
    gpu_name: str
    usable_bytes: int
    samples: int
    fits: bool
    way: Way
    cost: Cost
    allowed: tuple[str, ...]
    would_fit: tuple[str, ...]
    settings: tuple[Settings, ...]
    let_go: tuple[LetGo, ...] = ()
    assumed: tuple[str, ...] = ()
