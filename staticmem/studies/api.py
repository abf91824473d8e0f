"""`staticmem.analyze`, `max_batch`, `max_dim`, `levers`, `fit`: their keywords are the options of `Request`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias

from staticmem.documents import Node
from staticmem.errors import UsageError
from staticmem.report.fit import Fit
from staticmem.report.model import LargestBatch, LargestSize, Report
from staticmem.report.sweep import Levers
from staticmem.scenario.kinds import Bytes, Whole, read_keyword, read_keywords, read_texts
from staticmem.scenario.request import OPTIONS, Request, request_of
from staticmem.studies import Study, run

if TYPE_CHECKING:
    import networkx as nx

    from staticmem.studies.bench import Bench

P = ParamSpec("P")
ModelPath: TypeAlias = str | os.PathLike[str]


# The functions as type checkers and editors see them: the options are keywords.
class Analyze(Protocol[P]):
    def __call__(
        self,
        model: object,
        inputs: Sequence[Any] | None = None,
        explain_peak: bool = False,
        *args: P.args,
        **options: P.kwargs,
    ) -> Report: ...


class MaxBatch(Protocol[P]):
    def __call__(self, path: ModelPath, gpu: str, *args: P.args, **options: P.kwargs) -> LargestBatch: ...


class MaxDim(Protocol[P]):
    def __call__(self, path: ModelPath, gpu: str, dim: str, *args: P.args, **options: P.kwargs) -> LargestSize: ...


class LeversOf(Protocol[P]):
    def __call__(
        self, path: ModelPath, budget: int | str | None = None, *args: P.args, **options: P.kwargs
    ) -> Levers: ...


class FitOf(Protocol[P]):
    def __call__(
        self,
        path: ModelPath,
        gpu: str,
        global_batch: int | None = None,
        allow: Sequence[str] | str = (),
        library: str | None = None,
        *args: P.args,
        **options: P.kwargs,
    ) -> Fit: ...


def _with_options(function: Any) -> Any:
    """Gives a function the options as keywords: in its signature and in its documentation."""
    signature, types = inspect.signature(function), inspect.get_annotations(Request.__init__)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken, keyword = signature.parameters, inspect.Parameter.KEYWORD_ONLY
    options = {name: one for name, one in OPTIONS.items() if name not in taken}
    keywords = [inspect.Parameter(n, keyword, default=one.default, annotation=types[n]) for n, one in options.items()]
    function.__signature__ = signature.replace(parameters=[*own, *keywords])
    listed = "\n".join(f"        {name}: {one.about}{one.choices_text}." for name, one in options.items())
    function.__doc__ = function.__doc__.replace("        OPTIONS", listed)
    return function


def _analyze_with(_: Callable[P, Request]) -> Callable[[Callable[..., Report]], Analyze[P]]:
    return _with_options


def _max_batch_with(_: Callable[P, Request]) -> Callable[[Callable[..., LargestBatch]], MaxBatch[P]]:
    return _with_options


def _max_dim_with(_: Callable[P, Request]) -> Callable[[Callable[..., LargestSize]], MaxDim[P]]:
    return _with_options


def _levers_with(_: Callable[P, Request]) -> Callable[[Callable[..., Levers]], LeversOf[P]]:
    return _with_options


def _fit_with(_: Callable[P, Request]) -> Callable[[Callable[..., Fit]], FitOf[P]]:
    return _with_options


@_analyze_with(Request)
def analyze(model: object, inputs: Sequence[Any] | None = None, explain_peak: bool = False, **options: Any) -> Report:
    """The memory of one step of a model.

    Args:
        model: the path of an ONNX file or of an archive of torch.export; or an `onnx.ModelProto`, an
            `ExportedProgram`, an `nn.Module` or an FX `GraphModule`. The code of a module is recorded, under fake
            tensors: nothing is allocated.
        inputs: example inputs for a module: tensors, also on the meta device. Their batch is the default of `batch`.
        explain_peak: `owners` and `modules` of the report say who holds what is alive at the peak.
        OPTIONS

    Raises:
        StaticmemError: the file or the scenario cannot be analysed; the message says what to do.
    """
    request = request_of(read_keywords("analyze", options))
    asked = _Asked(model, request, inputs)
    report = run(model, request, inputs)
    if explain_peak:
        from staticmem.studies.owners import with_owners

        report = with_owners(asked.study, report)
    return replace(report, verdict_on=asked.verdict_on, graph_at=asked.graph_at)


class _Asked:
    """What a report can be asked beyond its figures: verdicts on any card, and the graph of the step. The step is
    analysed again for the first: a report that held its graph would keep up to a GiB. A copy of a report in another
    process has none, as models cannot be sent."""

    def __init__(self, model: object, request: Request, inputs: Sequence[Any] | None) -> None:
        self._asked = model, request, inputs

    def graph_at(self, at: int | str) -> nx.DiGraph:
        from staticmem.studies.owners import WatchedStudy

        return WatchedStudy(self.study).graph(at)

    def verdict_on(self, gpu: str) -> str:
        gpu = read_keyword("fits", OPTIONS["gpu"], gpu)
        bench = self._bench
        return bench.verdict(bench.study.request, bench.card(gpu), own=True).fit.value

    @cached_property
    def study(self) -> Study:
        return Study.open(*self._asked)

    @cached_property
    def _bench(self) -> Bench:
        from staticmem.studies.bench import Bench

        return Bench(self.study)

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    """What a report in another process has in place of what it was asked."""

    verdict_on = graph_at = None


@_max_batch_with(Request)
def max_batch(path: ModelPath, gpu: str, **options: Any) -> LargestBatch:
    """The largest batch of a model on a card, confirmed by full analyses of it and of the next.

    Args:
        path: an ONNX file or an archive of torch.export.
        gpu: a card by name or size.
        OPTIONS

    Raises:
        StaticmemError: the batch of the model is fixed, or the model cannot be analysed.
    """
    from staticmem.studies.bench import Bench
    from staticmem.studies.largest import largest_batch

    request = request_of(read_keywords("max_batch", options))
    return largest_batch(Bench(Study.open(path, request)), read_keyword("max_batch", OPTIONS["gpu"], gpu))


@_max_dim_with(Request)
def max_dim(path: ModelPath, gpu: str, dim: str, **options: Any) -> LargestSize:
    """The largest size of an open dimension on a card, as the longest sequence, found as `max_batch` finds a batch.

    Args:
        path: an ONNX file or an archive of torch.export.
        gpu: a card by name or size.
        dim: the name of the dimension.
        OPTIONS

    Raises:
        StaticmemError: the model has no such dimension, or cannot be analysed.
    """
    from staticmem.studies.bench import Bench
    from staticmem.studies.largest import largest_size
    from staticmem.studies.sizing_search import GrownSize

    if not isinstance(dim, str):
        why = f"It is of type {type(dim).__name__}."
        raise UsageError("dim of max_dim() is not a name", why, "Example: dim='seq'", "SM195")
    request = request_of(read_keywords("max_dim", options))
    card = read_keyword("max_dim", OPTIONS["gpu"], gpu)
    return largest_size(Bench(Study.open(path, request)), card, GrownSize(dim))


@_levers_with(Request)
def levers(path: ModelPath, budget: int | str | None = None, **options: Any) -> Levers:
    """What would make a step smaller, those levers first that save most; with `gpu` it is device memory that is saved.

    Args:
        path: an ONNX file or an archive of torch.export.
        budget: bytes that the step may need, or text such as "16GiB": looks for a set of checkpoints that reaches it.
        OPTIONS

    Raises:
        StaticmemError: the step cannot be analysed as requested.
    """
    from staticmem.studies.levers import levers as levers_of

    limit = None if budget is None else Bytes().read(Node(budget, "levers", path="budget"))
    request = request_of(read_keywords("levers", options))
    return levers_of(Study.open(path, request), request.gpu, limit)


@_fit_with(Request)
def fit(
    path: ModelPath,
    gpu: str,
    global_batch: int | None = None,
    allow: Sequence[str] | str = (),
    library: str | None = None,
    **options: Any,
) -> Fit:
    """The way to run a training step that gives up least, of those that are safe on a card, with settings that run it.

    Args:
        path: an ONNX file or an archive of torch.export.
        gpu: a card by name or size.
        global_batch: samples of a step of the optimizer over all devices. Without it and `batch` the largest is found.
        allow: changes of training that may be made: "precision", "optimizer", "adapters".
        library: settings of "pytorch", "transformers", "accelerate", "deepspeed", "llama-factory" or "axolotl" alone;
            without it all that apply.
        OPTIONS

    Raises:
        StaticmemError: nothing is trained, the step cannot be analysed, or the library has no settings for it.
    """
    from staticmem.report.settings import LIBRARIES
    from staticmem.scenario.options import checked_choice
    from staticmem.studies.fit import fit as fit_of
    from staticmem.studies.fit_settings import Options

    asked = request_of(read_keywords("fit", {**options, "gpu": gpu}))
    chosen = checked_choice("library", library, tuple(LIBRARIES)) if library is not None else None
    if global_batch is not None:
        global_batch = Whole().read(Node(global_batch, "fit", path="global_batch"))
    allowed = read_texts("fit", "allow", allow)
    return fit_of(Study.open(path, asked), Options(gpu, global_batch, allowed, chosen))
