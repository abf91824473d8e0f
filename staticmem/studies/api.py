"""`staticmem.analyze`, `max_batch` and `levers`: their keywords are the options that `Request` declares."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol

from staticmem.errors import UsageError
from staticmem.report.model import LargestBatch, Report
from staticmem.report.sweep import Levers
from staticmem.scenario.request import OPTIONS, Request, request_of
from staticmem.studies import Study, run
from staticmem.units import parse_bytes

P = ParamSpec("P")


class Analysis(Protocol[P]):
    """`analyze` as type checkers and editors see it: the options are keywords."""

    def __call__(
        self, model: object, inputs: Sequence[Any] | None = None, *args: P.args, **options: P.kwargs
    ) -> Report: ...


def _with_options(_: Callable[P, Request]) -> Callable[[Callable[..., Report]], Analysis[P]]:
    """Declares the options as keywords of a function, and gives them to its signature and its documentation."""

    def declare(function: Any) -> Any:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        types, keyword = inspect.get_annotations(Request.__init__), inspect.Parameter.KEYWORD_ONLY
        options = [
            inspect.Parameter(name, keyword, default=one.default, annotation=types[name])
            for name, one in OPTIONS.items()
        ]
        function.__signature__ = inspect.Signature([*own, *options], return_annotation="Report")
        listed = "\n".join(f"        {name}: {one.about}{one.choices_text}." for name, one in OPTIONS.items())
        function.__doc__ = function.__doc__.replace("        OPTIONS", listed)
        return function

    return declare


@_with_options(Request)
def analyze(model: object, inputs: Sequence[Any] | None = None, **options: Any) -> Report:
    """The memory of one step of a model.

    Args:
        model: the path of an ONNX file or of an archive of torch.export; or an `onnx.ModelProto`, an
            `ExportedProgram`, an `nn.Module` or an FX `GraphModule`. A module is exported in the mode that it is in
            (`train()` or `eval()`), under fake tensors: nothing is allocated.
        inputs: example inputs for a module: tensors, also on the meta device. Their batch is the default of `batch`.
        OPTIONS

    Raises:
        StaticmemError: the file or the scenario cannot be analysed; the message says what to do.
    """
    return run(model, request_of(options), inputs)


def max_batch(path: str | os.PathLike[str], gpu: str, **options: Any) -> LargestBatch:
    """The largest batch of a model on a card, confirmed by full analyses of it and of the next.

    Args:
        path: an ONNX file or an archive of torch.export.
        gpu: a card by name or size.
        options: as for `staticmem.analyze`: optimizer, resolution, dims, amp, checkpoint, ...

    Raises:
        StaticmemError: the batch of the model is fixed, or the model cannot be analysed.
    """
    from staticmem.studies.largest import largest_batch

    return largest_batch(Study.open(path, request_of(options)), gpu)


def levers(path: str | os.PathLike[str], *, budget: int | str | None = None, **options: Any) -> Levers:
    """What would make a step smaller, those levers first that save most.

    Args:
        path: an ONNX file or an archive of torch.export.
        budget: bytes that the step may need, or text such as "16GiB": looks for a set of checkpoints that reaches it.
        options: as for `staticmem.analyze`; with `gpu` it is device memory that is saved.

    Raises:
        StaticmemError: the step cannot be analysed as requested.
    """
    from staticmem.studies.levers import levers as levers_of

    limit = parse_bytes(budget) if isinstance(budget, str) else budget
    if budget is not None and not limit:
        raise UsageError(f"the budget {budget!r} is not a size", "It is bytes, or text.", "Example: '16GiB'", "SM195")
    request = request_of(options)
    return levers_of(Study.open(path, request), request.gpu, limit)
