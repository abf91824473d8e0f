"""`staticmem layers` and `staticmem trace`: a step module by module, and stage by stage.

`staticmem why MODEL NAME` and `staticmem graph MODEL`: who keeps memory alive, as sentences and as a graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from staticmem.cli import settings
from staticmem.cli.flags import add_model, add_scenario, add_verb, byte_size, one_of, positive
from staticmem.cli.output import Progress, add_output, chosen_format, emit
from staticmem.liveness.intervals import PEAK, WHOLE
from staticmem.report.formats import Formats

if TYPE_CHECKING:
    from staticmem.studies import Study


LAYERS_FORMATS, TRACE_FORMATS = Formats("layers"), Formats("trace")
PHASES = ("setup", "forward", "backward", "optimizer")

LAYERS = """\
A row for each module: its input and output, parameters, the activations that its forward allocates and those that are
saved for backward, multiply-adds, the memory that it reads and writes, and its part of the peak.
Figures of a row include the modules in it; the last row is the whole model.
"""

LAYERS_EXAMPLES = """\
examples:
  staticmem layers model.pt2 --batch 32 --optimizer adam --depth 2
  staticmem layers model.onnx --batch 8 -o layers.csv
"""

TRACE = """\
Every stage of a step in order: the tensors that appear (+) and go (-), grouped by shape and type with counts and
sizes, and the total that is alive then. It is what a memory tracker prints from a live process, without running.
"""

TRACE_EXAMPLES = """\
examples:
  staticmem trace model.pt2 --batch 32 --optimizer adam
  staticmem trace model.pt2 --batch 32 --optimizer adam --phase backward --min-size 64MiB
  staticmem trace model.pt2 --batch 32 --optimizer adam --module layer4
  staticmem trace model.pt2 --batch 32 --optimizer adam -o trace.csv
"""


def add_layers(verbs: Any) -> None:
    about = "a table of the model's layers: parameters, activations, multiply-adds, share of the peak"
    parser = add_verb(verbs, "layers", layers, about, LAYERS, LAYERS_EXAMPLES)
    add_model(parser)
    add_scenario(parser)
    which = parser.add_argument_group("which layers")
    about = "rows down to this depth; 1 is the model's children"
    which.add_argument("--depth", type=positive("--depth"), metavar="N", help=about)
    add_output(parser, LAYERS_FORMATS)


def add_trace(verbs: Any) -> None:
    about = "what appears and goes at every stage of a step"
    parser = add_verb(verbs, "trace", trace, about, TRACE, TRACE_EXAMPLES)
    add_model(parser)
    add_scenario(parser)
    which = parser.add_argument_group("which stages")
    about = "setup, forward, backward or optimizer"
    which.add_argument("--phase", type=one_of("--phase", PHASES), metavar="PHASE", help=about)
    which.add_argument("--module", metavar="PATH", help="of one module and those in it, e.g. layer4.0")
    about = "that make or free at least so much, e.g. 64MiB"
    which.add_argument("--min-size", type=byte_size("--min-size"), default=0, metavar="SIZE", help=about)
    add_output(parser, TRACE_FORMATS)


@contextmanager
def _study(args: argparse.Namespace) -> Iterator[Study]:
    from staticmem.studies import Study, without_cycle_search  # late: --help needs no engine

    request = settings.request(args)
    with settings.model_path(args.model) as path, without_cycle_search(), Progress("", args.quiet, model=path):
        yield Study.open(path, request)


def layers(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, LAYERS_FORMATS)
    with _study(args) as study:
        from staticmem.engine.shapes import value_infos
        from staticmem.report.layers import down_to, layer_table

        graph, mode = study.result.graph, study.scenario.mode
        values = value_infos(graph, study.scenario.training)
        table = layer_table(study.model.path, graph, study.lifetimes, values, mode)
    emit(down_to(table, args.depth), chosen, args)
    return 0


def trace(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, TRACE_FORMATS)
    with _study(args) as study:
        from staticmem.report import changes

        listing = changes.changes(study.model.path, study.result.graph, study.lifetimes)
    emit(changes.select(listing, args.phase, args.module, args.min_size), chosen, args)
    return 0


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
    with settings.model_path(settings.model_of(args)) as path, Progress("", args.quiet, model=path):
        result = why(Study.open(path, request), args.name, _moment(args.at))
    emit(result, chosen, args)
    return 0


def run_graph(args: argparse.Namespace) -> int:
    chosen = chosen_format(args, GRAPH_FORMATS)
    from staticmem.liveness.graph import folded
    from staticmem.studies import Study
    from staticmem.studies.owners import WatchedStudy

    request = settings.request(args)
    with settings.model_path(settings.model_of(args)) as path, Progress("", args.quiet, model=path):
        graph = WatchedStudy(Study.open(path, request)).graph(_moment(args.at))
    emit(folded(graph) if args.fold else graph, chosen, args)
    return 0


def _moment(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
