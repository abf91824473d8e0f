"""The JSON Schema (draft-07: the YAML language server knows no later one) of configs and of sweeps, made from the code.

`schemas/` has them as files; `staticmem schema config > schemas/config-1.schema.json` writes one again.
"""

from __future__ import annotations

import json
from typing import Any

from staticmem.config.fields import ROOT, VERSION
from staticmem.report.schema import schema_of
from staticmem.studies.sweeps.model import LEVERS_SCHEMA, SCHEMA, Levers, Sweep

DRAFT = "http://json-schema.org/draft-07/schema#"


def config_schema() -> dict[str, Any]:
    """The schema of a config. A table of pyproject.toml is the same without `version`."""
    return {"$schema": DRAFT, "title": f"staticmem config {VERSION}", **ROOT.schema(), "required": ["version"]}


def sweep_schema() -> dict[str, Any]:
    """The schema of `staticmem sweep -f json`."""
    return schema_of(Sweep, SCHEMA)


def levers_schema() -> dict[str, Any]:
    """The schema of `staticmem levers -f json`."""
    return schema_of(Levers, LEVERS_SCHEMA)


def dumps(schema: dict[str, Any]) -> str:
    """A schema as JSON text with a final newline."""
    return json.dumps(schema, indent=2) + "\n"
