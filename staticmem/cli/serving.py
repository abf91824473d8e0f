"""`--mode serve` of `analyze`, `size`, `sweep` and `fit`: an engine that serves a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.cli import settings
from staticmem.cli.output import Progress, check_folder, emit, say, warn, write_all
from staticmem.errors import UsageError
from staticmem.report.formats import Formats
from staticmem.scenario.request import SERVE, Request

if TYPE_CHECKING:
    from staticmem.config.config import Config, Options
    from staticmem.devices.gpus import Gpu
    from staticmem.studies.points import Point

FORMATS = Formats("serve", module="staticmem.serving.formats")
OF_STEPS = ("max_batch", "max_dim", "explain_peak", "check_liveness", "strict")  # flags of `analyze`


SIZES = Formats("serve-sizing", module="staticmem.serving.sizing")
OF_SIZING = ("global_batch", "max_dim", "no_batches", "date")  # flags of `size`
NO_PYTORCH = "an engine runs no step of PyTorch"
NO_STEP = "SM600"  # of `scenario.combinations`
SWEEPS = Formats("serve-sweep", module="staticmem.serving.sweep")
FITS = Formats("serve-fit", module="staticmem.serving.fit")
OF_FITS = ("global_batch",)  # flags of `fit`
OF_SWEEPS = ("max_batch", "max_dim", "meter")  # flags of `sweep`


def size(args: argparse.Namespace, asked: Request, cards: Sequence[Gpu], name: str, *, named: bool) -> int:
    """`size --mode serve`; the cards are `named`, or all. The exit code: 0, also where no card does."""
    if asked.mode != SERVE or args.concurrency is None:
        raise _goes_with_the_mode()
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


def _goes_with_the_mode() -> UsageError:
    what, why = (
        "--concurrency and --mode serve go together",
        "--concurrency is how many requests the engine holds at once.",
    )
    return UsageError(what, why, "Example: --mode serve --concurrency 64 --max-len 32768", "SM602")


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


def sweep(args: argparse.Namespace, points: Sequence[Point], cards: Sequence[str], name: str) -> int:
    """`sweep --mode serve`. The exit code: 0 where something could be analysed."""
    _refuse(args, OF_SWEEPS)
    _check_format(name, SWEEPS)
    from staticmem.serving.sweep import Configuration, serve_sweep
    from staticmem.studies.points import settings_of, varying

    if any(point.request.mode != SERVE for point in points):
        why = "The parts of an engine are not those of a step."
        raise UsageError("engines and steps of PyTorch in one sweep", why, "Ask for each in a sweep.", "SM602")
    axes, listed = varying(points), []
    for point in points:
        request = point.request
        if "devices" in axes and request.devices == 1:  # a list from 1 on: one card has nothing to divide
            request = replace(request, devices=None, parallel=None)
        # that a step has no engine is what the scenario refuses here, and nothing else
        error = point.error if point.error is not None and point.error.code != NO_STEP else None
        listed.append(Configuration(point.name, point.model, request, settings_of(point.request), error))
    with Progress("configurations", args.quiet) as bar:
        result = serve_sweep(listed, axes, cards, bar.update)
    errors = [row.error for row in result.rows if row.error is not None]
    if errors and len(errors) == len(result.rows):
        raise UsageError(errors[0].what, errors[0].why, errors[0].hint, errors[0].code)
    emit(result, SWEEPS[name], args)
    if errors:
        sys.stderr.write(f"warning: {len(errors):,} of {len(result.rows):,} configurations could not be analysed\n")
    return 0


def fit(args: argparse.Namespace, asked: Request, name: str) -> int:
    """`fit --mode serve`. The exit code: 0 where a way does, 1 where none does."""
    if asked.mode != SERVE:
        raise _goes_with_the_mode()
    _refuse(args, OF_FITS)
    _check_format(name, FITS)
    others = sorted({*args.allow} - {"precision"})
    if others:
        what, why = f"--allow {others[0]} with --mode serve", "An engine trains nothing; precision permits 8 bits."
        raise UsageError(what, why, "Use --allow precision.", "SM602")
    from staticmem.serving.fit import FILE, script, serve_fit

    if args.write is not None:
        check_folder(args.write, [FILE], args.force)
    request = _of_engine(args, asked)
    result = serve_fit(settings.model_of(args), request, args.concurrency, less_precise=bool(args.allow))
    emit(result, FITS[name], args)
    if result.fits and args.write is not None:
        write_all(args.write, {FILE: script(result)})
    return 0 if result.fits else 1


def of_sweep(config: Config, flags: Options) -> Config:
    """The config of a sweep of engines, without what it says of steps of PyTorch, which is said; else as it is."""
    if flags.get("mode", config.options.get("mode")) != SERVE:
        return config
    from staticmem.serving.study import takes

    unused = sorted(name for name in config.options if not takes(name) and name not in flags)
    if unused:
        say(f"Not used of the config, as {NO_PYTORCH}: {', '.join(unused)}")
    return replace(config, options={name: value for name, value in config.options.items() if name not in unused})


def _of_engine(args: argparse.Namespace, asked: Request) -> Request:
    """What is asked without what the config says of steps of PyTorch, which is said."""
    from staticmem.serving.study import takes

    config = settings.settings(args)
    unused = [one for one in (config.options if config is not None else {}) if not takes(one)]
    return settings.without(args, asked, unused, NO_PYTORCH)


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
        hint = f"Use -f {' or -f '.join(formats)}."
        raise UsageError(f"no {name} of an engine", f"There are {', '.join(formats)}.", hint, "SM602")
