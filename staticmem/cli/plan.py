"""`staticmem plan`: the memory of a run of several instants in one process."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli.flags import add_verb
from staticmem.cli.output import Progress, add_output, chosen_format, emit
from staticmem.report.formats import Formats

FORMATS = Formats("run")

PLAN = """\
The memory of a run: training steps, evaluations, generation and saves of one or several models, one after the other in
one process, replayed through one allocator. CONFIG is a YAML file with `plan:` ('staticmem init --plan' writes one).
Exit code 1 if the run does not fit the GPU.
"""

EXAMPLES = """\
examples:
  staticmem plan                        the staticmem.yaml of this repository
  staticmem plan run.yaml --gpu l4
  staticmem plan run.yaml --gpu l4 --max-budget
  staticmem plan run.yaml -o run.html
"""


def add_plan(verbs: Any) -> None:
    about = "the memory of a run: steps, evaluations, saves, several models"
    parser = add_verb(verbs, "plan", plan, about, PLAN, EXAMPLES)
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a .yaml config with a plan")
    parser.add_argument("--gpu", metavar="NAME|SIZE", help="a GPU by name or size, over the first of the config's")
    about = "find the largest token budget, or batch, of its lengths with which the run fits"
    parser.add_argument("--max-budget", action="store_true", help=about)
    add_output(parser, FORMATS)


def plan(args: argparse.Namespace) -> int:
    """The exit code: 1 where the run does not fit the GPU."""
    chosen = chosen_format(args, FORMATS)
    from staticmem.config.discover import settings  # late: --help needs no engine
    from staticmem.studies.plan import study_of_config

    config = settings(args.config, search=args.config is None)
    with Progress("instants", args.quiet, "reading models and running their steps") as bar:
        report = study_of_config(config, args.gpu, bar.update).report(args.max_budget)
    emit(report, chosen, args)
    return 1 if report.gpu is not None and report.gpu.fit in ("does not fit", "cannot run it") else 0
