"""Traces a module by `torch.export` with every size open that its code leaves open.

Nothing is assumed of a size, also not that it is 2 or more (`backed_size_oblivious`, as in PyTorch's ONNX exporter).
Where Python asks for one (`if x.shape[0] == 1`), the answer becomes a condition of the trace: sizes at which the code
takes another way are refused, not guessed.

What packages ask of tensors, answered while a model is recorded as tensors of a GPU with contents would.

Tensors of a recording have no contents, and code that sees so may do what it does for compilers. transformers looks
whether position ids count up without a break, as they do where each row is one sequence; for tensors without data it
makes a mask of packed sequences instead, with which attention runs other kernels. Recorded is the step with real
tensors: one sequence a row. It also leaves regions of `torch.autocast` out on the meta device, which stands for the
GPU here.

Source: transformers/masking_utils.py (`find_packed_sequence_indices`, `_preprocess_mask_arguments`),
transformers/utils/generic.py (`maybe_autocast`), transformers/pytorch_utils.py (`compile_compatible_method_lru_cache`,
whose tensors are made in each call here, as where code is compiled).
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from staticmem.errors import ModelFileError
from staticmem.ir.model_file import TracedSizes
from staticmem.recording.sizes import Sizes

MASKS = "transformers.masking_utils"
FIND = "find_packed_sequence_indices"
# asked for the expansion of position ids alone, a view that nothing but the search above reads
OF_VIEWS = frozenset(((f"{MASKS.replace('.', '/')}.py", "_preprocess_mask_arguments"),))


CACHES, COMPILING = "transformers.pytorch_utils", "is_torchdynamo_compiling"
_OF_ALL = "_staticmem_of_all"  # the attribute of a tensor of truth values that says what all of them are
GENERIC, REGION = "transformers.utils.generic", "maybe_autocast"


@contextmanager
def known_answers() -> Iterator[None]:
    """Within it code gets the answers of real tensors."""
    find: Any = getattr(sys.modules.get(MASKS), FIND, None)
    region: Any = getattr(sys.modules.get(GENERIC), REGION, None)

    def one_sequence_a_row(position_ids: Any) -> None:
        find(position_ids)  # its ops run

    def on_gpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return region("cuda" if device_type == "meta" else device_type, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(_finite_numbers())
        if hasattr(sys.modules.get(CACHES), COMPILING):  # sizes that are open are no keys of a cache
            stack.enter_context(mock.patch.object(sys.modules[CACHES], COMPILING, return_value=True))
        if find is not None:
            stack.enter_context(mock.patch.object(sys.modules[MASKS], FIND, one_sequence_a_row))
        if region is not None:
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] == "transformers" and vars(module).get(REGION) is region:
                    stack.enter_context(mock.patch.object(module, REGION, on_gpu))
        yield


@contextmanager
def _finite_numbers() -> Iterator[None]:
    """Within it code that asks whether numbers are finite hears that they are, as in a run that goes well."""
    import torch

    is_true = torch.Tensor.__bool__

    def told(ask: Any, answer: bool | None) -> Any:
        """The function, whose result says for all its elements what is told of them, by default what it is of."""

        def asked(x: Any, *args: Any, **kwargs: Any) -> Any:
            result = ask(x, *args, **kwargs)
            of_all = getattr(x, _OF_ALL, None) if answer is None else answer
            if of_all is not None:
                setattr(result, _OF_ALL, of_all)
            return result

        return asked

    def truth(x: Any) -> bool:
        of_all = getattr(x, _OF_ALL, None)
        return is_true(x) if of_all is None else bool(of_all)

    with ExitStack() as stack:
        for name, answer in (("isfinite", True), ("isinf", False), ("isnan", False), ("all", None), ("any", None)):
            for owner in (torch, torch.Tensor):
                stack.enter_context(mock.patch.object(owner, name, told(getattr(owner, name), answer)))
        stack.enter_context(mock.patch.object(torch.Tensor, "__bool__", truth))
        yield


Axes = dict[int, str]  # of one tensor: the name of the size of each open axis

_OPS = re.compile(
    r"torch/(_ops\.py|_subclasses/|_meta_registrations\.py|_refs/|_prims|_decomp/)".replace("/", r"[/\\]")
)


@dataclass(frozen=True)
class Trace:
    """A traced program, and what its trace says of sizes."""

    program: Any  # ExportedProgram
    sizes: TracedSizes  # by the program's symbols
    axes: tuple[Axes, ...] = ()  # of each leaf of the inputs: the axes that stayed open
    names: Mapping[str, str] = field(default_factory=dict)  # of the program's symbols, as in `axes`
    open: tuple[str, ...] = ()  # names of the sizes that stayed open, with the least that the code allows
    fixed: tuple[str, ...] = ()  # `x[1] = 3`: axes that the code, or PyTorch, fixed

    @property
    def named_sizes(self) -> TracedSizes:
        """The sizes by the names of `axes`."""
        example, least = (
            {self.names.get(s, s): n for s, n in sizes.items()} for sizes in (self.sizes.example, self.sizes.least)
        )
        conditions = [re.sub(r"\b\w+\b", lambda m: self.names.get(m[0], m[0]), c) for c in self.sizes.conditions]
        return TracedSizes(example, least, tuple(conditions), self.names)


def open_axes(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Axes]:
    """The axes to leave open, for each leaf of `tree_leaves((args, kwargs))` in order; {} for what is no tensor.

    Axes of one name have one size. `batch` is axis 0 where the tensors agree on it (those of size 1 aside, which
    broadcast); `height` and `width` are the last axes of 4-D floating-point tensors; any other axis shares its name
    with those of the same index and size. A size of 1 is open as a batch, and where all tensors that have the axis have
    1 there.
    """
    leaves = leaves_of(args, kwargs)
    shapes = [(tuple(x.shape), x.is_floating_point()) if _is_tensor(x) else ((), False) for x in leaves]
    batches = {shape[0] for shape, _ in shapes if shape}
    batches = batches - {1} or batches
    names: dict[tuple[str, int], str] = {}
    opened: list[Axes] = []
    for shape, floating in shapes:
        axes: Axes = {}
        for axis, size in enumerate(shape):
            image = len(shape) == 4 and floating and axis > 1
            role = ("height", "width")[axis - 2] if image else f"axis{axis}"
            if axis == 0:
                role = "batch"
            others = [other[axis] for other, _ in shapes if len(other) > axis]
            if axis == 0:
                is_open = batches == {size}
            else:
                is_open = size > 1 or (size == 1 and len(others) > 1 and set(others) == {1})
            if is_open:
                count = sum(r == role for r, _ in names)
                axes[axis] = names.setdefault((role, size), f"{role}_{count + 1}" if count else role)
        opened.append(axes)
    return opened


def trace(
    module: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    as_given: bool,
    axes: Sequence[Axes] | None = None,
    stack_traces: bool = True,
) -> Trace:
    """`torch.export` of a module in the mode that it is in; the sizes of `axes`, by default those of `open_axes`, are
    open if its code allows it.

    A batch of 1 is traced as 2. `as_given`: the sizes of the inputs have to be among those that the trace allows.
    `stack_traces`: nodes have the source lines of the code, which take a tenth of the time.

    Raises:
        ModelFileError: it cannot be exported; the message is PyTorch's.
    """
    keywords = dict(kwargs or {})
    last: Exception | None = None
    for opened in attempts(axes if axes is not None else open_axes(args, keywords)):
        try:
            with nullcontext() if stack_traces else _without_stack_traces():
                result = _traced(module, args, keywords, opened)
        except Exception as error:
            last = error
            continue
        if not as_given or not any(opened) or _admits_example(result):
            return result
    assert last is not None
    raise failed(module, last) from last


def failed(module: object, error: Exception, exporter: str = "torch.export") -> ModelFileError:
    """The error for what an exporter cannot export, with PyTorch's reason."""
    name = module if isinstance(module, str) else type(module).__name__
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    hint = (
        "Call the model once with inputs of these sizes: if that fails too, the inputs are not the model's. If it "
        "runs, staticmem.analyze(module, inputs) and `staticmem export` record the code, which needs no graph."
    )
    if exporter == "torch.onnx.export(dynamo=False)":
        hint = f"Change the model so that {exporter} works, or export it to a .pt2."
    what, why = f"{exporter} cannot export {name}", f"{type(error).__name__}: {reason[:300]}"
    return ModelFileError(what, why, hint, code="SM171")


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch's warnings and logs of an export say nothing that its exception does not say."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def doubled(args: Any, kwargs: Any, axes: Sequence[Axes]) -> tuple[Any, Any]:
    """The inputs with a batch of 2 where it is 1."""
    import torch
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for at, (leaf, names) in enumerate(zip(leaves, axes, strict=True)):
        if names.get(0) == "batch" and leaf.shape[0] == 1:
            leaves[at] = torch.cat((leaf.detach(), leaf.detach())).requires_grad_(leaf.requires_grad)
    both: tuple[Any, Any] = pytree.tree_unflatten(leaves, spec)
    return both


