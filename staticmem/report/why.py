"""Why memory is alive at a moment of a step, as frozen values.

Field names are those of the JSON (`schemas/why-1.schema.json`). Bytes are integers, rounded up to 512 a storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from staticmem.report.shown import Shown

SCHEMA = "staticmem.why/1"


@dataclass(frozen=True, slots=True)
class Chain:
    """Owners that keep a tensor alive, each of which the one before keeps: the last one holds it. `links` are
    sentences' parts, from the program to the tensor."""

    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that is alive, `bytes` large, with the shortest chain of owners for each that holds it."""

    name: str
    module: str
    dtype: str
    shape: tuple[int, ...]
    category: str
    bytes: int
    chains: tuple[Chain, ...]


@dataclass(frozen=True, slots=True)
class Why(Shown):
    """Why a tensor, or the tensors of a module, are alive at a moment of a step.

    `at` is the moment as it was asked for, `phase` the phase that it is in. `tensors` are the largest of `count` that
    the name stands for; `bytes` is the sum of all of them.
    """

    kind: ClassVar[str] = "why"

    schema: str
    model: str
    asked: str
    at: str
    phase: str
    bytes: int
    count: int
    tensors: tuple[KeptTensor, ...]
