"""`staticmem schema`: the JSON Schema of the report. Not in the list of verbs: it is for developers of tools."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("schema", description="Prints the JSON Schema of 'analyze --format json'.")
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def run(args: argparse.Namespace) -> int:
    from staticmem.report.schema import dumps

    sys.stdout.write(dumps())
    return 0