def attempts(axes: Sequence[Axes]) -> list[list[Axes]]:
    """Open axes to try, one after the other: all; without those of an image; the batch alone; none."""
    images = [{axis: n for axis, n in names.items() if not n.startswith(("height", "width"))} for names in axes]
    batch = [{axis: n for axis, n in names.items() if n == "batch"} for names in axes]
    closed: list[Axes] = [{} for _ in axes]
    ladder = [list(axes), images, batch, closed]
    return [rung for at, rung in enumerate(ladder) if rung not in ladder[:at]]


def _is_tensor(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor)


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """All that is in the inputs, in the order of `open_axes`."""
    from torch.utils import _pytree as pytree

    leaves: list[Any] = pytree.tree_leaves((tuple(args), dict(kwargs or {})))
    return leaves


def _traced(module: Any, given: tuple[Any, ...], keywords: dict[str, Any], axes: list[Axes]) -> Trace:
    import torch
    from torch.utils import _pytree as pytree

    args, kwargs = doubled(given, keywords, axes)
    dynamic = None
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if any(axes):
            auto = torch.export.Dim.AUTO
            leaves, spec = pytree.tree_flatten((args, kwargs))
            marked = [dict.fromkeys(n, auto) if _is_tensor(x) else None for x, n in zip(leaves, axes, strict=True)]
            positional, named = pytree.tree_unflatten(marked, spec)
            dynamic = {**_name_shapes(module, positional), **named}
            stack.enter_context(oblivious())
            stack.enter_context(_one_size_a_name(module, kwargs, axes))
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
    return _described(program, (given, keywords), (args, kwargs), axes)


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Within it nodes are traced without source lines, where PyTorch has the option."""
    from torch.fx import config

    with ExitStack() as stack:
        if hasattr(config, "do_not_emit_stack_traces"):
            stack.enter_context(mock.patch.object(config, "do_not_emit_stack_traces", True))
        yield


def _name_shapes(module: Any, shapes: Sequence[Any]) -> dict[str, Any]:
    """Positional dynamic shapes under the names of the forward's parameters, as torch.export wants them with kwargs."""
    named: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(module.forward).parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            named[parameter.name] = tuple(shapes[index:])
            return named
        if index >= len(shapes):
            break
        named[parameter.name] = shapes[index]
    return named


