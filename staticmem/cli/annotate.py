"""`staticmem annotate FILE --from MODULE:FACTORY`: records a model's code into a file that was exported before."""

from __future__ import annotations

import argparse
from collections import Counter
from math import prod
from typing import Any

from staticmem.cli.factory import add_factory_options, built_model, named_object
from staticmem.cli.flags import add_verb
from staticmem.cli.output import add_debug, check_target, say, write_atomically
from staticmem.errors import UsageError

DESCRIPTION = """\
Runs the forward of your model once in each mode on tensors without data, and writes what decides its memory into FILE:
the ops that really run, in place or not, which values variables hold, custom autograd functions, checkpoints. 'analyze'
then needs no assumption about the code. The graph in the file stays as it is. It needs PyTorch.
"""

EPILOG = """\
examples:
  staticmem annotate model.onnx --from train.py:build_model
  staticmem annotate model.pt2 --from mypackage.models:Encoder --input 2x128:int64 -o recorded.pt2
"""

MOST_OTHERS = 0.1  # of the elements of a file's weights: constants that exporters make of code


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
    from staticmem.recording.record import record
    from staticmem.recording.told import with_recording

    document = record(module, inputs, loss=named_object(args.loss) if args.loss else None)
    check_same_model(args.file, model, RecordedModel(args.file, document, model.format))
    with open(args.file, "rb") as file:
        data = file.read()
    target = args.output or args.file
    write_atomically(target, with_recording(data, f".{model.format}", document))
    say(f"Wrote {target} with a recording of {args.factory}")
    return 0


def check_same_model(path: str, model: Any, recorded: Any) -> None:
    """Compares inputs, and the weights of the graph: an export may drop parameters that no op reads, fold norms and add
    constants, so nearly all elements of its weights have to be in the code, and not all of the code's in it.

    Raises:
        UsageError: the code has other inputs or other weights than the file.
    """
    own = [(spec.dtype, len(spec.shape or ())) for spec in model.inputs]
    code = [(spec.dtype, len(spec.shape or ())) for spec in recorded.inputs]
    if own != code:
        raise _another_model(
            path,
            f"The file has {len(own)} inputs ({_listed(own)}), and the code was given {len(code)} ({_listed(code)}).",
        )
    from staticmem.frontends import decode
    from staticmem.ir.model_file import resolve
    from staticmem.passes.pipeline import bind

    sizes = {name: size for name, size in recorded.sizes.example.items() if name in recorded.symbols}
    given = decode(recorded, resolve(recorded, dims=sizes))
    dims = {
        dim: size
        for spec, value in zip(model.inputs, given.inputs, strict=True)
        for dim, size in zip(spec.shape or (), value.shape or (), strict=True)
        if isinstance(dim, str)
    }
    weights = _weights(bind(model, resolve(model, dims=dims)))
    missing = weights - _weights(given)
    elements = sum(prod(shape) * count for shape, count in weights.items())
    if sum(prod(shape) * count for shape, count in missing.items()) > MOST_OTHERS * elements:
        shapes = ", ".join(str(list(shape)) for shape in list(missing)[:3])
        raise _another_model(path, f"The file has weights that the code has not: {shapes}.")


def _weights(graph: Any) -> Counter[tuple[int, ...]]:
    """Shapes of matrices and kernels, whichever way round they are stored."""
    owned = [p for p in (*graph.parameters, *graph.buffers) if not p.alias_of and len(p.value.shape or ()) > 1]
    return Counter(tuple(sorted(p.value.shape)) for p in owned)


def _another_model(path: str, why: str) -> UsageError:
    hint = "Name the factory that the file was exported from, with inputs of the same kinds."
    return UsageError(f"{path} is not an export of this code", why, hint, code="SM174")


def _listed(inputs: list[tuple[Any, int]]) -> str:
    return ", ".join(f"{dtype.name} with {rank} dimensions" for dtype, rank in inputs)
