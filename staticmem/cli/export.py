"""`staticmem export MODULE:FACTORY -o FILE`: the faithful training export of a model's code, without weights."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from staticmem.cli.flags import add_verb, one_of
from staticmem.cli.output import add_debug, check_target, write_atomically
from staticmem.errors import ModelFileError, UsageError
from staticmem.ir import dtypes
from staticmem.ir.model_file import TracedSizes

DESCRIPTION = """\
Builds a model from your code on the meta device, where weights have no bytes, and exports it in training mode for
'staticmem analyze': a .pt2 or an .onnx without weights. It imports and runs your code. PyTorch has to be installed.

FACTORY is a function or class without required arguments. It returns the module, or the module and a tuple of example
inputs. Every size stays open that the code leaves open: the batch, lengths, height and width. stderr says which, and
which the code fixed. 'staticmem analyze' takes sizes of the example where it is given none, but for the batch.
"""

EPILOG = """\
examples:
  staticmem export torchvision.models:resnet50 --input 2x3x224x224 -o resnet50.pt2
  staticmem export train.py:build_model -o model.pt2
  staticmem export mypackage.models:Encoder --input 2x128:int64 --input 2x128:bool -o encoder.onnx
"""


EXPORTERS = ("dynamo", "torchscript")


def add_export(verbs: Any) -> None:
    about = "export a model's code for analysis, without weights"
    parser = add_verb(verbs, "export", run, about, DESCRIPTION, EPILOG)
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="a module or a .py file, and a name in it")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="model.pt2 or model.onnx")
    parser.add_argument("--force", action="store_true", help="overwrite the output file")
    about = "an example input, e.g. 2x3x224x224 or 2x128:int64; repeatable, in order"
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE[:DTYPE]", type=_tensor, help=about)
    parser.add_argument("--eval", action="store_true", help="export in evaluation mode")
    about, device = "where the model is built: meta (default), or cpu for code that reads its weights", ("meta", "cpu")
    parser.add_argument("--device", type=one_of("--device", device), default="meta", metavar="DEVICE", help=about)
    about = "of .onnx: dynamo (default), or torchscript, which runs the code once, for nothing on meta, in full on cpu"
    parser.add_argument(
        "--exporter", type=one_of("--exporter", EXPORTERS), default="dynamo", metavar="NAME", help=about
    )
    about = "keep source lines in the file: they settle which variables live (inference), and name your files"
    parser.add_argument("--stack-traces", action="store_true", help=about)
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    check_target(args.output, args.force)
    kind = os.path.splitext(args.output)[1].lower()
    if kind not in (".pt2", ".onnx"):
        why = "The suffix decides: .pt2 or .onnx."
        raise UsageError(f"no format for '{args.output}'", why, "Example: -o model.pt2", "SM141")
    if kind == ".pt2" and args.exporter != "dynamo":
        raise _refused("--exporter is for .onnx", "A .pt2 is what torch.export writes.", "Example: -o model.onnx")
    try:
        import torch  # late: staticmem runs without it
    except ImportError as error:
        raise _refused("PyTorch is not installed", "It makes the export.", "pip install 'staticmem[torch]'") from error
    factory = _find(args.factory)
    with torch.device(args.device):
        module, inputs = _build(factory, args.factory)
        if args.input:
            inputs = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in args.input)
    if inputs is None:
        hint = "Add --input 2x3x224x224, or let the factory return (module, inputs)."
        raise _refused(f"{args.factory} gives no inputs", "An export needs the shape of each input.", hint)
    request = ExportRequest(module.train(not args.eval), inputs, kind, args.exporter, not args.eval, args.stack_traces)
    try:
        data, told = _exported(request)
    except ModelFileError as error:
        error.hint = _advice(f"{error.what} {error.why}", args.device, request.exporter) or error.hint
        raise
    write_atomically(args.output, data)
    mode = "evaluation" if args.eval else "training"
    sys.stderr.write("".join(f"{line}\n" for line in (f"Wrote {args.output} ({mode} mode, no weights)", *told)))
    return 0


@dataclass(frozen=True)
class ExportRequest:
    """What is exported, and how."""

    module: Any
    inputs: tuple[Any, ...]
    kind: str  # .pt2 or .onnx
    exporter: str  # of .onnx
    train: bool
    stack_traces: bool


def _exported(request: ExportRequest) -> tuple[bytes, list[str]]:
    """The bytes of the file, and what the user is told of its sizes."""
    if request.kind == ".onnx" and request.exporter == "torchscript":
        return _scripted(request)
    from staticmem.frontends import traced_sizes
    from staticmem.recording import tracing, writing

    module, inputs = request.module, request.inputs
    traced = tracing.trace(module, inputs, as_given=False)
    told = [f"Open sizes: {', '.join(traced.open) or 'none'}"]
    if traced.fixed:
        told.append(f"Fixed by the code: {', '.join(traced.fixed)}")
    write = writing.pt2_bytes if request.kind == ".pt2" else writing.onnx_bytes
    extra = {traced_sizes.NAME: traced_sizes.write(traced.sizes)}
    return write(traced.program, stack_traces=request.stack_traces, extra=extra), told


def _scripted(request: ExportRequest) -> tuple[bytes, list[str]]:
    """The same by the TorchScript exporter. torch.export says which sizes the code fixes, where it can."""
    from staticmem.frontends import traced_sizes
    from staticmem.recording import tracing, writing

    module, inputs, told = request.module, request.inputs, []
    try:
        traced = tracing.trace(module, inputs, as_given=False)
        axes, sizes = traced.axes, traced.named_sizes
    except ModelFileError:
        told = ["What the code fixes is not known: torch.export fails on it"]
        opened = tracing.open_axes(inputs)
        axes = tuple({axis: n for axis, n in names.items() if n == "batch"} for names in opened)
        sizes = TracedSizes()
    extra = {traced_sizes.NAME: traced_sizes.write(sizes)}
    last: ModelFileError | None = None
    for rung in tracing.attempts(axes):
        try:
            data = writing.torchscript_bytes(module, inputs, rung, train=request.train, extra=extra)
        except ModelFileError as error:
            last = error
            continue
        names = dict.fromkeys(name for opened in rung for name in opened.values())
        return data, [f"Open sizes: {', '.join(names) or 'none'}", *told]
    assert last is not None
    raise last


def _advice(message: str, device: str, exporter: str) -> str | None:
    """What to do where an export failed because the code reads values of tensors."""
    if device == "meta" and (exporter == "torchscript" or re.search(r"\bmeta\b", message)):
        return "On the meta device tensors have no values, and all have to be there: try --device cpu."
    if re.search(r"data-dependent|DataDependent|\.numpy\(\)|\.item\(\)", message):
        return "The code reads values, which torch.export never has: try --exporter torchscript --device cpu."
    return None


def _tensor(text: str) -> tuple[tuple[int, ...], str]:
    """`2x128:int64` as a shape and a dtype of PyTorch."""
    shape, _, dtype = text.partition(":")
    if not re.fullmatch(r"\d{1,12}(x\d{1,12})*", shape, re.ASCII):
        raise _refused(f"--input '{text}' is not a shape", "It is sizes with x between.", "Example: 2x3x224x224")
    element = dtypes.parse(dtype or "float32")
    if element is None:
        raise _refused(f"--input '{text}': no dtype '{dtype}'", "It is PyTorch's name.", "Example: 2x128:int64")
    return tuple(int(n) for n in shape.split("x")), element.name


def _refused(what: str, why: str, hint: str = "Check the name.") -> UsageError:
    return UsageError(what, why, hint, "SM172")


def _find(name: str) -> Any:
    """The object that `package.module:name` or `file.py:name` means."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        why, hint = "It is a module or a .py file, and a name in it.", "Example: torchvision.models:resnet50"
        raise _refused(f"'{name}' is not MODULE:FACTORY", why, hint)
    try:
        factory = _load(where)
    except UsageError:
        raise
    except Exception as error:
        hint = "Run it in the environment and folder in which it works."
        raise _refused(f"{where} cannot be imported", _first_line(error), hint) from error
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise _refused(f"{where} has no '{attribute}'", "The module has no such name.")
        factory = getattr(factory, part)
    if not callable(factory):
        raise _refused(f"{name} is not a function or class", "It has to return a model.")
    return factory


def _load(where: str) -> Any:
    if not where.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(where)
    if not os.path.isfile(where):
        raise _refused(f"{where} does not exist", "There is no such file.", "Check the path.")
    sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(where))[0], where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _build(factory: Any, name: str) -> tuple[Any, Any]:
    import torch

    try:
        result = factory()
    except Exception as error:
        hint = "It has to work without arguments; for code that reads its weights try --device cpu."
        raise _refused(f"{name} failed", _first_line(error), hint) from error
    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, torch.nn.Module):
        what, why = f"{name} returns {type(module).__name__}", "It has to return an nn.Module, or (module, inputs)."
        raise _refused(what, why, "Give a function that builds the model.")
    return module, inputs


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