@contextmanager
def _one_size_a_name(module: Any, kwargs: Mapping[str, Any], axes: Sequence[Axes]) -> Iterator[None]:
    """While it is traced, axes of one name are compared, from which PyTorch concludes that they have one symbol."""

    def compare(_: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        sizes: dict[str, Any] = {}
        for leaf, names in zip(leaves_of(args, {name: keywords[name] for name in kwargs}), axes, strict=True):
            for axis, name in names.items():
                bool(sizes.setdefault(name, leaf.shape[axis]) == leaf.shape[axis])

    hook = module.register_forward_pre_hook(compare, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _described(program: Any, given: Any, traced: Any, axes: Sequence[Axes]) -> Trace:
    """What the placeholders and the guards of a program say of sizes."""
    examples: dict[str, int] = {}
    hints: dict[Any, int] = {}
    titles: dict[Any, str] = {}
    fixed: list[str] = []
    stayed: list[Axes] = []
    shape_env = None
    count = len(program.graph_signature.user_inputs)
    places = [node for node in program.graph.nodes if node.op == "placeholder"][-count:]
    for node, own, leaf, names in zip(places, leaves_of(*given), leaves_of(*traced), axes, strict=True):
        stayed.append({})
        for axis, name in names.items():
            size = node.meta["val"].shape[axis]
            symbol = None if isinstance(size, int) else size.node.expr
            if symbol is None or symbol.is_Integer:
                fixed.append(f"{node.name}[{axis}] = {size}")
            elif symbol.is_Symbol:
                shape_env = size.node.shape_env
                examples.setdefault(str(symbol), int(own.shape[axis]))
                hints.setdefault(symbol, int(leaf.shape[axis]))
                stayed[-1][axis] = titles.setdefault(symbol, name)
            else:  # twice another size, say: the reader calls it by its axis
                examples[f"{node.name}[{axis}]"] = int(own.shape[axis])
    asked = conditions(shape_env, set(hints), Sizes({}).text) if shape_env is not None else {}
    least = {symbol: int(bounds.lower) for symbol, bounds in program.range_constraints.items() if symbol in hints}
    if hasattr(_config(), "backed_size_oblivious"):
        least = {symbol: 1 if low <= 2 else low for symbol, low in least.items()}
    opened = []
    for symbol, title in titles.items():
        low = least.get(symbol, 1)
        refused = any(c.subs({**hints, symbol: low}) == False for c in asked)  # noqa: E712 (it is sympy's false)
        if refused:
            opened.append(f"{title} (not {low})")
        else:
            opened.append(f"{title} (from {low})" if low > 1 else title)
    sizes = TracedSizes(examples, {str(s): n for s, n in least.items()}, tuple(asked.values()))
    titled = {str(symbol): title for symbol, title in titles.items()}
    return Trace(program, sizes, tuple(stayed), titled, tuple(opened), tuple(fixed))


def conditions(
    shape_env: Any, inputs: set[Any], text: Callable[[Any], str], guards: Sequence[Any] | None = None
) -> dict[Any, str]:
    """What the code asked of the sizes of the inputs, with the answer that it got; all `guards`, if none are given.

    Questions of ops are left out: they concern layouts and broadcasting, which the analysis decides anew for its sizes.
    """
    answers: dict[Any, str] = {}
    for guard in shape_env.guards if guards is None else guards:
        place = getattr(getattr(guard, "sloc", None), "framework_loc", None)
        file = str(getattr(place, "filename", "")).replace("\\", "/")
        name = getattr(place, "name", "")
        if _OPS.search(file) or any(file.endswith(of) and name == function for of, function in OF_VIEWS):
            continue
        condition = shape_env.replace(guard.expr)
        if condition.free_symbols and condition.free_symbols <= inputs and not _holds_for_any_size(condition):
            answers[condition] = text(condition)
    return answers


def _holds_for_any_size(condition: Any) -> bool:
    """Whether it holds for all sizes, which are 1 or more."""
    import sympy

    sizes = {symbol: sympy.Symbol(symbol.name, integer=True, positive=True) for symbol in condition.free_symbols}
    if condition.xreplace(sizes) == sympy.true:
        return True
    if not isinstance(condition, sympy.Le):
        return False
    return type(condition.lhs).__name__ == "Min" and condition.rhs in condition.lhs.args


@contextmanager
def oblivious() -> Iterator[None]:
    """A context in which PyTorch assumes of no size that it is 2 or more, runs `std_mean` on open sizes, and multiplies
    groups of rows in the types that its kernel for CUDA takes."""
    import torch
    from torch import _meta_registrations as meta
    from torch._decomp import decomposition_table as decompositions

    def std_mean(x: Any, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Any:
        # PyTorch calls its own decomposition with too many arguments (torch/_refs/__init__.py, `std_mean`)
        return torch.ops.aten.std_mean.correction(x, dim, correction=int(unbiased), keepdim=keepdim)

    from staticmem.recording.gpu import RESULTS, known_results
    from staticmem.recording.repeated_calls import known_sizes

    scaled = getattr(meta, "_meta_grouped_mm_common", None)

    def grouped_mm(a: Any, b: Any, scale_a: Any = None, *args: Any, **kwargs: Any) -> Any:
        if scale_a is not None:
            assert scaled is not None
            return scaled(a, b, scale_a, *args, **kwargs)
        return RESULTS["aten::_grouped_mm"](a, b, kwargs.get("offs"), None, kwargs.get("out_dtype"))

    config = _config()
    with ExitStack() as stack:
        stack.enter_context(known_sizes())
        results = {**known_results(), torch.ops.aten.std_mean.dim: std_mean}
        stack.enter_context(mock.patch.dict(decompositions, results))
        if scaled is not None:
            stack.enter_context(mock.patch.object(meta, "_meta_grouped_mm_common", grouped_mm))
        if hasattr(config, "backed_size_oblivious"):  # PyTorch 2.7 has the option
            stack.enter_context(config.patch(backed_size_oblivious=True))
        yield


def _config() -> Any:
    from torch.fx.experimental import _config

    return _config


def _admits_example(trace: Trace) -> bool:
    """Whether the sizes of the example inputs are among those that the trace allows."""
    return trace.sizes.refusal(trace.sizes.example) is None
