"""`staticmem gpus`: the catalog of cards."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from staticmem.cli.cards import add_filters, choose
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.report.formats import Formats

if TYPE_CHECKING:
    pass

FORMATS = Formats("gpus")

DESCRIPTION = """\
The cards that --gpu and 'staticmem size' know: what is sold, what nvidia-smi shows, what a process can use.
A star marks a card with figures that have no source of their own.
"""

EPILOG = """\
examples:
  staticmem gpus
  staticmem gpus --vendor nvidia --min-memory 40GB --year 2022
  staticmem gpus --class consumer -f csv
  staticmem gpus --gpus-file mine.yaml -f json     # every figure with its source
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "gpus",
        help="the catalog of cards",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    add_filters(parser, own_file=True)
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    from staticmem.cli.output import check_target, emit

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    emit(choose(args), chosen, args)
    return 0
