"""Flags of a session of the ONNX Runtime, and `analyze --runtime onnxruntime`."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli import settings
from staticmem.cli.flags import add_options
from staticmem.cli.output import Progress, emit, say, warn
from staticmem.errors import UsageError
from staticmem.ort.options import SESSION_OPTIONS, SessionOptions
from staticmem.report.formats import Formats
from staticmem.scenario.options import SESSION, Option
from staticmem.scenario.request import OPTIONS

FORMATS = Formats("session", module="staticmem.ort.formats")
OPTIMIZED = Option(
    "optimized_model", None, "the graph that the runtime executes, as it saved it (optimized_model_filepath)",
    SESSION, "text", "FILE", flag="--optimized-model",
)  # fmt: skip


def add_session(parser: argparse.ArgumentParser, analyzed: bool = False) -> None:
    """The options of a session; `analyzed`: with those that a run decides by itself."""
    options = [*SESSION_OPTIONS.values(), OPTIMIZED]
    decided = ("provider", "optimized_model", "processor")
    add_options(parser, [one for one in options if analyzed or one.name not in decided])


def session_options(args: argparse.Namespace, **others: Any) -> SessionOptions:
    """The options that the flags give; `others` hold where no flag does."""
    given = {name: value for name in SESSION_OPTIONS if (value := getattr(args, name, None)) is not None}
    return SessionOptions(**{**others, **given})


def check_not_given(args: argparse.Namespace) -> None:
    """Raises:
    UsageError: a flag of a session without --runtime onnxruntime (SM513).
    """
    given = [one.flag for one in (*SESSION_OPTIONS.values(), OPTIMIZED) if getattr(args, one.name) is not None]
    if given:
        what, why = f"{', '.join(given)} do not apply to PyTorch", "They are options of a session of the ONNX Runtime."
        raise UsageError(what, why, "Add --runtime onnxruntime, or leave them out.", "SM513")


def refuse_training(options: dict[str, Any]) -> None:
    """Raises:
    UsageError: a training step or generation is asked for (SM512).
    """
    if options.get("mode") == "generate":
        why = "--mode generate is about the caches of transformers' generate, which PyTorch runs."
        raise UsageError("a session of the ONNX Runtime does not generate", why, "Leave it out.", "SM512")
    if options.get("optimizer") is not None or options.get("mode") == "train":
        why = "--optimizer and --mode train ask for a training step."
        raise UsageError("the ONNX Runtime does not train", why, "Leave them out: it runs inference.", "SM512")


def run(args: argparse.Namespace, name: str) -> int:
    """`analyze --runtime onnxruntime`. The exit code: 0, or 1 where --strict found values that are not counted."""
    given = settings.given(args)
    refuse_training(given)
    others = sorted(OPTIONS[name].flag for name in given if not OPTIONS[name].session)
    others += [
        f"--{name.replace('_', '-')}" for name in ("max_batch", "max_dim", "explain_peak") if getattr(args, name)
    ]
    if others:
        what = f"{', '.join(others)} {'does' if len(others) == 1 else 'do'} not apply to the ONNX Runtime"
        why = "A session runs the graph as the file has it; these are about a step of PyTorch."
        raise UsageError(what, why, "Leave them out, or leave out --runtime onnxruntime.", "SM513")
    if name not in FORMATS:
        hint = "Use -f table or -f json."
        raise UsageError(f"no {name} of a session", f"There are {' and '.join(FORMATS)}.", hint, "SM513")
    config = settings.settings(args)
    unused = sorted(name for name in (config.options if config is not None else ()) if not OPTIONS[name].session)
    if unused:
        say(f"Not used of the config, as a session does not train: {', '.join(unused)}")
    from staticmem.ort.study import MAX_THREADS, session_report  # late: errors of flags need no engine

    request = settings.request(args, top=args.top)
    options = session_options(args, intra_op_num_threads=MAX_THREADS)
    threads_given = args.intra_op_num_threads is not None
    with settings.model_path(settings.model_of(args)) as path, Progress("", args.quiet, model=path):
        report = session_report(path, request, options, args.optimized_model, threads_given)
    if args.quiet and name == "table":
        warn(report.warnings)
    emit(report, FORMATS[name], args)
    uncounted = [note for note in report.warnings if note.code in ("SM522", "SM523")]
    for note in uncounted if args.strict else ():
        say(f"strict: {note.text}")
    return 1 if args.strict and uncounted else 0
