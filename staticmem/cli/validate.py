"""`staticmem validate MODEL`: runs a model on this machine and compares its memory with the prediction."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from staticmem.cli import scenario, session
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.cli.values import byte_size, one_of, positive
from staticmem.report.formats import Formats

if TYPE_CHECKING:
    from staticmem.validate.records import Record

FORMATS = Formats("validate", module="staticmem.validate.records")
RUNTIMES = ("onnxruntime", "torch")
DEVICES = ("auto", "cpu", "cuda")

DESCRIPTION = """\
Runs the model on this machine with random inputs, reads its memory, and shows prediction and reading side by side:
for each meter, and for each node where they differ. Weights that are missing are random data in a temporary file.
The model runs in a process of its own. With -o FILE.json the record of it is saved.
"""

EPILOG = """\
examples:
  staticmem validate model.onnx --batch 4
      inference with the ONNX Runtime, on CUDA where the session really runs there, else on the CPU
  staticmem validate model.onnx --batch 4 --device cpu --optimization disable
  staticmem validate model.onnx --batch 4 -o record.json
  staticmem validate model.pt2 --batch 8 --optimizer adam --runtime torch --device cpu
      training steps with PyTorch, live storages counted at every op
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "validate",
        help="run a model here and compare its memory with the prediction",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    scenario.add_model(parser)
    runs = parser.add_argument_group("the runs")
    runs.add_argument(
        "--runtime", type=one_of("--runtime", RUNTIMES), default=RUNTIMES[0], metavar="NAME",
        help="what runs the model: onnxruntime (default), or torch: training steps too, of .pt2 and .onnx",
    )  # fmt: skip
    runs.add_argument(
        "--device", type=one_of("--device", DEVICES), default="auto", metavar="DEVICE",
        help="auto (default: CUDA where it runs, else the CPU), cpu, cuda",
    )  # fmt: skip
    runs.add_argument("--runs", type=positive("--runs"), default=3, metavar="N", help="how many (default 3)")
    runs.add_argument(
        "--timeout", type=positive("--timeout"), default=600, metavar="SECONDS", help="for all runs (default 600)"
    )
    runs.add_argument(
        "--memory-limit", type=byte_size("--memory-limit"), metavar="SIZE",
        help="main memory for the process that runs the model, e.g. 8GiB (default: what is available)",
    )  # fmt: skip
    runs.add_argument(
        "--snapshot", metavar="FILE",
        help="torch on CUDA: PyTorch's own memory snapshot goes there ('staticmem compare-snapshot' reads it)",
    )  # fmt: skip
    session.add_session(parser)
    scenario.add_scenario(parser)
    output = add_output(parser, FORMATS)
    output.add_argument("--strict", action="store_true", help="exit 1 where prediction and reading differ")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where --strict found a difference."""
    from staticmem.cli.output import check_target, emit
    from staticmem.cli.source import model_path

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    chosen = chosen_format(args, FORMATS)
    with model_path(args.model) as path:
        record = _torch_record(path, args) if args.runtime == "torch" else _record(path, args)
    emit(record, chosen, args)
    return 1 if args.strict and record.verdict == "differs" else 0


def _torch_record(path: str, args: argparse.Namespace) -> Record:
    from staticmem.cli.output import check_target
    from staticmem.validate.pytorch.prediction import words_of
    from staticmem.validate.pytorch.validation import validate_torch

    if args.snapshot is not None:
        check_target(args.snapshot, args.force)
    return validate_torch(
        path, words_of(scenario.request(args)), args.device, args.runs, args.timeout, args.memory_limit,
        args.snapshot, args.threads, args.debug,
    )  # fmt: skip


def _record(path: str, args: argparse.Namespace) -> Record:
    import os

    from staticmem.validate.onnxruntime.validation import Scenario, validate_session

    wanted = scenario.request(args)
    session.refuse_training({"optimizer": wanted.optimizer, "mode": wanted.mode})
    options = session.options(args, os.cpu_count() or 1, runs=args.runs)
    side = wanted.resolution
    sizes = Scenario(wanted.batch, (side, side) if isinstance(side, int) else side, wanted.dims)
    return validate_session(path, sizes, options, args.device, args.timeout, args.memory_limit)
