"""`staticmem fit MODEL --gpu NAME`: how a training step fits a card, and settings that run it so; `levers`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from staticmem.cli import settings
from staticmem.cli.flags import add_jobs, add_model, add_scenario, add_verb, one_of, positive, reads
from staticmem.cli.output import Progress, add_output, check_target, chosen_format, emit, say, write_atomically
from staticmem.errors import UsageError
from staticmem.report.fit import CHANGES
from staticmem.report.formats import Formats

if TYPE_CHECKING:
    from staticmem.report.fit import Fit

FORMATS, LEVER_FORMATS = Formats("fit"), Formats("levers")

FIT = """\
How a training step fits a GPU: the way to run it that gives up least, and settings that run it so.
It tries, in this order: the step as asked; micro-batches; sharding over the devices; checkpoints; and what is allowed:
mixed precision, 8-bit optimizer state, adapters. The first way whose whole band fits is taken. Without --batch and
--global-batch it finds the largest batch, or takes that of a file that fixes it. Exit code 1 where nothing fits.
"""

FIT_EXAMPLES = """\
examples:
  staticmem fit model.pt2 --optimizer adamw --global-batch 256 --gpu l4
  staticmem fit model.pt2 --optimizer adamw --global-batch 256 --gpu l4 --write run
  staticmem fit model.pt2 --optimizer adamw --global-batch 256 --gpu l4 --devices 8 --allow precision
  staticmem fit model.pt2 --preset hf-trainer --gpu l4 -f transformers > training_arguments.py
  staticmem fit model.pt2 --optimizer adamw --global-batch 256 --gpu l4 --devices 8 -f deepspeed -o ds.json
"""

LEVERS = """\
What would make a step smaller, ranked: mixed precision, checkpointing, gradient accumulation, other optimizers,
freezing, offload, ... Each is analysed in full, as its own step; 'compute' is the change of its floating-point
operations.
With --gpu it is device memory that is saved, and each says whether it fits; else live memory.
"""

LEVERS_EXAMPLES = """\
examples:
  staticmem levers model.pt2 --batch 64 --optimizer adamw
  staticmem levers model.pt2 --batch 64 --optimizer adamw --gpu rtx-4090
  staticmem levers model.pt2 --batch 64 --optimizer adamw --budget 16GiB
      with the set of checkpoints that reaches 16 GiB at least compute
"""


def add_fit(verbs: Any) -> None:
    about = "make a training step fit a GPU, and write settings that run it so"
    parser = add_verb(verbs, "fit", run_fit, about, FIT, FIT_EXAMPLES)
    add_model(parser, optional=True)
    add_scenario(parser)
    question = parser.add_argument_group("the question")
    about = "samples of a step of the optimizer, over all devices"
    question.add_argument("--global-batch", type=positive("--global-batch"), metavar="N", help=about)
    about = "a change of training that may be made: precision, optimizer (8-bit state), adapters (LoRA); repeatable"
    allowed = one_of("--allow", CHANGES)
    question.add_argument("--allow", action="append", default=[], type=allowed, metavar="CHANGE", help=about)
    output = add_output(parser, FORMATS)
    about = "write the settings of every library into a folder; files are overwritten with --force alone"
    output.add_argument("--write", metavar="DIR", help=about)


def run_fit(args: argparse.Namespace) -> int:
    """The exit code: 0 where a way fits, 1 where none does."""
    chosen = chosen_format(args, FORMATS)
    from staticmem.report.settings import LIBRARIES  # late: --help needs no engine
    from staticmem.studies import Study
    from staticmem.studies.fit import fit
    from staticmem.studies.fit_settings import Options, no_gpu

    library = chosen.name if chosen.name in LIBRARIES else None
    request = settings.request(args)
    if args.global_batch is not None:
        request = settings.without(args, request, ("batch", "accumulate"), settings.GLOBAL_BATCH)
    config = settings.settings(args) is not None
    if request.gpu is None:
        raise no_gpu()
    if args.write is not None:
        _check_folder(args.write, [one.file for one in LIBRARIES.values()], args.force)
    with settings.model_path(settings.model_of(args)) as path, Progress("ways", args.quiet, model=path) as bar:
        options = Options(request.gpu, args.global_batch, tuple(args.allow), library, config, bar.update)
        result = fit(Study.open(path, request), options)
    if not result.fits and library is not None:
        chosen = FORMATS.default  # settings of what does not fit are written for nobody
    emit(result, chosen, args)
    if result.fits and library is not None:
        for note in result.settings[0].notes:
            say(note)
    if result.fits and args.write is not None:
        _write(result, args.write)
    return 0 if result.fits else 1


def _check_folder(folder: str, names: list[str], force: bool) -> None:
    """Refuses, before any work, what could not be written after it."""
    if os.path.isdir(folder):
        for name in names:
            check_target(os.path.join(folder, name), force)
    elif os.path.lexists(folder):
        raise UsageError(f"{folder} is not a directory", "Settings are several files.", "Name a folder.", "SM142")


def _write(result: Fit, folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why, hint = f"{error.strerror or error}.", "Choose another place."
        raise UsageError(f"{folder} cannot be made", why, hint, "SM142") from error
    for one in result.settings:
        write_atomically(os.path.join(folder, one.file), one.text)
    say(f"Wrote {', '.join(os.path.join(folder, one.file) for one in result.settings)}")


def add_levers(verbs: Any) -> None:
    about = "what would make a step smaller, and what it costs"
    parser = add_verb(verbs, "levers", run_levers, about, LEVERS, LEVERS_EXAMPLES)
    add_model(parser, optional=True)
    add_scenario(parser)
    question = parser.add_argument_group("the question")
    about = (
        "memory that the step may need (16GiB, 16GB), on the device with --gpu, else of live tensors: looks for the "
    )
    about += "best set of checkpoints (default: the GPU's)"
    budget = reads("--budget", "bytes", "16GiB", "a size", "SM195")
    question.add_argument("--budget", type=budget, metavar="SIZE", help=about)
    add_jobs(question)
    add_output(parser, LEVER_FORMATS)


def run_levers(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, LEVER_FORMATS)
    from staticmem.studies import Study  # late: --help needs no engine
    from staticmem.studies.levers import levers

    request = settings.request(args)
    with settings.model_path(settings.model_of(args)) as path, Progress("levers", args.quiet, model=path) as bar:
        study, config = Study.open(path, request), settings.settings(args) is not None
        result = levers(study, request.gpu, args.budget, bar.update, args.jobs, config)
    emit(result, chosen, args)
    return 0
