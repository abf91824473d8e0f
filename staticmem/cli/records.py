"""`staticmem reconcile`, `calibrate`, `compare-snapshot` and `explain-oom`: runs against what was predicted."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staticmem.cli import settings
from staticmem.cli.flags import add_model, add_scenario, add_verb
from staticmem.cli.output import Progress, add_output, chosen_format, emit, put
from staticmem.files import temporary_folder
from staticmem.report.formats import Formats

if TYPE_CHECKING:
    from staticmem.validate.snapshots import Snapshot

RECONCILE_FORMATS = Formats("reconcile", module="staticmem.validate.summary")
CALIBRATE_FORMATS = Formats("calibrate", module="staticmem.validate.calibrate")
SNAPSHOT_FORMATS = Formats("compare_snapshot", module="staticmem.validate.snapshot_compare")
OOM_FORMATS = Formats("explain_oom", module="staticmem.validate.explain_oom")

RECONCILE = """\
How far predictions are from readings, over many records that 'staticmem validate -o record.json' saved: for each meter
the median, the 95th percentile and the largest error, and the share of readings inside the predicted band.
"""

RECONCILE_EXAMPLES = """\
examples:
  staticmem reconcile records/
  staticmem reconcile a.json b.json -f md
  staticmem reconcile records/ --models models/
"""

CALIBRATE = """\
Turns readings into a device profile for 'analyze --profile': the CUDA context of each GPU, what libraries load, and
cuBLAS workspaces. The probes are runs with PyTorch on the GPU, at least 3 of it, with nothing else on it; take models
with convolutions and with matrix products, and 'scripts/readings/validate_on_gpu.py' makes such a set.
"""

CALIBRATE_EXAMPLES = """\
examples:
  staticmem calibrate records/ -o profile.yaml
  staticmem analyze model.pt2 --batch 32 --optimizer adam --gpu rtx-4090 --profile profile.yaml
"""

COMPARE_SNAPSHOT = """\
Compares a predicted memory snapshot with one that torch.cuda.memory._dump_snapshot wrote: peaks of allocated and
reserved memory, the last step allocation by allocation, what one side has and the other lacks, memory over the step.
Of a pickle only plain values are read: nothing in it runs.
"""

COMPARE_SNAPSHOT_EXAMPLES = """\
examples:
  staticmem analyze model.pt2 --batch 32 --optimizer adam -o predicted.pickle
  staticmem compare-snapshot predicted.pickle real.pickle
  staticmem compare-snapshot model.pt2 real.pickle --batch 32 --optimizer adam --gpu rtx-4090
"""

EXPLAIN_OOM = """\
Why a step ran out of memory: reads PyTorch's error in a log, or a memory snapshot that was dumped when it happened, and
compares it with the prediction for the same step. Says whether the crash was foreseen, which prediction it contradicts
otherwise, and the cheapest change of the step that fits. Without --gpu the card follows from its memory, if it can.
"""

EXPLAIN_OOM_EXAMPLES = """\
examples:
  staticmem explain-oom train.log model.pt2 --batch 64 --optimizer adamw
  staticmem explain-oom oom.pickle model.pt2 --batch 64 --optimizer adamw --gpu rtx-4090
