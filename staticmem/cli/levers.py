"""`staticmem levers MODEL`: what would make the step smaller."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli import scenario
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.errors import UsageError
from staticmem.report.formats import Formats

FORMATS = Formats("levers")

DESCRIPTION = """\
What would make a step smaller, ranked: mixed precision, checkpointing, gradient accumulation, other optimizers,
freezing, offload, ... Each is a step of its own that is analysed in full; 'compute' is the change of its floating-point
operations.
With --gpu it is device memory that is saved, and each says whether it fits; else live memory.
"""

EPILOG = """\
examples:
  staticmem levers model.pt2 --batch 64 --optimizer adamw
  staticmem levers model.pt2 --batch 64 --optimizer adamw --gpu rtx-4090
  staticmem levers model.pt2 --batch 64 --optimizer adamw --budget 16GiB
      with the set of checkpoints that reaches 16 GiB at least compute
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "levers",
        help="what would make a step smaller, and what it costs",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    scenario.add_model(parser, optional=True)
    scenario.add_scenario(parser)
    question = parser.add_argument_group("the question")
    question.add_argument(
        "--budget", type=size, metavar="SIZE",
        help="memory that the step may need (16GiB, 16GB): looks for the best set of checkpoints (default: the card's)",
    )  # fmt: skip
    add_output(parser, FORMATS)


def size(text: str) -> int:
    """A size with its unit in bytes."""
    from staticmem.units import parse_bytes

    found = parse_bytes(text)
    if not found:
        raise UsageError(
            f"--budget '{text}' is not a size", "It is a number with KiB, MiB, GiB, kB, MB or GB.",
            "Example: --budget 16GiB", "SM195",
        )  # fmt: skip
    return found


def run(args: argparse.Namespace) -> int:
    from staticmem.cli.output import check_target, emit
    from staticmem.cli.progress import Progress
    from staticmem.cli.source import model_path
    from staticmem.studies import Study
    from staticmem.studies.levers import levers

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    wanted = scenario.request(args)
    with model_path(scenario.model_of(args)) as path, Progress("levers", args.quiet) as bar:
        found = levers(Study.open(path, wanted), wanted.gpu, args.budget, bar.update)
    emit(found, chosen, args)
    return 0
