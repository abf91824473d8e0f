"""`staticmem reconcile RECORDS...`: the errors of many validations, meter by meter."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli.reporting import add_output, chosen_format
from staticmem.report.formats import Formats

FORMATS = Formats("reconcile", module="staticmem.validate.summary")

DESCRIPTION = """\
How far predictions are from readings, over many records that 'staticmem validate -o record.json' saved: for each meter
the median, the 95th percentile and the largest error, and the share of readings inside the predicted band.
"""

EPILOG = """\
examples:
  staticmem reconcile records/
  staticmem reconcile a.json b.json -f md
  staticmem reconcile records/ --models models/
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "reconcile",
        help="errors of many validations, meter by meter",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("records", metavar="RECORD", nargs="+", help="records (.json), or folders of them")
    parser.add_argument(
        "--models", metavar="DIR", action="append", default=[],
        help="predict again, with this version, for the models in this folder, told by their SHA-256; repeatable",
    )  # fmt: skip
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    from staticmem.cli.output import check_target, emit
    from staticmem.validate.records import load_records
    from staticmem.validate.summary import summary

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    records = load_records(args.records)
    if args.models:
        from staticmem.validate.repredict import models_in, repredicted

        models = models_in(args.models)
        for index, (path, record) in enumerate(records):
            model = models.get(str(record.model.get("sha256")))
            if model is not None:
                records[index] = path, repredicted(record, model)
    emit(summary(records), chosen, args)
    return 0
