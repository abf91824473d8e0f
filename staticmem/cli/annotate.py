"""`staticmem annotate FILE --from MODULE:FACTORY`: records a model's code into a file that was exported before."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from staticmem.cli.factory import add_factory_options, built_model, named_object
from staticmem.cli.flags import add_verb
from staticmem.cli.output import add_debug, check_target, write_atomically
from staticmem.errors import UsageError

DESCRIPTION = """\
Runs the forward of your model once in each mode on tensors without data, and writes what decides its memory into FILE:
the ops that really run, in place or not, which values variables hold, custom autograd functions, checkpoints. 'analyze'
then needs no assumption about the code. The graph in the file stays as it is. PyTorch has to be installed.
"""

EPILOG = """\
examples:
  staticmem annotate model.onnx --from train.py:build_model
  staticmem annotate model.pt2 --from mypackage.models:Encoder --input 2x128:int64 -o recorded.pt2
"""


def add_annotate(verbs: Any) -> None:
    about = "record a model's code into a file that was exported before"
    parser = add_verb(verbs, "annotate", run, about, DESCRIPTION, EPILOG)
    parser.add_argument("file", metavar="FILE", help="a .pt2 or an .onnx file")
    about = "the code of the model: a module or a .py file, and a name in it"
    parser.add_argument("--from", dest="factory", metavar="MODULE:FACTORY", required=True, help=about)
    parser.add_argument("-o", "--output", metavar="OUT", help="write another file instead of changing FILE")
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    add_factory_options(parser)
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    from staticmem.frontends import open_model

    if args.output is not None:
        check_target(args.output, args.force)
    model = open_model(args.file, recordings=False)
    module, inputs = built_model(args)
    from staticmem.frontends.recorded import RecordedModel
    from staticmem.recording.attach import with_recording
    from staticmem.recording.record import record

    document = record(module, inputs, loss=named_object(args.loss) if args.loss else None)
    check_same_model(args.file, model, RecordedModel(args.file, document, model.format))
    with open(args.file, "rb") as file:
        data = file.read()
    target = args.output or args.file
    write_atomically(target, with_recording(data, f".{model.format}", document))
    sys.stderr.write(f"Wrote {target} with a recording of {args.factory}\n")
    return 0


def check_same_model(path: str, model: Any, recorded: Any) -> None:
    """Raises UsageError where the code has other inputs than the file."""
    own = [(spec.dtype, len(spec.shape or ())) for spec in model.inputs]
    code = [(spec.dtype, len(spec.shape or ())) for spec in recorded.inputs]
    if own != code:
        raise UsageError(
            f"{path} is not an export of this code",
            f"The file has {len(own)} inputs ({_listed(own)}), and the code was given {len(code)} ({_listed(code)}).",
            "Name the factory that the file was exported from, with inputs of the same kinds.",
            code="SM174",
        )


def _listed(inputs: list[tuple[Any, int]]) -> str:
    return ", ".join(f"{dtype.name} with {rank} dimensions" for dtype, rank in inputs)
