"""`staticmem fit MODEL --gpu NAME`: how a training step fits a card, and settings that run it so; `levers`."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli import settings
from staticmem.cli.flags import add_jobs, add_model, add_scenario, add_verb, one_of, positive, reads
from staticmem.cli.output import Progress, add_output, check_folder, chosen_format, emit, say, write_all
from staticmem.report.fit import CHANGES
from staticmem.report.formats import Formats
from staticmem.scenario.request import SERVE

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
  staticmem fit config.json --mode serve --gpu l40s --max-len 32768 --concurrency 4 --allow precision --write run
      flags with which vLLM starts and holds so many requests at once
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
    about = "requests of --max-len at once that the engine holds, with --mode serve"
    question.add_argument("--concurrency", type=positive("--concurrency"), metavar="N", help=about)
    about = "a change that may be made: precision, optimizer (8-bit state), adapters (LoRA); repeatable"
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
    if request.mode == SERVE or args.concurrency is not None:
        from staticmem.cli import serving

        return serving.fit(args, request, chosen.name)
    if args.write is not None:
        check_folder(args.write, [one.file for one in LIBRARIES.values()], args.force)
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
        write_all(args.write, {one.file: one.text for one in result.settings})
    return 0 if result.fits else 1


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
