"""`staticmem check [CONFIG|MODEL]`: budgets as a gate."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from staticmem.cli import scenario
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.cli.values import positive
from staticmem.errors import UsageError, did_you_mean
from staticmem.report.formats import Formats

FORMATS = Formats("check")

DESCRIPTION = """\
Checks the configurations of a config (what_if, scenarios, or the one that it describes) against its budgets.
Exit code 1 if a budget of level error is exceeded, 2 if a configuration cannot be analysed.
"""

EPILOG = """\
examples:
  staticmem check                                        the staticmem.yaml of this repository
  staticmem check ci.yaml -f github
  staticmem check model.pt2 --batch 32 --optimizer adam --budget live=20GiB --budget device=23GiB --gpu l4
  staticmem check ci.yaml -o memory.xml                  JUnit
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "check",
        help="budgets of memory as a gate for CI",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("model", metavar="CONFIG|MODEL", nargs="?", help="a .yaml config, or an .onnx or .pt2 file")
    budgets = parser.add_argument_group("budgets")
    budgets.add_argument(
        "--budget", action="append", default=[], metavar="METRIC=SIZE",
        help="a limit for live, allocated, reserved or device, e.g. live=20GiB; repeatable; beside those of the config",
    )  # fmt: skip
    budgets.add_argument(
        "-j", "--jobs", type=positive("--jobs"), metavar="N", help="local processes (default: one a core)"
    )
    budgets.add_argument("--exit-zero", action="store_true", help="exit 0 also where a budget is exceeded")
    scenario.add_scenario(parser, many_gpus=True)
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    from staticmem.cli.output import check_target, emit
    from staticmem.cli.progress import Progress
    from staticmem.studies.budgets import check
    from staticmem.studies.points import points
    from staticmem.studies.sweep import run as evaluate

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    gpus, args.gpu = args.gpu, None
    config = scenario.config_of(args)
    budgets = (*config.budgets, *(_budget(text) for text in args.budget))
    if not budgets:
        raise UsageError(
            "no budgets to check", "Neither the config nor the command line sets one.",
            "Add --budget live=20GiB, or `budgets: [{metric: live, limit: 20 GiB}]` to the config.", "SM210",
        )  # fmt: skip
    meter = "live" if all(budget.metric == "live" for budget in budgets) else "device"
    made = points(config, args.model, scenario.flags(args), {})
    with Progress("configurations", args.quiet) as bar:
        cards = () if meter == "live" else tuple(gpus or config.gpus)
        found = evaluate(made, cards, meter, jobs=args.jobs or os.cpu_count() or 1, progress=bar.update)
    outcome = check(found, budgets)
    emit(outcome, chosen, args)
    if outcome.broken:
        sys.stderr.write("error: a configuration could not be analysed\n")
        return 2
    return 1 if outcome.failed and not args.exit_zero else 0


def _budget(text: str) -> Any:
    from staticmem.config.config import Budget
    from staticmem.config.fields import METRICS
    from staticmem.units import parse_bytes

    metric, equals, size = text.partition("=")
    limit = parse_bytes(size)
    if not equals or limit is None:
        raise UsageError(
            f"--budget '{text}' is not METRIC=SIZE", "It limits a meter.", "Example: --budget live=20GiB", "SM210"
        )
    if metric not in METRICS:
        raise UsageError(
            f"--budget '{text}': no meter '{metric}'", f"It is one of {', '.join(METRICS)}.",
            did_you_mean(metric, METRICS), "SM210",
        )  # fmt: skip
    return Budget(metric, limit)
