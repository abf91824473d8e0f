"""`staticmem sweep` and `staticmem check`: the memory of many configurations, and budgets for them as a gate."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from staticmem.cli import serving, settings
from staticmem.cli.flags import add_jobs, add_max_dim, add_scenario, add_verb, asked_largest, one_of
from staticmem.cli.output import Progress, add_output, chosen_format, emit
from staticmem.errors import StaticmemError, UsageError, closest
from staticmem.frontends.architectures import model_name
from staticmem.report.formats import Formats
from staticmem.scenario.request import SERVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from staticmem.config.config import Budget, Config, Options
    from staticmem.report.sweep import Check
    from staticmem.studies.points import Point

FORMATS, CHECK_FORMATS = Formats("sweep"), Formats("check")

SWEEP = """\
The memory of many configurations: the cross product of lists (what_if, --what-if), or the scenarios of a config.
CONFIG is a YAML file ('staticmem init' writes one). Given a model in its place, no config is needed.
"""

SWEEP_EXAMPLES = """\
examples:
  staticmem sweep staticmem.yaml
  staticmem sweep model.pt2 --what-if batch=16,32,64 --what-if optimizer=sgd,adam
  staticmem sweep model.pt2 --optimizer adam --what-if batch=8,16 --gpu rtx-4090 --gpu 80GB
  staticmem sweep model.pt2 --optimizer adam --what-if amp=none,bf16 --gpu l4 --max-batch
  staticmem sweep staticmem.yaml -o sweep.csv
  staticmem sweep config.json --mode serve --gpu h100 --what-if max_len=8192,32768 --what-if kv_dtype=auto,fp8
"""

CHECK = """\
Checks the configurations of a config (what_if, scenarios, or the one that it describes) against its budgets.
Exit code 1 if a budget of level error is exceeded, 2 if a configuration cannot be analysed.
"""

CHECK_EXAMPLES = """\
examples:
  staticmem check                                        the staticmem.yaml of this repository
  staticmem check ci.yaml -f github
  staticmem check model.pt2 --batch 32 --optimizer adam --budget live=20GiB --budget device=23GiB --gpu l4
  staticmem check ci.yaml -o memory.xml                  JUnit
