"""`staticmem diff BEFORE AFTER`: what changed between two models or two saved reports."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from staticmem.cli import scenario
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.cli.values import increase, positive
from staticmem.report.formats import Formats

if TYPE_CHECKING:
    from staticmem.report.model import Report

FORMATS = Formats("diff")

DESCRIPTION = """\
What changed: the meters, categories and modules at the peak, tensors that are new, gone or of another size.
Each side is a model, a config (.yaml), or a report that 'analyze -o FILE.json' saved. Flags of the scenario hold for
models and configs.
"""

EPILOG = """\
examples:
  staticmem diff old.pt2 new.pt2 --batch 32 --optimizer adam
  staticmem analyze model.pt2 --optimizer adam --explain-peak -o main.json
  staticmem diff main.json model.pt2 --optimizer adam --max-increase 5%%
      exit code 1 if the peak grows by more than 5 %%
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "diff",
        help="what changed between two models or saved reports",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument(
        "before", metavar="BEFORE", help="an .onnx or .pt2 file, a config (.yaml), or a saved report (.json)"
    )
    parser.add_argument("after", metavar="AFTER", help="the same")
    scenario.add_scenario(parser)
    output = add_output(parser, FORMATS)
    output.add_argument("--top", type=positive("--top"), default=10, metavar="N", help="rows of a kind (default 10)")
    output.add_argument(
        "--max-increase", type=increase("--max-increase"), metavar="SIZE|PERCENT",
        help="exit 1 if the peak of live memory grows by more, e.g. 512MiB or 5%%",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where the peak grows by more than --max-increase."""
    from staticmem.cli.output import check_target, emit
    from staticmem.report.diff import diff
    from staticmem.units import format_bytes

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    before, after = (_side(path, args) for path in (args.before, args.after))
    found = diff(before, after)
    emit(found, chosen, args)
    if args.max_increase is not None:
        limit = args.max_increase(before.peak.live_bytes)
        grown = after.peak.live_bytes - before.peak.live_bytes
        if grown > limit:
            by = format_bytes(grown, args.units)
            sys.stderr.write(f"max-increase: the peak grows by {by}, {format_bytes(limit, args.units)} are allowed\n")
            return 1
    return 0


def _side(path: str, args: argparse.Namespace) -> Report:
    if path.lower().endswith(".json"):
        from staticmem.report.load import load_report

        return load_report(path)
    from staticmem.studies import run as analyze

    if path.lower().endswith((".yaml", ".yml", ".toml")):
        side = argparse.Namespace(**{**vars(args), "config": path, "model": None})
        vars(side).pop("settings", None)  # those of another config
        return analyze(scenario.model_of(side), scenario.request(side))
    return analyze(path, scenario.request(args))
