"""Results as JSON: field names of the dataclasses, bytes as integers, in the order of the fields."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

# A list of plain numbers and names over several lines (a shape); strings have no raw line break, so this is formatting.
_LIST = re.compile(r"\[\n([\s\w\",.-]*?)\n *\]")


def dumps(value: object) -> str:
    """A frozen dataclass as JSON text (ASCII) with a final newline; the same value always gives the same text."""
    text = json.dumps(to_json(value), indent=2, allow_nan=False)
    return _LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


def to_json(value: object) -> Any:
    """A frozen dataclass as plain dicts, lists, strings and numbers."""
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if f.metadata.get("json", True)]
        return {name: to_json(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value