"""


def add_sweep(verbs: Any) -> None:
    about = "the memory of many configurations: batches, resolutions, optimizers, GPUs"
    parser = add_verb(verbs, "sweep", sweep, about, SWEEP, SWEEP_EXAMPLES)
    _add_source(parser)
    tried = parser.add_argument_group("what is tried")
    about = "values to try: batch, resolution, optimizer, amp, checkpoint, ... or dims.NAME; repeatable"
    tried.add_argument("--what-if", action="append", default=[], metavar="NAME=A,B", help=about)
    about = "live (fast: steps of one structure are arrays), or device (each is run; default with a GPU)"
    tried.add_argument("--meter", type=one_of("--meter", ("live", "device")), metavar="METER", help=about)
    about = "the largest batch of each configuration on each GPU"
    tried.add_argument("--max-batch", action="store_true", help=about)
    add_max_dim(tried, "the largest size of an open dimension of each configuration on each GPU")
    add_jobs(tried)
    add_scenario(parser, many_gpus=True)
    add_output(parser, FORMATS)


def add_check(verbs: Any) -> None:
    parser = add_verb(verbs, "check", check, "budgets of memory as a gate for CI", CHECK, CHECK_EXAMPLES)
    _add_source(parser)
    budgets = parser.add_argument_group("budgets")
    about = "a limit for live, allocated, reserved or device, e.g. live=20GiB; repeatable; beside those of the config"
    budgets.add_argument("--budget", action="append", default=[], metavar="METRIC=SIZE", help=about)
    add_jobs(budgets)
    budgets.add_argument("--exit-zero", action="store_true", help="exit 0 also where a budget is exceeded")
    add_scenario(parser, many_gpus=True)
    add_output(parser, CHECK_FORMATS)


def _add_source(parser: argparse.ArgumentParser) -> None:
    about = "a .yaml config, or an .onnx or .pt2 file"
    parser.add_argument("model", metavar="CONFIG|MODEL", nargs="?", help=about)


def sweep(args: argparse.Namespace) -> int:
    """The exit code: 0 where something could be analysed."""
    chosen = chosen_format(args, FORMATS)
    from staticmem.studies.points import parse_axes, points  # late: --help needs no engine
    from staticmem.studies.sweep import run, with_largest

    gpus, args.gpu = args.gpu, None
    config = serving.of_sweep(settings.config_of(args), settings.given(args))
    configurations = points(config, args.model, settings.given(args), parse_axes(args.what_if))
    cards = tuple(gpus or config.gpus)
    if any(point.request.mode == SERVE for point in configurations):
        return serving.sweep(args, configurations, cards, chosen.name)
    _warn_of_idle_options(configurations, settings.given(args))
    with Progress("configurations", args.quiet, "reading models and running their steps") as bar:
        if args.max_batch or args.max_dim is not None:
            grown = asked_largest(args)
            result = with_largest(configurations, cards, grown, jobs=args.jobs, progress=bar.update)
            if len(result.rows) < len(configurations):
                sys.stderr.write(f"warning: sizes of {grown.name} are not used: {grown.flag} looks for it [SM302]\n")
        else:
            result = run(configurations, cards, args.meter, jobs=args.jobs, progress=bar.update)
    errors = [row.error for row in result.rows if row.error is not None]
    if errors and len(errors) == len(result.rows):
        raise UsageError(errors[0].what, errors[0].why, errors[0].hint, errors[0].code)
    emit(result, chosen, args)
    if errors:
        sys.stderr.write(f"warning: {len(errors):,} of {len(result.rows):,} configurations could not be analysed\n")
    return 0


def check(args: argparse.Namespace) -> int:
    """The exit code: 0, 1 where a budget is exceeded, 2 where a configuration cannot be analysed."""
    chosen = chosen_format(args, CHECK_FORMATS)
    from staticmem.studies.budgets import check as compare  # late: --help needs no engine
    from staticmem.studies.points import points
    from staticmem.studies.sweep import run

    gpus, args.gpu = args.gpu, None
    config = settings.config_of(args)
    budgets = (*config.budgets, *(_budget(text) for text in args.budget))
    cards = tuple(gpus or config.gpus)
    if not budgets and not cards:
        why = "Neither the config nor the command line sets a budget or names a GPU."
        hint = "Add --gpu l4, --budget live=20GiB, or `budgets: [{metric: live, limit: 20 GiB}]` to the config."
        raise UsageError("no budgets to check", why, hint, "SM210")
    if config.plan is not None and args.model is None:
        emit(outcome := _check_plan(args, config, cards, budgets), chosen, args)
        return 1 if outcome.failed and not args.exit_zero else 0
    configurations = points(config, args.model, settings.given(args), {})
    # a card that is named has its verdict, which live memory alone does not say
    meter = "live" if not cards and all(budget.metric == "live" for budget in budgets) else "device"
    _warn_of_idle_options(configurations, settings.given(args))
    with Progress("configurations", args.quiet, "reading models and running their steps") as bar:
        outcome = compare(run(configurations, cards, meter, jobs=args.jobs, progress=bar.update), budgets)
    emit(outcome, chosen, args)
    if outcome.broken:
        from staticmem.cli.main import print_error

        print_error(_broken(outcome))
        return 2
    return 1 if outcome.failed and not args.exit_zero else 0


def _check_plan(args: argparse.Namespace, config: Config, cards: Sequence[str], budgets: Sequence[Budget]) -> Check:
    """The budgets of a config with a plan, which are those of its run.

    Raises:
        UsageError: flags ask for another step.
    """
    from staticmem.studies.plan import check_plan  # late: few configs have one

    others = [f"--{name.replace('_', '-')}" for name in settings.given(args)]
    if others:
        what, why = f"{others[0]} with a plan", "A plan says the options of each instant itself."
        raise UsageError(what, why, "Write it into the config, or name a model to check one step.", "SM444")
    with Progress("instants", args.quiet, "reading models and running their steps") as bar:
        return check_plan(config, cards, budgets, bar.update)


def _warn_of_idle_options(configurations: Sequence[Point], flags: Options) -> None:
    """Options that act in no configuration; an axis may have values that some configurations have no use for."""
    from staticmem.scenario.request import OPTIONS

    for name in [name for name in OPTIONS if OPTIONS[name].owners and name in flags]:
        one, used = OPTIONS[name], {getattr(point.request, name) for point in configurations if point.error is None}
        if flags[name] not in (None, one.default) and used == {one.default}:
            sys.stderr.write(f"warning: {one.spelt} is not used: it is of {' and '.join(one.owners)} [SM302]\n")
    said: list[set[tuple[str, str]]] = []
    for point in configurations:
        if point.error is None:
            try:
                notes = point.request.scenario()[1]
            except StaticmemError:  # its row has the error
                continue
            said.append({(note.code, note.text) for note in notes if note.code == "SM302"})
    for code, text in sorted(set.intersection(*said)) if said else ():
        sys.stderr.write(f"warning: {text} [{code}]\n")


def _broken(outcome: Check) -> StaticmemError:
    """The error of the first configuration that could not be analysed, as that of the check."""
    errors = {(o.model, o.configuration): o.error for o in outcome.outcomes if o.error is not None}
    (model, name), first = next(iter(errors.items()))
    what = f"{len(errors)} configuration{'s' if len(errors) > 1 else ''} could not be analysed"
    why = f"{model_name(model)}, {name}: {first.what}. {first.why}"
    return StaticmemError(what, why, first.hint, first.code)


def _budget(text: str) -> Budget:
    from staticmem.config.config import Budget
    from staticmem.report.model import METERS
    from staticmem.units import parse_limit

    metric, equals, size = text.partition("=")
    limit = parse_limit(size)
    if not equals or limit is None:
        hint = "Example: --budget live=20GiB"
        raise UsageError(
            f"--budget '{text}' is not METRIC=SIZE", "It is a meter and a size with a unit.", hint, "SM210"
        )
    if metric not in METERS:
        why, hint = f"It is one of {', '.join(METERS)}.", closest(metric, METERS)
        raise UsageError(f"--budget '{text}': no meter '{metric}'", why, hint, "SM210")
    return Budget(metric, limit)
