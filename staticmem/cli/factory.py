"""Models and inputs that verbs are given as code: `MODULE:FACTORY` and `--input SHAPE`.

That code runs, and may import what lies beside it, as `python FILE.py` lets it. What staticmem itself imports is never
taken from there: a neighbour named `onnx.py` is no reason for another answer.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from typing import Any

from staticmem.cli.flags import one_of
from staticmem.errors import UsageError, described
from staticmem.ir import dtypes


def add_factory_options(parser: argparse.ArgumentParser) -> None:
    """The options that say how the factory is called, and with what the model."""
    about = "an example input, e.g. 2x3x224x224 or 2x128:int64; repeatable, in order"
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE[:DTYPE]", type=_tensor, help=about)
    about, device = "where the model is built: meta (default), or cpu for code that reads its weights", ("meta", "cpu")
    parser.add_argument("--device", type=one_of("--device", device), default="meta", metavar="DEVICE", help=about)
    about = "FILE.py:FUNCTION that takes what the model returns and gives the loss; it is recorded with the model"
    parser.add_argument("--loss", metavar="MODULE:FUNCTION", help=about)


def built_model(args: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The module of `args.factory` and its example inputs.

    Raises:
        UsageError: PyTorch is missing, the factory cannot be called, or there are no inputs.
    """
    try:
        import torch  # late: staticmem runs without it
    except ImportError as error:
        raise refused("PyTorch is not installed", "It makes the export.", "pip install 'staticmem[torch]'") from error
    factory = named_object(args.factory)
    with torch.device(args.device):
        module, inputs = _build(factory, args.factory)
        if args.input:
            inputs = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in args.input)
    if inputs is None:
        hint = "Add --input 2x3x224x224, or let the factory return (module, inputs)."
        raise refused(f"{args.factory} gives no inputs", "An export needs the shape of each input.", hint)
    return module, inputs


def _tensor(text: str) -> tuple[tuple[int, ...], str]:
    """`2x128:int64` as a shape and a dtype of PyTorch."""
    shape, _, dtype = text.partition(":")
    if not re.fullmatch(r"\d{1,12}(x\d{1,12})*", shape, re.ASCII):
        raise refused(f"--input '{text}' is not a shape", "It is sizes with x between.", "Example: 2x3x224x224")
    element = dtypes.parse(dtype or "float32")
    if element is None:
        raise refused(f"--input '{text}': no dtype '{dtype}'", "It is PyTorch's name.", "Example: 2x128:int64")
    return tuple(int(n) for n in shape.split("x")), element.name


def refused(what: str, why: str, hint: str = "Check the name.") -> UsageError:
    """The error for code that cannot be taken."""
    return UsageError(what, why, hint, "SM172")


def named_object(name: str) -> Any:
    """The object that `package.module:name` or `file.py:name` means."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        why, hint = "It is a module or a .py file, and a name in it.", "Example: torchvision.models:resnet50"
        raise refused(f"'{name}' is not MODULE:FACTORY", why, hint)
    try:
        factory = _load(where)
    except UsageError:
        raise
    except Exception as error:
        hint = "Run it in the environment and folder in which it works."
        raise refused(f"{where} cannot be imported", described(error), hint) from error
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise refused(f"{where} has no '{attribute}'", "The module has no such name.")
        factory = getattr(factory, part)
    if not callable(factory):
        raise refused(f"{name} is not a function or class", "It must return a model.")
    return factory


# What staticmem imports, beside Python's own modules: the dependencies and extras of pyproject.toml, by their modules
_OWN = frozenset({"staticmem", *"numpy networkx onnx onnxruntime onnxscript shtab torch yaml".split()})


class _Neighbours(importlib.abc.MetaPathFinder):
    """Finds modules in a folder before all others, but for those that staticmem or Python has."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if path is not None or fullname in _OWN or fullname in sys.stdlib_module_names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, [self.folder], target)
        if spec is not None and spec.loader is None:  # a plain folder: a package of that name comes before it
            return importlib.machinery.PathFinder.find_spec(fullname, [*sys.path, self.folder], target)
        return spec


def _load(where: str) -> Any:
    if not where.endswith(".py"):
        sys.meta_path.insert(0, _Neighbours(os.getcwd()))
        return importlib.import_module(where)
    if not os.path.isfile(where):
        raise refused(f"{where} does not exist", "There is no such file.", "Check the path.")
    sys.meta_path.insert(0, _Neighbours(os.path.dirname(os.path.abspath(where))))
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
        hint = "It must work without arguments; for code that reads its weights try --device cpu."
        raise refused(f"{name} failed", described(error), hint) from error
    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, torch.nn.Module):
        what, why = f"{name} returns {type(module).__name__}", "It must return an nn.Module, or (module, inputs)."
        raise refused(what, why, "Give a function that builds the model.")
    return module, inputs
