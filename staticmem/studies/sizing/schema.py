"""The JSON Schema (draft-07) of the sizing report; `staticmem schema sizing > schemas/sizing-1.schema.json`."""

from __future__ import annotations

import json

from staticmem.report.schema import schema_of
from staticmem.studies.sizing.model import SCHEMA, Sizing


def dumps() -> str:
    """The schema as JSON text with a final newline."""
    return json.dumps(schema_of(Sizing, SCHEMA), indent=2) + "\n"
