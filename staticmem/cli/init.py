"""`staticmem init`: a commented config, and the JSON Schema that editors check it with."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from staticmem import files

DESCRIPTION = """\
Writes a commented config, and beside it the JSON Schema with which editors check and complete it.
Neither file is overwritten unless --force says so.
"""

SCHEMA_NAME = "staticmem.schema.json"


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "init",
        help="write a commented config, staticmem.yaml",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="the model that the config names (default: model.pt2)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", default="staticmem.yaml", help="default: staticmem.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def run(args: argparse.Namespace) -> int:
    from staticmem.cli.output import check_target, write_atomically
    from staticmem.config.fields import schema as config_schema
    from staticmem.config.template import template
    from staticmem.report.schema import dumps

    if args.output == "-":
        sys.stdout.write(template(args.model or "model.pt2", f"./{SCHEMA_NAME}"))
        return 0
    folder = os.path.dirname(args.output)
    schema, described = os.path.join(folder, SCHEMA_NAME), dumps(config_schema())
    check_target(args.output, args.force)
    if not _same(schema, described):
        check_target(schema, args.force)
        write_atomically(schema, described)
    model = args.model or "model.pt2"
    if args.model is not None and folder and not os.path.isabs(model):
        model = os.path.relpath(model, folder)
    write_atomically(args.output, template(model, f"./{SCHEMA_NAME}"))
    sys.stderr.write(f"Wrote {args.output} and {schema}\n")
    return 0


def _same(path: str, text: str) -> bool:
    try:
        return files.read(path, 1 << 20).decode("utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False
