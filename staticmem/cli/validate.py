"""`staticmem validate MODEL`: runs a model on this machine and compares its memory with the prediction."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from staticmem.cli import scenario
from staticmem.cli.reporting import add_output, chosen_format
from staticmem.cli.values import byte_size, one_of, positive
from staticmem.errors import UsageError

if TYPE_CHECKING:
    from staticmem.validate.record import Record

FORMATS = ("table", "json")
SUFFIXES = {"txt": "table", "json": "json"}
RUNTIMES = ("onnxruntime", "torch")
DEVICES = ("auto", "cpu", "cuda")
LEVELS = ("disable", "basic", "extended", "layout", "all")
SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
STRATEGIES = ("kNextPowerOfTwo", "kSameAsRequested")

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
    session = parser.add_argument_group("the session of the ONNX Runtime")
    session.add_argument(
        "--optimization", type=one_of("--optimization", LEVELS), default="all", metavar="LEVEL",
        help="of the graph: disable, basic, extended, layout, all (default)",
    )  # fmt: skip
    session.add_argument("--no-mem-pattern", action="store_true", help="enable_mem_pattern=False")
    session.add_argument("--no-mem-reuse", action="store_true", help="enable_mem_reuse=False")
    session.add_argument(
        "--threads",
        type=positive("--threads"),
        metavar="N",
        help="intra_op_num_threads (default: the processor's), of torch too",
    )
    session.add_argument(
        "--arena-extend-strategy", type=one_of("--arena-extend-strategy", STRATEGIES), default=STRATEGIES[0],
        metavar="NAME", help="CUDA: kNextPowerOfTwo (default) or kSameAsRequested",
    )  # fmt: skip
    session.add_argument(
        "--gpu-mem-limit", type=byte_size("--gpu-mem-limit"), metavar="SIZE", help="CUDA: of the arena, e.g. 4GiB"
    )
    session.add_argument(
        "--cudnn-conv-algo-search", type=one_of("--cudnn-conv-algo-search", SEARCHES), default=SEARCHES[0],
        metavar="NAME", help="CUDA: EXHAUSTIVE (default), HEURISTIC or DEFAULT",
    )  # fmt: skip
    scenario.add_scenario(parser)
    output = add_output(parser, FORMATS)
    output.add_argument("--strict", action="store_true", help="exit 1 where prediction and reading differ")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where --strict found a difference."""
    from staticmem.cli.output import check_target, put
    from staticmem.cli.source import model_path
    from staticmem.validate.table import render

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    kind = chosen_format(args, SUFFIXES, "table")
    with model_path(args.model) as path:
        record = _torch_record(path, args) if args.runtime == "torch" else _record(path, args)
    if kind == "json":
        text = record.dumps()
    else:
        text = render(record, args.units)
        text = text.splitlines()[-1] + "\n" if args.quiet else text
    put(text, args)
    return 1 if args.strict and record.verdict == "differs" else 0


def _torch_record(path: str, args: argparse.Namespace) -> Record:
    from staticmem.cli.output import check_target
    from staticmem.validate.torch_predict import words_of
    from staticmem.validate.torch_validate import validate_torch

    if args.snapshot is not None:
        check_target(args.snapshot, args.force)
    return validate_torch(
        path, words_of(scenario.request(args)), args.device, args.runs, args.timeout, args.memory_limit,
        args.snapshot, args.threads, args.debug,
    )  # fmt: skip


def _record(path: str, args: argparse.Namespace) -> Record:
    import os

    from staticmem.allocators.onnxruntime.session import SessionOptions
    from staticmem.validate.ort_validate import Scenario, validate

    wanted = scenario.request(args)
    if wanted.optimizer is not None or wanted.mode == "train":
        raise UsageError(
            "the ONNX Runtime does not train",
            "--optimizer and --mode train ask for a training step.",
            "Leave them away: it runs inference.",
            code="SM512",
        )
    options = SessionOptions(
        enable_mem_pattern=not args.no_mem_pattern,
        enable_mem_reuse=not args.no_mem_reuse,
        arena_extend_strategy=args.arena_extend_strategy,
        graph_optimization_level=args.optimization,
        intra_op_num_threads=args.threads or os.cpu_count() or 1,
        gpu_mem_limit=args.gpu_mem_limit,
        cudnn_conv_algo_search=args.cudnn_conv_algo_search,
        runs=args.runs,
    )
    side = wanted.resolution
    sizes = Scenario(wanted.batch, (side, side) if isinstance(side, int) else side, wanted.dims)
    return validate(path, sizes, options, args.device, args.timeout, args.memory_limit)
