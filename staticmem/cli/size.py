"""`staticmem size MODEL|CONFIG`: which cards train or run it, and how many."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from staticmem.cli import scenario
from staticmem.cli.cards import add_filters, choose
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.errors import UsageError
from staticmem.report.formats import Formats

FORMATS = Formats("sizing")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")

DESCRIPTION = """\
Which cards have the memory, with what batch, and how many are needed: the report before a purchase.
MODEL is an ONNX file or an archive of torch.export (.pt2); CONFIG is a YAML file that names one.
"""

EPILOG = """\
examples:
  staticmem size model.pt2 --batch 64 --optimizer adamw --amp bf16
  staticmem size model.pt2 --batch 64 --optimizer adamw -o sizing.html
  staticmem size model.pt2 --optimizer adam --gpu l40s --gpu h100-sxm-80gb --gpu 24GB
  staticmem size model.pt2 --optimizer adam --vendor nvidia --min-memory 24GB --year 2022 --prices prices.yaml
  staticmem size llm.pt2 --optimizer adamw --amp bf16 --parallel zero3
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "size",
        help="which cards have the memory, and how many are needed",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("model", metavar="MODEL|CONFIG", nargs="?", help="an .onnx or .pt2 file, or a .yaml config")
    scenario.add_scenario(parser, many_gpus=True)
    add_filters(parser, own_file=False)
    output = add_output(parser, FORMATS)
    output.add_argument("--prices", metavar="FILE", help="YAML with your prices of cards")
    output.add_argument("--no-batches", action="store_true", help="do not search the largest batch of each card")
    output.add_argument(
        "--date", metavar="YYYY-MM-DD", help="the date in the report (default: that of SOURCE_DATE_EPOCH, else none)"
    )


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 where the report could be made."""
    import shlex

    from staticmem.cli.output import check_target, emit
    from staticmem.cli.progress import Progress
    from staticmem.cli.source import model_path
    from staticmem.devices import gpus
    from staticmem.studies import Study
    from staticmem.studies.sizing import Options, size
    from staticmem.studies.sweep import is_config

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    names, args.gpu = args.gpu, None
    if args.model is not None and is_config(args.model):
        if args.config is not None:
            raise UsageError(
                "two configs are given", f"{args.model} and --config {args.config}.", "Give one of them.", "SM197"
            )
        args.config, args.model = args.model, None
    wanted = scenario.request(args)
    config = scenario.settings(args)
    cards = choose(args, names or (config.gpus if config is not None else ()))
    prices = {}
    if args.prices is not None:
        from staticmem.studies.prices import load

        prices = load(args.prices, {**gpus.catalog(args.gpus_file), **{card.slug: card for card in cards}})
    command = shlex.join(["staticmem", *args.words])
    with model_path(scenario.model_of(args)) as path, Progress("cards", args.quiet) as bar:
        study = Study.open(path, wanted)
        found = size(study, Options(cards, prices, _date(args.date), command, not args.no_batches, bar.update))
    emit(found, chosen, args)
    return 0


def _date(given: str | None) -> str | None:
    """The date of the report; none unless somebody says it, so that the same input gives the same report."""
    import datetime

    if given is not None:
        try:
            if not DATE.fullmatch(given):
                raise ValueError
            return datetime.date.fromisoformat(given).isoformat()
        except ValueError:
            raise UsageError(
                f"--date '{given}' is not a date",
                "It is a year, a month and a day.",
                "Example: --date 2026-11-21",
                "SM110",
            ) from None
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isascii() and epoch.isdigit() and len(epoch) <= 11:
        return datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc).date().isoformat()
    return None
