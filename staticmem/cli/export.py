"""`staticmem export MODULE:FACTORY -o FILE`: the faithful training export of a model's code, without weights."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from typing import Any

from staticmem.cli.factory import add_factory_options, built_model, named_object, refused
from staticmem.cli.flags import add_verb, one_of
from staticmem.cli.output import Progress, add_debug, check_target, say, write_atomically
from staticmem.errors import ModelFileError, UsageError
from staticmem.frontends.architectures import OPTIONS, Architecture, architecture_of
from staticmem.recording import EXPORTERS, NEITHER, NO_GRAPH, asks_for_contents

DESCRIPTION = """\
Builds a model from your code on the meta device, where weights have no bytes, and exports it in training mode for
'staticmem analyze': a .pt2 or an .onnx without weights. It imports and runs your code. It needs PyTorch.

FACTORY is a function or class without required arguments. It returns the module, or the module and a tuple of example
inputs. The graph is for every tool that reads such files. Beside it the file carries a recording for 'staticmem
analyze': the forward runs once in each mode (training, inference, both also under autocast) on tensors without data,
and the ops that really ran are written down, with what Python variables hold, what is in place, custom functions and
checkpoints.

transformers:CONFIG.json (or a folder that has one), diffusers:FOLDER (of a pipeline, for the recording alone),
timm:NAME and torchvision:NAME are built by the installed package,
without weights and without network; hf:OWNER/NAME is a config of the Hugging Face Hub. Options follow a comma: head,
attention, dtype, labels, mask, checkpointing, batch, seq, size (docs/export.md). Every verb that takes a model takes
these names too.

Every size stays open that the code leaves open: the batch, lengths, height and width. stderr says which, and
which the code fixed. 'staticmem analyze' takes sizes of the example where it is given none, except the batch.
"""

EPILOG = """\
examples:
  staticmem export torchvision.models:resnet50 --input 2x3x224x224 -o resnet50.pt2
  staticmem export train.py:build_model -o model.pt2
  staticmem export transformers:llama/config.json,seq=2048,labels=yes -o llama.pt2
  staticmem export mypackage.models:Encoder --input 2x128:int64 --input 2x128:bool -o encoder.onnx
"""


def add_export(verbs: Any) -> None:
    about = "export a model's code for analysis, without weights"
    parser = add_verb(verbs, "export", run, about, DESCRIPTION, EPILOG)
    names = "transformers:CONFIG.json, hf:OWNER/NAME, timm:NAME, torchvision:NAME"
    about = f"a module or a .py file, and a name in it; or {names}"
    parser.add_argument("factory", metavar="MODULE:FACTORY", help=about)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="model.pt2 or model.onnx")
    parser.add_argument("--force", action="store_true", help="overwrite the output file")
    parser.add_argument("--eval", action="store_true", help="export in evaluation mode")
    add_factory_options(parser)
    about = "of .onnx: dynamo (default), or torchscript, which runs the code once, for nothing on meta, in full on cpu"
    parser.add_argument(
        "--exporter", type=one_of("--exporter", EXPORTERS), default="dynamo", metavar="NAME", help=about
    )
    about = "keep source lines in the graph, for other tools; a recording needs none. They name your files"
    parser.add_argument("--stack-traces", action="store_true", help=about)
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    check_target(args.output, args.force)
    architecture = architecture_of(args.factory)
    kind = os.path.splitext(args.output)[1].lower()
    if kind not in (".pt2", ".onnx"):
        why = "The suffix decides: .pt2 or .onnx."
        raise UsageError(f"no format for '{args.output}'", why, "Example: -o model.pt2", "SM141")
    if kind == ".pt2" and args.exporter != "dynamo":
        raise refused("--exporter is for .onnx", "A .pt2 is what torch.export writes.", "Example: -o model.onnx")
    data, lines = (
        _export_architecture(architecture, kind, args) if architecture is not None else _export_code(kind, args)
    )
    write_atomically(args.output, data)
    mode = "evaluation" if args.eval else "training"
    for line in (f"Wrote {args.output} ({mode} mode, no weights)", *lines):
        say(line)
    return 0


def _export_architecture(architecture: Architecture, kind: str, args: argparse.Namespace) -> tuple[bytes, list[str]]:
    """The file of a model that a package builds."""
    given = {"--input": args.input, "--loss": args.loss, "--stack-traces": args.stack_traces}
    given |= {"--device": args.device != "meta", "--exporter": args.exporter != "dynamo"}
    if unused := [flag for flag, value in given.items() if value]:
        why = f"What is built and with which inputs stands in the name: {', '.join(f'{o}=' for o in OPTIONS)}."
        hint = "Example: transformers:config.json,seq=2048,labels=yes"
        raise UsageError(f"{', '.join(unused)} with {args.factory}", why, hint, "SM149")
    from staticmem.recording.architectures import exported_file

    with Progress("", doing=f"building and recording {args.factory}"):
        return exported_file(architecture, kind, not args.eval)


def _export_code(kind: str, args: argparse.Namespace) -> tuple[bytes, list[str]]:
    """The file of a model that the user's code builds."""
    with Progress("", doing=f"building the model of {args.factory}"):
        module, inputs = built_model(args)
    from staticmem.recording.export import ExportRequest, exported  # late: it imports torch

    loss = named_object(args.loss) if args.loss else None
    module.train(not args.eval)
    request = ExportRequest(module, inputs, kind, args.exporter, not args.eval, args.stack_traces, loss)
    try:
        with Progress("modes and the graph", doing="recording the model and exporting its graph") as bar:
            data, lines = exported(replace(request, progress=bar.update))
    except ModelFileError as error:
        if NEITHER in error.why:
            error.hint = _advice(error.why, args.device, request.exporter) or error.hint
        raise
    if args.device == "meta":
        lines = [f"{line} --device cpu may make it." if line.startswith(NO_GRAPH) else line for line in lines]
    return data, lines


def _advice(message: str, device: str, exporter: str) -> str | None:
    """What to do where neither graph nor recording could be made; None: the error's own hint says it."""
    reads = asks_for_contents(message)
    needs_values = re.search(r"\bmeta\b|Meta|Could not run|NotImplementedError|no data|has no storage", message)
    if device == "meta" and (exporter == "torchscript" or (needs_values and not reads)):
        return "On the meta device tensors have no values, and all must be there: try --device cpu."
    if reads:
        return "The code reads values, which torch.export never has: try --exporter torchscript --device cpu."
    return None
