"""`staticmem schema`: the JSON Schemas of what staticmem reads and writes. Not listed: it is for tools."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from staticmem.cli.values import one_of

KINDS = ("report", "config", "sweep", "levers", "sizing", "session")


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "schema",
        description="Prints a JSON Schema (draft-07): of 'analyze -f json' (report), of configs, of 'sweep -f json'.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument(
        "kind", nargs="?", default="report", metavar="KIND", type=one_of("schema", KINDS), help=", ".join(KINDS)
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def run(args: argparse.Namespace) -> int:
    from staticmem.config import fields
    from staticmem.report import schema

    made = fields.schema() if args.kind == "config" else schema.schema(args.kind)
    sys.stdout.write(schema.dumps(made))
    return 0
