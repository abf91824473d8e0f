"""`staticmem sweep CONFIG|MODEL`: the memory of many configurations."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from staticmem.cli import scenario
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.cli.values import one_of, positive
from staticmem.errors import UsageError
from staticmem.report.formats import Formats

FORMATS = Formats("sweep")

DESCRIPTION = """\
The memory of many configurations: the cross product of lists (what_if, --what-if), or the scenarios of a config.
CONFIG is a YAML file ('staticmem init' writes one). Given a model in its place, no config is needed.
"""

EPILOG = """\
examples:
  staticmem sweep staticmem.yaml
  staticmem sweep model.pt2 --what-if batch=16,32,64 --what-if optimizer=sgd,adam
  staticmem sweep model.pt2 --optimizer adam --what-if batch=8,16 --gpu rtx-4090 --gpu 80GB
  staticmem sweep model.pt2 --optimizer adam --what-if amp=none,bf16 --gpu l4 --max-batch
  staticmem sweep staticmem.yaml -o sweep.csv
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "sweep",
        help="the memory of many configurations: batches, resolutions, optimizers, cards",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("model", metavar="CONFIG|MODEL", nargs="?", help="a .yaml config, or an .onnx or .pt2 file")
    what = parser.add_argument_group("what is tried")
    what.add_argument(
        "--what-if", action="append", default=[], metavar="NAME=A,B",
        help="values to try: batch, resolution, optimizer, amp, checkpoint, ... or dims.NAME; repeatable",
    )  # fmt: skip
    what.add_argument(
        "--meter", type=one_of("--meter", ("live", "device")), metavar="METER",
        help="live (fast: steps of one structure are evaluated as arrays), or device (each is run; default with a GPU)",
    )  # fmt: skip
    what.add_argument("--max-batch", action="store_true", help="the largest batch of each configuration on each card")
    what.add_argument(
        "-j", "--jobs", type=positive("--jobs"), metavar="N", help="local processes (default: one a core)"
    )
    scenario.add_scenario(parser, many_gpus=True)
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 where something could be analysed."""
    from staticmem.cli.output import check_target, emit
    from staticmem.cli.progress import Progress
    from staticmem.studies.points import parse_axes, points
    from staticmem.studies.sweep import run as evaluate

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    gpus, args.gpu = args.gpu, None
    config = scenario.config_of(args)
    made = points(config, args.model, scenario.flags(args), parse_axes(args.what_if))
    cards = tuple(gpus or config.gpus)
    jobs = args.jobs or os.cpu_count() or 1
    with Progress("configurations", args.quiet) as bar:
        if args.max_batch:
            from staticmem.studies.largest import with_largest

            found = with_largest(made, cards, jobs=jobs, progress=bar.update)
        else:
            found = evaluate(made, cards, args.meter, jobs=jobs, progress=bar.update)
    errors = [row.error for row in found.rows if row.error is not None]
    if errors and len(errors) == len(found.rows):
        raise UsageError(errors[0].what, errors[0].why, errors[0].hint, errors[0].code)
    emit(found, chosen, args)
    if errors:
        sys.stderr.write(f"warning: {len(errors):,} of {len(found.rows):,} configurations could not be analysed\n")
    return 0
