"""A device profile from readings: contexts, libraries and workspaces of cuBLAS, as records of CUDA runs have them.

Everything that no record tells stays as in the profile of the package, with its source.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import date
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from staticmem.devices import gpus, profile
from staticmem.devices.documents import read_yaml
from staticmem.errors import UsageError
from staticmem.report.formats import Format
from staticmem.report.text import View, printable
from staticmem.units import MIB
from staticmem.validate.pytorch.prediction import card_of
from staticmem.validate.records import Record
from staticmem.version import torch_release

LEAST = 3  # readings of a card: a median of fewer is one reading
SPREAD = 0.1  # of a context: more is not one quantity
PROBES = ("context", "libraries")
_WORKSPACES = ("cuBLAS workspace", "cublasLt workspace", "workspaces kept")


def calibrated(records: Sequence[tuple[str, Record]], gpu: str | None = None) -> dict[str, Any]:
    """The document of a profile that `analyze --profile` reads.

    Args:
        records: those of runs on CUDA with PyTorch count, others are left out.
        gpu: the card of all of them, by the catalog's name; None finds it by the driver's name.

    Raises:
        UsageError: too few readings (SM232), a card that the catalog does not have (SM235), or readings that
            contradict each other (SM237).
    """
    by_card: dict[str, list[Record]] = {}
    for _, record in records:
        of_cuda = record.device.get("kind") == "cuda" and record.runtime.get("name") == "torch"
        if of_cuda and all(_reading(record, name) is not None for name in PROBES):
            by_card.setdefault(gpus.find(gpu).slug if gpu else _card(record), []).append(record)
    if not by_card:
        raise _too_few("none of the records has them")
    document = copy.deepcopy(read_yaml(profile.DEFAULT))
    document["name"], document["checked"] = "calibrated", date.today().isoformat()
    for slug, records_of_card in sorted(by_card.items()):
        if len(records_of_card) < LEAST:
            raise _too_few(f"{slug} has {len(records_of_card)}")
        _context(document, slug, records_of_card)
    _libraries(document, [record for records_of_card in by_card.values() for record in records_of_card])
    for slug, records_of_card in sorted(by_card.items()):
        _cublas(document, slug, records_of_card)
    return document


def dumps(document: dict[str, Any]) -> str:
    """The document as YAML, with what it is on its first line."""
    import yaml

    head = "# Made by 'staticmem calibrate' from readings; use it with 'staticmem analyze --profile FILE'.\n"
    return head + str(yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True))


def check(text: str, path: Path) -> profile.Profile:
    """The profile that the text is, read back from `path`, where it was written."""
    path.write_text(text, encoding="utf-8")
    return profile.load(path)


def _card(record: Record) -> str:
    name, total = str(record.device.get("name", "")), record.device.get("memory") or 0
    slug = card_of(name, total)
    if slug is None:
        shown = printable(name)[:80]
        raise UsageError(
            f"'{shown}' is not in the catalog of GPUs",
            "A profile keeps contexts by the names of 'staticmem gpus'.",
            "Name the GPU that it is: --gpu NAME.",
            code="SM235",
        )
    return slug


def _reading(record: Record, name: str) -> int | None:
    return next((meter.measured for meter in record.meters if meter.name == name), None)


def _readings(records: Sequence[Record], name: str) -> list[int]:
    return [value for record in records if (value := _reading(record, name)) is not None]


def _source(records: Sequence[Record]) -> str:
    """Who read it: cards' driver, PyTorch and days, as the records tell."""
    versions = sorted({_plain(r.runtime.get("version", "")) for r in records})
    drivers = sorted({_plain(r.device.get("driver", "")) for r in records} - {""})
    days = sorted({_plain(r.created)[:10] for r in records})
    parts = [f"{len(records)} records of staticmem validate", f"torch {', '.join(versions)}"]
    parts += [f"driver {', '.join(drivers)}"] if drivers else []
    return "; ".join([*parts, days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"])


def _context(document: dict[str, Any], slug: str, records: Sequence[Record]) -> None:
    values = _readings(records, "context")
    if min(values) <= 0 or max(values) - min(values) > SPREAD * median(values):
        raise UsageError(
            f"the contexts that were read of {slug} differ by more than {SPREAD:.0%}",
            f"They are {min(values):,} to {max(values):,} bytes.",
            "Read them again with nothing else on the GPU, and with one driver.",
            code="SM237",
        )
    readings = document["context"].setdefault("readings", {})
    readings[slug] = {"mib": max(1, round(median(values) / MIB)), "source": _source(records)}


def _libraries(document: dict[str, Any], records: Sequence[Record]) -> None:
    values = sorted(max(value, 0) for value in _readings(records, "libraries"))
    document["libraries"] = {
        "low_mib": values[0] // MIB,
        "expected_mib": round(median(values) / MIB),
        "high_mib": ceil(values[-1] / MIB),
        "source": _source(records),
    }


def _cublas(document: dict[str, Any], slug: str, records: Sequence[Record]) -> None:
    """An entry for each version of PyTorch whose workspaces were read; the largest reading counts."""
    architecture = gpus.find(slug).architecture
    by_version: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if all(_reading(record, name) is not None for name in _WORKSPACES):
            by_version.setdefault(torch_release(str(record.runtime.get("version", ""))), []).append(record)
    for version, records_of_version in sorted(by_version.items()):
        sizes = {name: _readings(records_of_version, name) for name in _WORKSPACES}
        cublas, lt, kept = (max(sizes[name]) for name in _WORKSPACES)
        if any(min(values) != max(values) for values in sizes.values()):
            raise UsageError(
                f"workspaces of cuBLAS that were read of {slug} differ",
                f"PyTorch {version[0]}.{version[1]} took {min(sizes[_WORKSPACES[0]]):,} to {cublas:,} bytes.",
                "Set CUBLAS_WORKSPACE_CONFIG for all records or for none.",
                code="SM237",
            )
        entries = document["cublas"]
        below = [e for e in entries if torch_release(e["torch"]) <= version] or entries[:1]
        entry = copy.deepcopy(below[-1])
        entry["torch"] = f"{version[0]}.{version[1]}"
        entry["by_architecture"] = {**(entry.get("by_architecture") or {}), architecture: cublas}
        entry.update(
            lt_bytes=lt, kept=0 < cublas <= kept, lt_kept=0 < cublas + lt <= kept, source=_source(records_of_version)
        )
        entries = [e for e in entries if torch_release(e["torch"]) != version] + [entry]
        document["cublas"] = sorted(entries, key=lambda e: torch_release(e["torch"]))


def _too_few(what: str) -> UsageError:
    return UsageError(
        "too few readings for a profile",
        f"It takes {LEAST} records of a GPU with its context and its libraries, and {what}.",
        "Make them on the GPU: staticmem validate MODEL --runtime torch --device cuda -o record.json",
        code="SM232",
    )


def _plain(text: Any) -> str:
    return printable(str(text), "")[:40]


def _text(text: str, view: View) -> str:
    return text


FORMATS = (Format("yaml", "yaml yml", _text),)