"""


def add_reconcile(verbs: Any) -> None:
    about = "errors of many validations, meter by meter"
    parser = add_verb(verbs, "reconcile", reconcile, about, RECONCILE, RECONCILE_EXAMPLES)
    _add_records(parser)
    about = "predict again, with this version, for the models in this folder, recognised by their SHA-256; repeatable"
    parser.add_argument("--models", metavar="DIR", action="append", default=[], help=about)
    add_output(parser, RECONCILE_FORMATS)


def add_calibrate(verbs: Any) -> None:
    parser = add_verb(verbs, "calibrate", calibrate, "a device profile from readings", CALIBRATE, CALIBRATE_EXAMPLES)
    _add_records(parser)
    about = "the GPU of all records, where the catalog lacks the driver's name"
    parser.add_argument("--gpu", metavar="NAME", help=about)
    add_output(parser, CALIBRATE_FORMATS)


def add_compare_snapshot(verbs: Any) -> None:
    about = "a prediction against PyTorch's own memory snapshot"
    parser = add_verb(verbs, "compare-snapshot", compare_snapshot, about, COMPARE_SNAPSHOT, COMPARE_SNAPSHOT_EXAMPLES)
    about = "a snapshot of 'analyze -f snapshot', or an .onnx or .pt2 file"
    parser.add_argument("predicted", metavar="PREDICTED", help=about)
    parser.add_argument("real", metavar="REAL", help="the snapshot that PyTorch wrote")
    add_scenario(parser)
    add_output(parser, SNAPSHOT_FORMATS)


def add_explain_oom(verbs: Any) -> None:
    about = "why a step ran out of memory, and the smallest change that fits"
    parser = add_verb(verbs, "explain-oom", explain_oom, about, EXPLAIN_OOM, EXPLAIN_OOM_EXAMPLES)
    parser.add_argument("crash", metavar="CRASH", help="a log with PyTorch's error, or a memory snapshot")
    add_model(parser, optional=True)
    add_scenario(parser)
    add_output(parser, OOM_FORMATS)


def _add_records(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", metavar="RECORD", nargs="+", help="records (.json), or folders of them")


def reconcile(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, RECONCILE_FORMATS)
    from staticmem.validate.records import load_records
    from staticmem.validate.summary import summary

    records = load_records(args.records)
    if args.models:
        from staticmem.validate.summary import models_in, repredicted

        models = models_in(args.models)
        for index, (path, record) in enumerate(records):
            model = models.get(str(record.model.get("sha256")))
            if model is not None:
                records[index] = path, repredicted(record, model)
    emit(summary(records), chosen, args)
    return 0


def calibrate(args: argparse.Namespace) -> int:
    chosen_format(args, CALIBRATE_FORMATS)
    from staticmem.validate import calibrate
    from staticmem.validate.records import load_records

    text = calibrate.dumps(calibrate.calibrated(load_records(args.records), args.gpu))
    with temporary_folder() as folder:
        calibrate.check(text, Path(folder) / "profile.yaml")  # a profile that cannot be read is never written
    put(text, args)
    return 0


def compare_snapshot(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, SNAPSHOT_FORMATS)
    from staticmem.validate import snapshot_compare, snapshots

    real = snapshots.read(args.real)
    emit(snapshot_compare.compare(_predicted(args), real), chosen, args)
    return 0


def explain_oom(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, OOM_FORMATS)
    from staticmem.studies import Study
    from staticmem.validate import explain_oom

    error = explain_oom.read(args.crash)
    request = settings.request(args)
    with settings.model_path(settings.model_of(args)) as path, Progress("levers", args.quiet, model=path) as bar:
        result = explain_oom.explain(error, Study.open(path, request), bar.update)
    emit(result, chosen, args)
    return 0


def _predicted(args: argparse.Namespace) -> Snapshot:
    """A saved snapshot, recognised by its first byte; else the snapshot of the model's step."""
    from staticmem.validate import plain_pickle, snapshots

    try:
        with open(args.predicted, "rb") as file:
            saved = file.read(1) == b"\x80"
    except OSError:
        saved = False  # the frontend says what is wrong with the path
    if saved:
        return snapshots.read(args.predicted)
    from staticmem.report.formats.report_viewers import dump_snapshot
    from staticmem.studies import Study, without_cycle_search  # late: two snapshots need no engine
    from staticmem.studies.device import replay_of

    with without_cycle_search():
        study = Study.open(args.predicted, settings.request(args))
        data = dump_snapshot(replay_of(study.request, study.result))
    return snapshots.snapshot_of(plain_pickle.loads(data), args.predicted)
