"""`staticmem levers MODEL`: what would make the step smaller."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli import settings
from staticmem.cli.flags import add_model, add_scenario, add_verb, reads
from staticmem.cli.output import Progress, add_output, chosen_format, emit
from staticmem.report.formats import Formats

FORMATS = Formats("levers")

LEVERS = """\
What would make a step smaller, ranked: mixed precision, checkpointing, gradient accumulation, other optimizers,
freezing, offload, ... Each is a step of its own that is analysed in full; 'compute' is the change of its floating-point
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


def add_levers(verbs: Any) -> None:
    about = "what would make a step smaller, and what it costs"
    parser = add_verb(verbs, "levers", run, about, LEVERS, LEVERS_EXAMPLES)
    add_model(parser, optional=True)
    add_scenario(parser)
    question = parser.add_argument_group("the question")
    about = "memory that the step may need (16GiB, 16GB): looks for the best set of checkpoints (default: the GPU's)"
    budget = reads("--budget", "bytes", "16GiB", "a size", "SM195")
    question.add_argument("--budget", type=budget, metavar="SIZE", help=about)
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, FORMATS)
    from staticmem.studies import Study  # late: --help needs no engine
    from staticmem.studies.levers import levers

    request = settings.request(args)
    with settings.model_path(settings.model_of(args)) as path, Progress("levers", args.quiet) as bar:
        result = levers(Study.open(path, request), request.gpu, args.budget, bar.update)
    emit(result, chosen, args)
    return 0
