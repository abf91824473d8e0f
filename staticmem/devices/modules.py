"""CUDA modules: when their kernels come to a card, and what all of them take.

With lazy loading a kernel is loaded when it is first used. With eager loading the context loads every kernel that
libtorch_cuda and the libraries it is linked with have for the architecture, before the first tensor.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from staticmem.devices.documents import CODE, integer, keys_of, table, text
from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.units import MIB, NOTHING, Band

LAZY, EAGER = "lazy", "eager"  # CUDA_MODULE_LOADING


@record(frozen=True)
class EagerModules:
    """Bytes of all kernels in builds of torch from version `since` on, one for each card that was read."""

    since: tuple[int, int]
    readings: tuple[int, ...]

    @property
    def band(self) -> Band:
        """The least, the median and the most that was read: cards and builds differ, and neither is known."""
        return Band(min(self.readings), round(median(self.readings)), max(self.readings))


@record(frozen=True)
class Modules:
    """PyTorch asks for lazy loading from version `lazy_since` on; `eager` is in the order of versions."""

    lazy_since: tuple[int, int]
    eager: tuple[EagerModules, ...]
    sources: tuple[tuple[str, str], ...]

    def loading(self, torch: tuple[int, int]) -> str:
        """What a version of torch does by itself, with a driver that can (R515 and later)."""
        return LAZY if torch >= self.lazy_since else EAGER

    def band(self, torch: tuple[int, int], loading: str | None = None) -> Band:
        """Bytes of the modules that are there before the first tensor; nothing where they are loaded lazily."""
        if (loading or self.loading(torch)) == LAZY or not self.eager:
            return NOTHING
        fitting = [entry for entry in self.eager if entry.since <= torch]
        return (fitting[-1] if fitting else self.eager[0]).band


UNKNOWN = Modules((1, 13), (), ())  # a profile that says nothing of them


def eager_modules(entry: dict[str, Any], since: tuple[int, int], path: Path, where: str) -> EagerModules:
    """One range of versions: each reading is a process with a tensor, less the tensor, less the bare context."""
    keys_of(entry, path, required=("torch", "readings"), where=where)
    found = []
    for name, data in table(entry["readings"], path, f"{where}.readings").items():
        place = f"{where}.readings.{name}"
        reading = table(data, path, place)
        keys_of(reading, path, required=("mib", "context_mib", "torch", "source"), where=place)
        context = integer(reading["context_mib"], path, f"{place}.context_mib")
        found.append((integer(reading["mib"], path, f"{place}.mib", context + 1) - context) * MIB)
    if not found:
        raise UsageError(f"{path}: {where}.readings is empty", "At least one reading is needed.", code=CODE)
    return EagerModules(since, tuple(found))


def sources_of(entry: dict[str, Any], path: Path, where: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"{where}.readings.{name}", text(data["source"], path, f"{where}.readings.{name}.source"))
        for name, data in entry["readings"].items()
    )
