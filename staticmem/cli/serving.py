"""`analyze --mode serve`: an engine that serves a model."""

from __future__ import annotations

import argparse

from staticmem.cli import settings
from staticmem.cli.output import emit, warn
from staticmem.errors import UsageError
from staticmem.report.formats import Formats
from staticmem.scenario.request import Request

FORMATS = Formats("serve", module="staticmem.serving.formats")
OF_STEPS = ("max_batch", "max_dim", "explain_peak", "check_liveness", "strict")  # flags of `analyze`


def run(args: argparse.Namespace, asked: Request, name: str) -> int:
    """The exit code: 0, also where the engine does not start, as a step that does not fit has it."""
    from staticmem.serving.study import serve_report, takes

    others = [f"--{flag.replace('_', '-')}" for flag in OF_STEPS if getattr(args, flag, None)]
    if others:
        what = f"{', '.join(others)} {'does' if len(others) == 1 else 'do'} not apply to a serving engine"
        why = "These are about a step of PyTorch; the report has the largest --max-len and --max-seqs."
        raise UsageError(what, why, "Leave them out, or leave --mode serve out.", "SM602")
    if name not in FORMATS:
        hint = "Use -f table or -f json."
        raise UsageError(f"no {name} of an engine", f"There are {' and '.join(FORMATS)}.", hint, "SM602")
    config = settings.settings(args)
    below = config.options if config is not None else {}
    unused = [one for one in below if not takes(one)]
    request = settings.without(args, asked, unused, "an engine runs no step of PyTorch")
    report = serve_report(settings.model_of(args), request)
    if args.quiet and name == "table":
        warn(report.warnings)
    emit(report, FORMATS[name], args)
    return 0
