"""`staticmem trace MODEL`: what appears and goes at every stage of a step."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli import scenario
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.cli.values import byte_size, one_of
from staticmem.report.formats import Formats

FORMATS = Formats("trace")
PHASES = ("setup", "forward", "backward", "optimizer")

DESCRIPTION = """\
Every stage of a step in order: the tensors that appear (+) and go (-), grouped by shape and type with counts and
sizes, and the total that is alive then. It is what a memory tracker prints from a live process, without running.
"""

EPILOG = """\
examples:
  staticmem trace model.pt2 --batch 32 --optimizer adam
  staticmem trace model.pt2 --batch 32 --optimizer adam --phase backward --min-size 64MiB
  staticmem trace model.pt2 --batch 32 --optimizer adam --module layer4
  staticmem trace model.pt2 --batch 32 --optimizer adam -o trace.csv
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "trace",
        help="what appears and goes at every stage of a step",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    scenario.add_model(parser)
    scenario.add_scenario(parser)
    which = parser.add_argument_group("which stages")
    which.add_argument(
        "--phase", type=one_of("--phase", PHASES), metavar="PHASE", help="setup, forward, backward or optimizer"
    )
    which.add_argument("--module", metavar="PATH", help="of one module and those in it, e.g. layer4.0")
    which.add_argument(
        "--min-size", type=byte_size("--min-size"), default=0, metavar="SIZE",
        help="that make or free at least so much, e.g. 64MiB",
    )  # fmt: skip
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    from staticmem.cli.output import check_target, emit
    from staticmem.cli.source import model_path
    from staticmem.report import changes
    from staticmem.studies import Study, without_cycle_search

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    wanted = scenario.request(args)
    with model_path(args.model) as path, without_cycle_search():
        study = Study.open(path, wanted)
        listing = changes.changes(study.model.path, study.result.graph, study.lifetimes)
    emit(changes.select(listing, args.phase, args.module, args.min_size), chosen, args)
    return 0
