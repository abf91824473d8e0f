"""The record of a validation: prediction and reading side by side, and on what. It is saved as JSON.

Its schema is `schemas/record-1.schema.json`. Sizes are in bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RECORD = "staticmem-record/1"
VERDICTS = ("exact", "agrees", "differs", "not compared")


@dataclass(frozen=True)
class Meter:
    """A quantity: predicted as a band, measured, and what explains the difference."""

    name: str
    low: int | None
    high: int | None
    measured: int | None
    note: str = ""

    @property
    def difference(self) -> int | None:
        """Measured less predicted: 0 inside the band, else the distance to its nearer end."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        if self.measured < self.low:
            return self.measured - self.low
        return max(self.measured - self.high, 0)

    def to_json(self) -> dict[str, Any]:
        predicted = None if self.low is None or self.high is None else {"low": self.low, "high": self.high}
        return {
            "name": self.name,
            "predicted": predicted,
            "measured": self.measured,
            "difference": self.difference,
            "note": self.note,
        }


@dataclass(frozen=True)
class NodeDifference:
    """A node whose reading is not what was predicted."""

    run: int
    name: str
    op: str
    predicted: int
    measured: int


@dataclass(frozen=True)
class Nodes:
    """How many nodes were compared in all runs, how many were equal, and the worst of the others."""

    compared: int = 0
    equal: int = 0
    worst: tuple[NodeDifference, ...] = ()


@dataclass(frozen=True)
class Record:
    """All of it. `verdict` is one of `VERDICTS`; `explanations` are sentences."""

    created: str
    staticmem: str
    runtime: Mapping[str, Any]
    device: Mapping[str, Any]
    host: Mapping[str, str]
    model: Mapping[str, Any]
    scenario: Mapping[str, Any]
    meters: tuple[Meter, ...]
    nodes: Nodes
    verdict: str
    explanations: tuple[str, ...] = ()
    notes: tuple[Mapping[str, Any], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """What is saved, in the order of the schema."""
        worst = [{**asdict(row), "difference": row.measured - row.predicted} for row in self.nodes.worst]
        return {
            "schema": RECORD,
            "created": self.created,
            "staticmem": self.staticmem,
            "runtime": dict(self.runtime),
            "device": dict(self.device),
            "host": dict(self.host),
            "model": dict(self.model),
            "scenario": dict(self.scenario),
            "meters": [meter.to_json() for meter in self.meters],
            "nodes": {"compared": self.nodes.compared, "equal": self.nodes.equal, "worst": worst},
            "verdict": self.verdict,
            "explanations": list(self.explanations),
            "notes": [dict(note) for note in self.notes],
        }

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"


def sha256(path: str) -> str:
    """The hash of a model file, external data not included."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
