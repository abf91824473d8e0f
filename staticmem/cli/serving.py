"""`analyze --mode serve`: an engine that serves a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.cli import settings
from staticmem.cli.output import emit, warn
from staticmem.errors import UsageError
from staticmem.report.formats import Formats
from staticmem.scenario.request import SERVE, Request

if TYPE_CHECKING:
    from staticmem.devices.gpus import Gpu

FORMATS = Formats("serve", module="staticmem.serving.formats")
OF_STEPS = ("max_batch", "max_dim", "explain_peak", "check_liveness", "strict")  # flags of `analyze`


SIZES = Formats("serve-sizing", module="staticmem.serving.sizing")
OF_SIZING = ("global_batch", "max_dim", "no_batches", "date")  # flags of `size`


def size(args: argparse.Namespace, asked: Request, cards: Sequence[Gpu], name: str, *, named: bool) -> int:
    """`size --mode serve`; the cards are `named`, or all. The exit code: 0, also where no card does."""
    if asked.mode != SERVE or args.concurrency is None:
        what, why = "--concurrency and --mode serve go together", "They ask how many cards serve so many requests."
        raise UsageError(what, why, "Example: --mode serve --concurrency 64 --max-len 32768", "SM602")
    _refuse(args, OF_SIZING)
    _check_format(name, SIZES)
    from staticmem.serving.sizing import serve_sizing

    prices = {}
    if args.prices is not None:
        from staticmem.devices import gpus
        from staticmem.studies.prices import prices_of

        prices = prices_of(args.prices, {**gpus.catalog(args.gpus_file), **{card.slug: card for card in cards}})
    request = replace(_of_engine(args, asked), gpu=None)
    sizing = serve_sizing(settings.model_of(args), request, args.concurrency, cards, prices, named=named)
    emit(sizing, SIZES[name], args)
    return 0


def run(args: argparse.Namespace, asked: Request, name: str) -> int:
    """The exit code: 0, also where the engine does not start, as a step that does not fit has it."""
    _refuse(args, OF_STEPS)
    _check_format(name, FORMATS)
    from staticmem.serving.study import serve_report

    report = serve_report(settings.model_of(args), _of_engine(args, asked))
    if args.quiet and name == "table":
        warn(report.warnings)
    emit(report, FORMATS[name], args)
    return 0


def _of_engine(args: argparse.Namespace, asked: Request) -> Request:
    """What is asked without what the config says of steps of PyTorch, which is said."""
    from staticmem.serving.study import takes

    config = settings.settings(args)
    unused = [one for one in (config.options if config is not None else {}) if not takes(one)]
    return settings.without(args, asked, unused, "an engine runs no step of PyTorch")


def _refuse(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Raises:
    UsageError: a flag of the verb is given that is about steps of PyTorch (SM602).
    """
    others = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag, None)]
    if others:
        what = f"{', '.join(others)} {'does' if len(others) == 1 else 'do'} not apply to a serving engine"
        why = "These are about a step of PyTorch; the report has the largest --max-len and --max-seqs."
        raise UsageError(what, why, "Leave them out, or leave --mode serve out.", "SM602")


def _check_format(name: str, formats: Formats) -> None:
    """Raises:
    UsageError: an engine is not shown so (SM602).
    """
    if name not in formats:
        hint = "Use -f table or -f json."
        raise UsageError(f"no {name} of an engine", f"There are {' and '.join(formats)}.", hint, "SM602")
