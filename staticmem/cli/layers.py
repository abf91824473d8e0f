"""`staticmem layers MODEL`: the layer table."""

from __future__ import annotations

import argparse
from typing import Any

from staticmem.cli import scenario
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.cli.values import positive
from staticmem.report.formats import Formats

FORMATS = Formats("layers")

DESCRIPTION = """\
A row for each module: its input and output, parameters, the activations that its forward allocates and those that are
saved for backward, multiply-adds, the memory that it reads and writes, and its part of the peak.
Figures of a row include the modules in it; the last row is the whole model.
"""

EPILOG = """\
examples:
  staticmem layers model.pt2 --batch 32 --optimizer adam --depth 2
  staticmem layers model.onnx --batch 8 -o layers.csv
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "layers",
        help="a table of the model's layers: parameters, activations, multiply-adds, share of the peak",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    scenario.add_model(parser)
    scenario.add_scenario(parser)
    which = parser.add_argument_group("which layers")
    which.add_argument(
        "--depth", type=positive("--depth"), metavar="N", help="rows down to this depth; 1 is the model's children"
    )
    add_output(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    from staticmem.cli.output import check_target, emit
    from staticmem.cli.source import model_path
    from staticmem.engine.shapes import known_values
    from staticmem.report.layers import down_to, layer_table
    from staticmem.studies import Study, without_cycle_search

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    wanted = scenario.request(args)
    with model_path(args.model) as path, without_cycle_search():
        study = Study.open(path, wanted)
        graph, training = study.result.graph, study.scenario.training
        values = known_values(graph, training)
        table = layer_table(study.model.path, graph, study.lifetimes, values, study.scenario.mode)
    emit(down_to(table, args.depth), chosen, args)
    return 0
