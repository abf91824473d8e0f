"""`staticmem calibrate RECORDS... -o profile.yaml`: a device profile from readings."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli.reporting import add_output, chosen_format
from staticmem.report.formats import Formats

FORMATS = Formats("calibrate", module="staticmem.validate.calibrate")

DESCRIPTION = """\
Turns readings into a device profile for 'analyze --profile': the CUDA context of each card, what libraries load, and
cuBLAS workspaces. The probes are runs with PyTorch on the card, at least 3 of it, with nothing else on it; take models
with convolutions and with matrix products, and 'scripts/validate_on_gpu.py' makes such a set.
"""

EPILOG = """\
examples:
  staticmem calibrate records/ -o profile.yaml
  staticmem analyze model.pt2 --batch 32 --optimizer adam --gpu rtx-4090 --profile profile.yaml
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "calibrate",
        help="a device profile from readings",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("records", metavar="RECORD", nargs="+", help="records (.json), or folders of them")
    parser.add_argument(
        "--gpu", metavar="NAME", help="the card of all records, where the driver's name is not found in the catalog"
    )
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from staticmem.cli.output import check_target, put
    from staticmem.files import temporary_folder
    from staticmem.validate import calibrate
    from staticmem.validate.records import load_records

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen_format(args, FORMATS)
    text = calibrate.dumps(calibrate.calibrated(load_records(args.records), args.gpu))
    with temporary_folder() as folder:
        calibrate.check(text, Path(folder) / "profile.yaml")  # nobody gets a profile that cannot be read
    put(text, args)
    return 0
