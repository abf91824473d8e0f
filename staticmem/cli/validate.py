"""`staticmem validate MODEL`: runs a model on this machine and compares its memory with the prediction."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from staticmem.cli import session, settings
from staticmem.cli.flags import add_model, add_scenario, add_verb, byte_size, one_of, positive
from staticmem.cli.output import add_output, check_target, chosen_format, emit
from staticmem.report.formats import Formats
from staticmem.scenario.request import OPTIONS

if TYPE_CHECKING:
    from staticmem.validate.records import Record

FORMATS = Formats("validate", module="staticmem.validate.records")
RUNTIMES = ("onnxruntime", "torch")
DEVICES = ("auto", "cpu", "cuda")

VALIDATE = """\
Runs the model on this machine with random inputs, reads its memory, and shows prediction and reading side by side:
for each meter, and for each node where they differ. Weights that are missing are random data in a temporary file.
The model runs in its own process. With -o FILE.json the record of it is saved.
"""

VALIDATE_EXAMPLES = """\
examples:
  staticmem validate model.onnx --batch 4
      inference with the ONNX Runtime, on CUDA where the session really runs there, else on the CPU
  staticmem validate model.onnx --batch 4 --device cpu --optimization disable
  staticmem validate model.onnx --batch 4 -o record.json
  staticmem validate model.pt2 --batch 8 --optimizer adam --runtime torch --device cpu
      training steps with PyTorch, live storages counted at every op
"""


def add_validate(verbs: Any) -> None:
    about = "run a model here and compare its memory with the prediction"
    parser = add_verb(verbs, "validate", run, about, VALIDATE, VALIDATE_EXAMPLES)
    add_model(parser)
    runs = parser.add_argument_group("the runs")
    about = "what runs the model: onnxruntime (default), or torch: training steps too, of .pt2 and .onnx"
    runtime = one_of("--runtime", RUNTIMES)
    runs.add_argument("--runtime", type=runtime, default=RUNTIMES[0], metavar="NAME", help=about)
    about = "auto (default: CUDA where it runs, else the CPU), cpu, cuda"
    runs.add_argument("--device", type=one_of("--device", DEVICES), default="auto", metavar="DEVICE", help=about)
    runs.add_argument("--runs", type=positive("--runs"), default=3, metavar="N", help="how many (default 3)")
    about = "for all runs (default 600)"
    runs.add_argument("--timeout", type=positive("--timeout"), default=600, metavar="SECONDS", help=about)
    about = "main memory for the process that runs the model, e.g. 8GiB (default: what is available)"
    runs.add_argument("--memory-limit", type=byte_size("--memory-limit"), metavar="SIZE", help=about)
    about = "torch on CUDA: PyTorch's own memory snapshot goes there ('staticmem compare-snapshot' reads it)"
    runs.add_argument("--snapshot", metavar="FILE", help=about)
    session.add_session(parser)
    add_scenario(parser)
    output = add_output(parser, FORMATS)
    output.add_argument("--strict", action="store_true", help="exit 1 where prediction and reading differ")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where --strict is given and the two differ."""
    chosen = chosen_format(args, FORMATS)
    with settings.model_path(args.model) as path:
        record = _torch_record(path, args) if args.runtime == "torch" else _session_record(path, args)
    emit(record, chosen, args)
    return 1 if args.strict and record.verdict == "differs" else 0


def _torch_record(path: str, args: argparse.Namespace) -> Record:
    from staticmem.validate.pytorch.prediction import CODE_OPTIONS, options_of
    from staticmem.validate.pytorch.validation import validate_torch

    if args.snapshot is not None:
        check_target(args.snapshot, args.force)
    request = settings.without(args, settings.request(args), CODE_OPTIONS, "a run has the model's graph, not its code")
    options, threads = options_of(request), args.intra_op_num_threads
    limits = (args.runs, args.timeout, args.memory_limit)
    return validate_torch(path, options, args.device, *limits, args.snapshot, threads, args.debug)


def _session_record(path: str, args: argparse.Namespace) -> Record:
    from staticmem.ort.validation.validation import validate_session

    session.refuse_training(settings.given(args))
    request = settings.request(args)
    training = [
        name for name, one in OPTIONS.items() if not one.session or (name == "mode" and request.mode == "train")
    ]
    request = settings.without(args, request, training, "a session does not train")
    options = session.session_options(args, intra_op_num_threads=os.cpu_count() or 1, runs=args.runs)
    return validate_session(path, request, options, args.device, args.timeout, args.memory_limit)
