"""`staticmem why MODEL NAME` and `staticmem graph MODEL`: who keeps memory alive, as sentences and as a graph."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli import settings
from staticmem.cli.flags import add_model, add_scenario, add_verb
from staticmem.cli.output import add_output, chosen_format, emit
from staticmem.liveness.intervals import PEAK, WHOLE
from staticmem.report.formats import Formats

WHY_FORMATS, GRAPH_FORMATS = Formats("why"), Formats("graph")

WHY = """\
Why a tensor, or the tensors of a module, are alive at a moment of a step: for each owner that holds one, the shortest
chain of owners from the program to it. NAME is a tensor as --explain-peak lists it, or the path of a module.
"""

WHY_EXAMPLES = """\
examples:
  staticmem why model.pt2 layer1.0.relu --batch 32 --optimizer adam
      what holds the tensors of a module at the peak
  staticmem why model.pt2 conv1.weight.grad --batch 32 --optimizer adam --at optimizer
      at the peak of a phase
"""

GRAPH = """\
The step as a graph: kernels, storages and their owners (variables, frames of modules, nodes of autograd, .grad, the
optimizer, ...), with edges allocates, reads, holds and keeps. For networkx, Gephi, yEd, Graphviz and others.
"""

GRAPH_EXAMPLES = """\
examples:
  staticmem graph model.pt2 --batch 32 --optimizer adam -o peak.graphml
      what is alive at the peak, and who holds it
  staticmem graph model.pt2 --optimizer adam --at whole -o step.json
      the whole step, as networkx.node_link_graph reads it
  staticmem graph model.pt2 --optimizer adam --fold -o peak.dot
      one node for the storages of a module: small enough to draw
"""


def add_why(verbs: Any) -> None:
    parser = add_verb(
        verbs, "why", run_why, "which owners keep a tensor or a module's tensors alive", WHY, WHY_EXAMPLES
    )
    add_model(parser)
    parser.add_argument("name", metavar="NAME", help="a tensor, or a module by its path")
    add_scenario(parser)
    _add_moment(parser, "the moment: peak (default), a phase (forward, backward, ...) for its peak, or a tick")
    add_output(parser, WHY_FORMATS)


def add_graph(verbs: Any) -> None:
    about = "the step as a graph of kernels, storages and owners"
    parser = add_verb(verbs, "graph", run_graph, about, GRAPH, GRAPH_EXAMPLES)
    add_model(parser, optional=True)
    add_scenario(parser)
    about = f"the moment: peak (default), a phase for its peak, a tick, or {WHOLE} for the whole step"
    question = _add_moment(parser, about)
    about = "one node for the storages of a module and category, and for the kernels and autograd nodes of a module"
    question.add_argument("--fold", action="store_true", help=about)
    add_output(parser, GRAPH_FORMATS)


def _add_moment(parser: argparse.ArgumentParser, about: str) -> Any:
    question = parser.add_argument_group("the question")
    question.add_argument("--at", default=PEAK, metavar="MOMENT", help=about)
    return question


def run_why(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, WHY_FORMATS)
    from staticmem.studies import Study  # late: --help needs no engine
    from staticmem.studies.owners import why

    request = settings.request(args)
    with settings.model_path(settings.model_of(args)) as path:
        result = why(Study.open(path, request), args.name, _moment(args.at))
    emit(result, chosen, args)
    return 0


def run_graph(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, GRAPH_FORMATS)
    from staticmem.liveness.graph import folded
    from staticmem.studies import Study
    from staticmem.studies.owners import WatchedStudy

    request = settings.request(args)
    with settings.model_path(settings.model_of(args)) as path:
        graph = WatchedStudy(Study.open(path, request)).graph(_moment(args.at))
    emit(folded(graph) if args.fold else graph, chosen, args)
    return 0


def _moment(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
