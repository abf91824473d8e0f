"""`staticmem doctor`: what is installed, what it is used for, and what is wrong with it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from staticmem.cli.reporting import add_output, chosen_format
from staticmem.report.formats import Formats

FORMATS = Formats("doctor", module="staticmem.cli.environment")

DESCRIPTION = """\
The versions of staticmem, Python and the packages that it uses or can use, what each is for, the age of the hardware
data, and what the terminal can show. Exit code 1 if something that is needed is missing or too old.
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "doctor",
        help="what is installed and what is missing",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where a required package is missing or too old."""
    from staticmem.cli.environment import inspect, problems
    from staticmem.cli.output import check_target, emit

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    found = inspect(encoding=sys.stdout.encoding or "ascii")
    emit(found, chosen, args)
    return 1 if problems(found) else 0
