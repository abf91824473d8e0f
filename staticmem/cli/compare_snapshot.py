"""`staticmem compare-snapshot PREDICTED REAL.pickle`: a prediction against PyTorch's own memory snapshot."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from staticmem.cli import scenario
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.report.formats import Formats

if TYPE_CHECKING:
    from staticmem.validate.snapshots import Snapshot

FORMATS = Formats("compare_snapshot", module="staticmem.validate.snapshot_compare")

DESCRIPTION = """\
Compares a predicted memory snapshot with one that torch.cuda.memory._dump_snapshot wrote: peaks of allocated and
reserved memory, the last step allocation by allocation, what one side has and the other lacks, memory over the step.
Of a pickle only plain values are read: nothing in it runs.
"""

EPILOG = """\
examples:
  staticmem analyze model.pt2 --batch 32 --optimizer adam -o predicted.pickle
  staticmem compare-snapshot predicted.pickle real.pickle
  staticmem compare-snapshot model.pt2 real.pickle --batch 32 --optimizer adam --gpu rtx-4090
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "compare-snapshot",
        help="a prediction against PyTorch's own memory snapshot",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument(
        "predicted", metavar="PREDICTED", help="a snapshot of 'analyze -f snapshot', or an .onnx or .pt2 file"
    )
    parser.add_argument("real", metavar="REAL", help="the snapshot that PyTorch wrote")
    scenario.add_scenario(parser)
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    from staticmem.cli.output import check_target, emit
    from staticmem.validate import snapshot_compare, snapshots

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    real = snapshots.read(args.real)
    emit(snapshot_compare.compare(_predicted(args), real), chosen, args)
    return 0


def _predicted(args: argparse.Namespace) -> Snapshot:
    """A saved snapshot, told by its first byte; else the snapshot of the model's step."""
    from staticmem.validate import plain_pickle, snapshots

    try:
        with open(args.predicted, "rb") as file:
            saved = file.read(1) == b"\x80"
    except OSError:
        saved = False  # the frontend says what is wrong with the path
    if saved:
        return snapshots.read(args.predicted)
    from staticmem.studies import Study, without_cycle_search
    from staticmem.studies.export import snapshot

    with without_cycle_search():
        data = snapshot(Study.open(args.predicted, scenario.request(args)))
    return snapshots.snapshot_of(plain_pickle.loads(data), args.predicted)
