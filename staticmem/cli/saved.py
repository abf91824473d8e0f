"""`staticmem report` and `staticmem diff`: saved reports in other formats, and beside each other or beside models."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from staticmem.cli import settings
from staticmem.cli.flags import add_scenario, add_verb, increase, positive
from staticmem.cli.output import add_output, chosen_format, emit, warn
from staticmem.config.locate import is_config
from staticmem.errors import UsageError
from staticmem.report.formats import Formats
from staticmem.scenario.request import OPTIONS
from staticmem.units import format_bytes

if TYPE_CHECKING:
    from staticmem.report.model import Report

REPORT_FORMATS, DIFF_FORMATS = Formats("report", saved=True), Formats("diff")
SNAPSHOT_FORMATS = Formats("snapshot_diff", module="staticmem.validate.snapshot_diff")

REPORT = """\
Shows a report that 'staticmem analyze MODEL -o FILE.json' saved, in any format. The model is not needed.
"""

REPORT_EXAMPLES = """\
examples:
  staticmem report saved.json
  staticmem report saved.json -o report.md
"""

DIFF = """\
What changed: the meters, categories and modules at the peak, tensors that are new, gone or of another size.
Each side is a model, a config (.yaml), or a report that 'analyze -o FILE.json' saved. Flags of the scenario hold for
models and configs.

Memory snapshots of PyTorch (torch.cuda.memory._dump_snapshot) are compared by source line; three or more are the ranks
of one run: the largest, and what it has more than the smallest.
"""

DIFF_EXAMPLES = """\
examples:
  staticmem diff old.pt2 new.pt2 --batch 32 --optimizer adam
  staticmem analyze model.pt2 --optimizer adam --explain-peak -o main.json
  staticmem diff main.json model.pt2 --optimizer adam --max-increase 5%
      exit code 1 if the peak grows by more than 5 %
  staticmem diff before.pickle after.pickle
  staticmem diff rank*.pickle
"""


def add_report(verbs: Any) -> None:
    parser = add_verb(verbs, "report", show, "a saved report in another format", REPORT, REPORT_EXAMPLES)
    parser.add_argument("report", metavar="SAVED", help="a report in JSON")
    output = add_output(parser, REPORT_FORMATS)
    output.add_argument("--top", type=positive("--top"), metavar="N", help="how many tensors to list")
    output.add_argument("--explain-peak", action="store_true", help="everything that it has, by module")


def add_diff(verbs: Any) -> None:
    parser = add_verb(verbs, "diff", compare, "what changed between two models or saved reports", DIFF, DIFF_EXAMPLES)
    about = "an .onnx or .pt2 file, a config (.yaml), a saved report (.json), or a memory snapshot (.pickle)"
    parser.add_argument("before", metavar="BEFORE", help=about)
    parser.add_argument("after", metavar="AFTER", nargs="+", help="the same; several of memory snapshots alone")
    add_scenario(parser)
    output = add_output(parser, DIFF_FORMATS)
    output.add_argument("--top", type=positive("--top"), default=10, metavar="N", help="rows of a kind (default 10)")
    about = "exit 1 if the peak of live memory grows by more, e.g. 512MiB or 5%%"
    output.add_argument("--max-increase", type=increase("--max-increase"), metavar="SIZE|PERCENT", help=about)


def show(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, REPORT_FORMATS)
    from staticmem.report.load import load_report

    report = load_report(args.report)
    if args.top is not None:
        report = replace(report, top_tensors=report.top_tensors[: args.top])
    if args.quiet and chosen.name == "table":
        warn(report.warnings)
    emit(report, chosen, args)
    return 0


def compare(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where the peak grows by more than --max-increase."""
    from staticmem.validate.snapshot_diff import is_snapshot

    paths = [args.before, *args.after]
    if any(is_snapshot(path) for path in paths):
        return _compare_snapshots(paths, args)
    chosen = chosen_format(args, DIFF_FORMATS)
    if len(paths) > 2:
        why = "Two models or reports are compared; more than two can be memory snapshots alone."
        raise UsageError(
            f"{len(paths)} files to compare", why, "See 'staticmem sweep' for many configurations.", "SM140"
        )
    from staticmem.report.diff import diff

    before, after = (_side(path, args) for path in paths)
    emit(diff(before, after), chosen, args)
    return _gate(before.peak.live_bytes, after.peak.live_bytes, args)


def _compare_snapshots(paths: list[str], args: argparse.Namespace) -> int:
    """The exit code, as of models. What a snapshot has no use for is refused."""
    from staticmem.validate.snapshot_diff import diff

    unused = sorted(
        OPTIONS[name].flag or f"--{name.replace('_', '-')}" for name in settings.given(args) if name != "top"
    )
    if args.config is not None:
        unused.append("--config")
    if args.max_increase is not None and len(paths) > 2:
        unused.append("--max-increase")
    if unused:
        why, hint = "A snapshot tells what happened: there is no step to ask for.", "Leave them out."
        raise UsageError(f"snapshots are compared without {', '.join(unused)}", why, hint, "SM140")
    chosen = chosen_format(args, SNAPSHOT_FORMATS)
    result = diff(paths)
    emit(result, chosen, args)
    return _gate(result.files[0].allocated_bytes, result.files[1].allocated_bytes, args)


def _gate(before: int, after: int, args: argparse.Namespace) -> int:
    """1 where the peak grows by more than --max-increase, which it says; else 0."""
    if args.max_increase is None:
        return 0
    limit, growth = args.max_increase(before), after - before
    if growth <= limit:
        return 0
    grows, allowed = format_bytes(growth, args.units), format_bytes(limit, args.units)
    sys.stderr.write(f"max-increase: the peak grows by {grows}, {allowed} are allowed\n")
    return 1


def _side(path: str, args: argparse.Namespace) -> Report:
    if path.lower().endswith(".json"):
        from staticmem.report.load import load_report

        return load_report(path)
    from staticmem.studies import run  # late: two saved reports need no engine

    if is_config(path):
        args = argparse.Namespace(**{**vars(args), "config": path, "model": None})
        vars(args).pop("settings", None)  # those of another config
        path = settings.model_of(args)
    return run(path, settings.request(args))
