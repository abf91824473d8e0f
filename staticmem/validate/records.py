"""The record of a validation: prediction and reading side by side, and on what. It is saved as JSON, and read back.

Its schema is `schemas/record-1.schema.json`. Sizes are in bytes. What is read is checked: records come from other
people's machines.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from staticmem import files
from staticmem.errors import UsageError
from staticmem.ir.graph import Note
from staticmem.report.formats import Format
from staticmem.report.json import to_json
from staticmem.report.text import PLAIN, View, columns, printable
from staticmem.version import __version__

RECORD = "staticmem-record/1"
LIMIT = 16 << 20  # bytes of a file: a record is a few kilobytes
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
        measured = {"measured": self.measured, "difference": self.difference}
        return {"name": self.name, "predicted": predicted, **measured, "note": self.note}


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
        document = {"schema": RECORD, **to_json(self), "meters": [meter.to_json() for meter in self.meters]}
        for row in document["nodes"]["worst"]:
            row["difference"] = row["measured"] - row["predicted"]
        return document

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"


# -- making one --------------------------------------------------------------------------------------------------------


def new_record(
    path: str, format: str, kind: str, read: Mapping[str, Any], notes: Iterable[Note], **rest: Any
) -> Record:
    """The record of a run here and now: of the model in `path` on a device of a kind, of which the driver said `read`.

    `rest` are the other fields of `Record`.
    """
    device: dict[str, Any] = {"kind": kind, "name": str(read.get("name") or _processor())}
    for key, name in (("driver", "driver"), ("total", "memory")):
        if key in read:
            device[name] = read[key]
    return Record(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        staticmem=__version__,
        device=device,
        host={"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()},
        model={"name": os.path.basename(path), "sha256": sha256(path), "format": format},
        notes=tuple({"kind": n.kind, "code": n.code, "text": n.text} for n in notes),
        **rest,
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def sha256(path: str) -> str:
    """The hash of a model file, external data not included."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# -- reading one -------------------------------------------------------------------------------------------------------


def load_records(paths: Iterable[str]) -> list[tuple[str, Record]]:
    """The records of files, and of all `*.json` in folders, with their paths.

    Raises:
        UsageError: a file that is no record (SM231), or none at all (SM232).
    """
    names: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            names += sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(".json"))
        else:
            names.append(path)
    if not names:
        hint = "Make one: staticmem validate MODEL --runtime torch -o record.json"
        raise UsageError("no records", "The folders have no .json file.", hint, code="SM232")
    return [(name, load_record(name)) for name in names]


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
    kinds = {"meters": list, "nodes": dict, "explanations": list, "notes": list}
    kinds |= dict.fromkeys(("created", "staticmem", "verdict"), str)
    kinds |= dict.fromkeys(("runtime", "device", "host", "model", "scenario"), dict)
    for key, kind in kinds.items():
        if not isinstance(document.get(key), kind):
            raise _unreadable(path, f"'{key}' is missing or of the wrong kind")
    if document["verdict"] not in VERDICTS:
        raise _unreadable(path, "Its verdict is none that is known")
    try:
        _bytes(document["device"].get("memory") or 0)
        fields = {
            **{key: document[key] for key in kinds},
            "meters": tuple(_meter(row) for row in document["meters"]),
            "nodes": _nodes(document["nodes"]),
            "explanations": tuple(str(text) for text in document["explanations"]),
            "notes": tuple(note for note in document["notes"] if isinstance(note, dict)),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, "A meter, a node or the device is not as the schema says") from error
    return Record(**fields)


def _meter(row: Any) -> Meter:
    predicted = row["predicted"]
    low, high = (None, None) if predicted is None else (_bytes(predicted["low"]), _bytes(predicted["high"]))
    measured = None if row["measured"] is None else _bytes(row["measured"])
    return Meter(_text(row["name"]), low, high, measured, _text(row.get("note", "")))


def _nodes(data: Mapping[str, Any]) -> Nodes:
    worst = []
    for row in data["worst"]:
        run, predicted, measured = (_bytes(row[key]) for key in ("run", "predicted", "measured"))
        worst.append(NodeDifference(run, _text(row["name"]), _text(row["op"]), predicted, measured))
    return Nodes(_bytes(data["compared"]), _bytes(data["equal"]), tuple(worst))


def _bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**62:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _unreadable(path: str, why: str) -> UsageError:
    hint = "Records are what 'staticmem validate ... -o record.json' saves."
    return UsageError(f"{path} is not a record", f"{why}.", hint, code="SM231")


# -- showing one -------------------------------------------------------------------------------------------------------


def render(record: Record, view: View = PLAIN) -> str:
    """Lines of text: what ran, the meters, the worst nodes, notes, and the verdict last."""
    verdict = f"Verdict: {record.verdict}."
    if view.quiet:
        return view.line(verdict)
    runtime, device = record.runtime, record.device
    lines = [
        f"{printable(record.model['name'])}  ({runtime['name']} {runtime['version']}, {runtime['provider']})",
        f"  device   {device['kind']}, {printable(device['name'])}",
    ]
    for name, shape in record.scenario["inputs"].items():
        lines.append(f"  input    {printable(name)} [{', '.join(str(s) for s in shape)}]")
    lines += [f"  runs     {record.scenario['runs']}", ""]
    rows = [("Meter", "predicted", "measured", "difference", ""), *[_cells(meter, view) for meter in record.meters]]
    lines += columns(rows, view.style, right=(1, 2, 3))
    nodes = record.nodes
    if nodes.compared:
        what = "Ops: live bytes" if runtime["name"] == "torch" else "Nodes: requested bytes"
        lines += ["", f"{what} equal at {nodes.equal:,} of {nodes.compared:,}"]
        for worst in nodes.worst:
            change = f"{worst.measured - worst.predicted:+,} bytes"
            lines.append(f"  run {worst.run}  {worst.op} {printable(worst.name)}  {change}")
    for text in record.explanations:
        lines += ["", printable(text)]
    if record.notes:
        lines += ["", "Notes"]
        lines += [f"  - {printable(note['text'])} [{note['code']}]" for note in record.notes]
    return "\n".join([*lines, "", verdict]) + "\n"


def _cells(meter: Meter, view: View) -> tuple[str, str, str, str, str]:
    predicted = "-"
    if meter.low is not None and meter.high is not None:
        predicted = view.size(meter.low)
        if meter.high != meter.low:
            predicted += f" to {view.size(meter.high)}"
    measured = "-" if meter.measured is None else view.size(meter.measured)
    difference = meter.difference
    shown = "0"
    if difference:
        shown = f"{difference:+,} bytes"
    if difference is None:
        shown = ""
    return meter.name, predicted, measured, shown, meter.note


def _json(record: Record, view: View) -> str:
    return record.dumps()


FORMATS = (Format("table", "txt", render), Format("json", "json", _json))
