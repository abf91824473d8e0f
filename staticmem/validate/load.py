"""Records from their files, checked: they come from other people's machines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from staticmem import files
from staticmem.errors import UsageError
from staticmem.validate.record import RECORD, VERDICTS, Meter, NodeDifference, Nodes, Record

LIMIT = 16 << 20  # bytes: a record is a few kilobytes
_KINDS: Mapping[str, type] = {
    "created": str, "staticmem": str, "runtime": dict, "device": dict, "host": dict, "model": dict, "scenario": dict,
    "meters": list, "nodes": dict, "verdict": str, "explanations": list, "notes": list,
}  # fmt: skip


def load_records(paths: Iterable[str]) -> list[tuple[str, Record]]:
    """The records of files, and of all `*.json` in folders, with their paths.

    Raises:
        UsageError: a file that is no record (SM231), or none at all (SM232).
    """
    found = [(path, load_record(path)) for path in _files(paths)]
    if not found:
        raise UsageError(
            "no records",
            "The folders have no .json file.",
            "Make one: staticmem validate MODEL --runtime torch -o record.json",
            code="SM232",
        )
    return found


def _files(paths: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            found += sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(".json"))
        else:
            found.append(path)
    return found


def load_record(path: str) -> Record:
    """The record of a file.

    Raises:
        UsageError: it cannot be read, or is no record of this version (SM231).
    """
    try:
        document = json.loads(files.read(path, LIMIT))
    except OSError as error:
        raise _unreadable(path, str(error.strerror or error)) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, "It is not JSON") from error
    return record_of(document, path)


def record_of(document: Any, path: str) -> Record:
    """The record of a JSON document; `path` is for the error."""
    if not isinstance(document, dict) or document.get("schema") != RECORD:
        raise _unreadable(path, f"Its schema is not {RECORD}")
    for key, kind in _KINDS.items():
        if not isinstance(document.get(key), kind):
            raise _unreadable(path, f"'{key}' is missing or of the wrong kind")
    if document["verdict"] not in VERDICTS:
        raise _unreadable(path, "Its verdict is none that is known")
    try:
        meters = tuple(_meter(row) for row in document["meters"])
        nodes = _nodes(document["nodes"])
        _bytes(document["device"].get("memory") or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, "A meter, a node or the device is not as the schema says") from error
    kept = {key: document[key] for key in ("created", "staticmem", "runtime", "device", "host", "model", "scenario")}
    return Record(
        **kept,
        meters=meters,
        nodes=nodes,
        verdict=document["verdict"],
        explanations=tuple(str(text) for text in document["explanations"]),
        notes=tuple(note for note in document["notes"] if isinstance(note, dict)),
    )


def _meter(row: Any) -> Meter:
    predicted = row["predicted"]
    low, high = (None, None) if predicted is None else (_bytes(predicted["low"]), _bytes(predicted["high"]))
    measured = None if row["measured"] is None else _bytes(row["measured"])
    return Meter(_text(row["name"]), low, high, measured, _text(row.get("note", "")))


def _nodes(data: Mapping[str, Any]) -> Nodes:
    worst = tuple(
        NodeDifference(
            _bytes(row["run"]), _text(row["name"]), _text(row["op"]), _bytes(row["predicted"]), _bytes(row["measured"])
        )
        for row in data["worst"]
    )
    return Nodes(_bytes(data["compared"]), _bytes(data["equal"]), worst)


def _bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**62:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _unreadable(path: str, why: str) -> UsageError:
    return UsageError(
        f"{path} is not a record", f"{why}.", "Records are what 'staticmem validate ... -o record.json' saves.",
        code="SM231",
    )  # fmt: skip
