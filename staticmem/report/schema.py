"""JSON Schemas (draft-07: the YAML language server knows no later one) of results, made from their dataclasses.

`schemas/` has them as files. `staticmem schema KIND > schemas/KIND-1.schema.json` writes one again; tests check that
they are fresh.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from importlib import import_module
from typing import Any

DRAFT = "http://json-schema.org/draft-07/schema#"
# kind: module and class of the result, and the name of its title there
RESULTS = {
    "report": ("report.model", "Report", "SCHEMA"),
    "sweep": ("report.sweep", "Sweep", "SCHEMA"),
    "levers": ("report.sweep", "Levers", "LEVERS_SCHEMA"),
    "sizing": ("report.sizing", "Sizing", "SCHEMA"),
    "fit": ("report.fit", "Fit", "SCHEMA"),
    "run": ("report.run", "RunReport", "SCHEMA"),
    "why": ("report.why", "Why", "SCHEMA"),
    "snapshot-diff": ("validate.snapshot_diff", "SnapshotDiff", "SCHEMA"),
    "session": ("ort.report", "SessionReport", "SCHEMA"),
    "serve": ("serving.report", "ServeReport", "SCHEMA"),
    "serve-sizing": ("serving.sizing", "ServeSizing", "SCHEMA"),
    "serve-fit": ("serving.fit", "ServeFit", "SCHEMA"),
    "serve-sweep": ("serving.sweep", "ServeSweep", "SCHEMA"),
}


def schema(kind: str = "report") -> dict[str, Any]:
    """The schema of a kind of result as plain data. Unknown fields are allowed: within major 1, fields are added."""
    module, cls, title = RESULTS[kind]
    values = import_module(f"staticmem.{module}")
    return schema_of(getattr(values, cls), getattr(values, title))


def dumps(schema: Mapping[str, Any]) -> str:
    """A schema as JSON text with a final newline."""
    return json.dumps(schema, indent=2) + "\n"


def schema_of(cls: type, title: str) -> dict[str, Any]:
    """The schema of a frozen dataclass whose field `schema` has the title."""
    definitions: dict[str, Any] = {}
    root = _object(cls, definitions)
    root["properties"]["schema"] = {"const": title}
    return {"$schema": DRAFT, "title": title, **root, "definitions": dict(sorted(definitions.items()))}


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.metadata.get("json", True)]
    properties = {}
    for field in fields:
        described = _type(hints[field.name], definitions)
        if field.metadata.get("signed"):
            described.pop("minimum")
        if "keys" in field.metadata:
            described["required"] = list(field.metadata["keys"])
        properties[field.name] = described
    described_class: dict[str, Any] = {"type": "object"}
    text = " ".join((cls.__doc__ or "").split())
    if text and not text.startswith(f"{cls.__name__}("):
        described_class["description"] = text
    return {**described_class, "properties": properties, "required": [f.name for f in fields]}


def _type(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is str:
        return {"type": "string"}
    if hint is bool:
        return {"type": "boolean"}
    if hint is int:
        return {"type": "integer", "minimum": 0}
    if hint is float:
        return {"type": "number"}
    if hint is type(None):
        return {"type": "null"}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(a, definitions) for a in args]}
    if origin is tuple and args[1:] == (...,):
        return {"type": "array", "items": _type(args[0], definitions)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(args[1], definitions)}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a place for recursion to stop at
            definitions[hint.__name__] = _object(hint, definitions)
        return {"$ref": f"#/definitions/{hint.__name__}"}
    raise TypeError(f"no JSON type for {hint}")
