"""`staticmem report SAVED`: a saved report in another format."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli.reporting import add_output, chosen_format
from staticmem.cli.values import positive
from staticmem.report.formats import Formats

FORMATS = Formats("report", saved=True)

DESCRIPTION = """\
Shows a report that 'staticmem analyze MODEL -o FILE.json' saved, in any format. The model is not needed.
"""

EPILOG = """\
examples:
  staticmem report saved.json
  staticmem report saved.json -o report.md
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "report",
        help="a saved report in another format",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser, explain_peak=False)
    parser.add_argument("report", metavar="SAVED", help="a report in JSON")
    output = add_output(parser, FORMATS)
    output.add_argument("--top", type=positive("--top"), metavar="N", help="how many tensors to list")
    output.add_argument("--explain-peak", action="store_true", help="everything that it has, by module")


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from staticmem.cli.output import check_target, emit, warn
    from staticmem.report.load import load_report

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    report = load_report(args.report)
    if args.top is not None:
        report = replace(report, top_tensors=report.top_tensors[: args.top])
    if args.quiet and chosen.name == "table":
        warn(report.warnings)
    emit(report, chosen, args)
    return 0
