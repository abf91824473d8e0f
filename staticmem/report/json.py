"""The report as JSON: field names of the dataclasses, bytes as integers, in the order of the fields."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from staticmem.report.model import Report

# A list of plain numbers and names over several lines (a shape); strings have no raw line break, so this is formatting.
_LIST = re.compile(r"\[\n([\s\w\",.-]*?)\n *\]")


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain dicts, lists, strings and numbers."""
    plain = _plain(report)
    assert isinstance(plain, dict)
    return plain


def dumps(report: Report) -> str:
    """The report as JSON text (ASCII) with a final newline; the same report always gives the same text."""
    return plain_text(report)


def plain_text(value: Any) -> str:
    """Any frozen dataclass as JSON text, in the same manner."""
    text = json.dumps(_plain(value), indent=2, allow_nan=False)
    return _LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.metadata.get("json", True)
        }
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value
