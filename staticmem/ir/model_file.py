"""A model file before its dimensions are bound, and the binding of dimensions from what a user gives.

A dimension is an integer or a symbol. Symbols have the names of the file (`batch`, `s77`); one without a name is
called `input[axis]`, so that `--dim 'x[2]=224'` can give it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from staticmem.errors import DimensionError, UsageError, did_you_mean
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph
from staticmem.ir.record import record

MAX_DIM = 2**40  # beyond any tensor that a GPU holds; keeps arithmetic on hostile sizes bounded
MAX_RANK = 64  # dim_bitset_size, aten/src/ATen/WrapDimUtilsMulti.h of pytorch
CHANNELS_FIRST = 2, 3  # axes of height and width of an image: PyTorch's and ONNX's order
CHANNELS_LAST = 1, 2  # TensorFlow's

Size = TypeVar("Size")


@record(frozen=True, slots=True)
class InputSpec:
    """A user input. `shape` has an integer or a symbol's name for each axis; None: the rank is unknown. `sides` are the
    axes of height and width if it is an image; None: nothing in the file tells them."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...] | None
    sides: tuple[int, int] | None = CHANNELS_FIRST

    def __post_init__(self) -> None:
        if self.shape is not None and len(self.shape) > MAX_RANK:
            raise DimensionError(
                f"input '{self.name[:60]}' has {len(self.shape):,} dimensions",
                f"PyTorch's tensors have at most {MAX_RANK}.",
                "Check the export.",
                code="SM112",
            )

    @property
    def is_image(self) -> bool:
        """Whether `--resolution` is for this input."""
        return self.shape is not None and len(self.shape) == 4 and self.dtype.is_floating_point

    def resolution_of(self, shape: tuple[Size, ...]) -> tuple[Size, Size] | None:
        """Height and width of this input at a shape, its own or a bound one; None where it is no image, or nothing
        tells which axes they are."""
        if not self.is_image or self.sides is None:
            return None
        height, width = self.sides
        return shape[height], shape[width]


@record(frozen=True, slots=True)
class SymbolRange:
    """What the file says of a symbol: inclusive bounds, either may be absent."""

    low: int | None = None
    high: int | None = None


@record(frozen=True)
class Binding:
    """Concrete sizes: of every symbol that an input uses, and of every input. `rebound` names inputs whose fixed sizes
    were overridden (the frontend has to prove that the graph follows). `without` names passes that are left out: what
    they make of this graph does not evaluate (`passes.pipeline.passes_to_leave_out`)."""

    symbols: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    rebound: tuple[str, ...] = ()
    assumed: tuple[str, ...] = field(default=())
    without: frozenset[str] = frozenset()


@record(frozen=True)
class TracedSizes:
    """What `staticmem export` writes of the sizes that it left open, by symbol: those of the example inputs, the least
    that the code allows, and conditions under which the code takes the way that it took (`ir.expressions`)."""

    example: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # what symbols of the file are called here

    def refusal(self, symbols: Mapping[str, int]) -> str | None:
        """The first condition that does not hold at these sizes."""
        if not self.conditions:
            return None
        from staticmem.ir import expressions  # late: most files have none

        for text in self.conditions:
            condition = expressions.parse(text)
            if expressions.symbols_of(condition) <= set(symbols) and not expressions.evaluate(condition, symbols):
                return text
        return None


class KeptGraphs(Protocol):
    """Graphs by their bindings."""

    def of(self, binding: Binding, make: Callable[[], Graph]) -> Graph:
        """The graph at these sizes; `make` is asked where it is not kept."""
        ...


class ModelFile:
    """A model as its file describes it. `passes.pipeline.bind` gives the graph at concrete sizes.

    Attributes:
        symbols: open dimensions by name, with their bounds.
        graphs: the graphs that the model was bound to last, where they are kept.
        given: the name that it was opened by, with its options; "" where its path is enough.
        is_recorded_again: whether `at` may give another recording of the same code.
        own_loss: what reports say of a loss that the recording has, of labels that go in.
        unlabelled: what reports say where the model has such a loss and the recording lacks it.
        loss_function: the key of transformers' LOSS_MAPPING by which a forward with labels computes its loss.
        packing: how the weights of its checkpoint are packed; None of a file.
        asked_of_gpu: what the code asks of the GPU that it runs on.
        fixed_axes: sizes that the code has fixed, by their places: `x[0]` and the name that the size has.
        inputs_of_mode: inputs of training alone (True), and of inference alone (False).

    What has a default is said by recordings and by names of architectures alone.
    """

    path: str
    format: str
    producer: str
    inputs: tuple[InputSpec, ...]
    sizes: TracedSizes
    symbols: Mapping[str, SymbolRange]
    graphs: KeptGraphs | None
    given: str = ""
    is_recorded_again: bool = False
    own_loss: str = ""
    unlabelled: str = ""
    loss_function: str = ""
    packing: Any = None
    asked_of_gpu: Sequence[str] = ()
    fixed_axes: Mapping[str, str] = MappingProxyType({})
    inputs_of_mode: Mapping[str, bool] = MappingProxyType({})

    def at(self, asked: Mapping[str, int], training: bool, by_step: Mapping[str, str]) -> ModelFile:
        """The recording that holds for a step and at the sizes `asked`, where the model is recorded again."""
        raise TypeError(f"{type(self).__name__} is not recorded again")


def resolve(
    model: ModelFile,
    batch: int | None = None,
    resolution: tuple[int, int] | None = None,
    dims: Mapping[str, int] | None = None,
) -> Binding:
    """Sizes for every input dimension from `--batch` (axis 0), `--resolution` (height and width of 4-D floating-point
    inputs, by `InputSpec.sides`) and `--dim NAME=VALUE`.

    Raises:
        DimensionError: a dimension stays without a size, or nothing tells which axes `--resolution` means; the message
            names it and the flag that gives it.
        UsageError: `dims` names a symbol that the model does not have, or a size below 1.
    """
    dims = dict(dims or {})
    for what, size in [("--batch", batch), *((f"--dim {k}", v) for k, v in dims.items())]:
        if size is not None and not 1 <= size <= MAX_DIM:
            raise UsageError(f"{what} {size} is not a size", "A dimension is an integer of at least 1.", code="SM110")
    for size in resolution or ():
        if not 1 <= size <= MAX_DIM:
            raise UsageError(f"--resolution {size} is not a size", "Height and width are integers of at least 1.")
    names = set(model.symbols)
    for spec in model.inputs:
        names |= {f"{spec.name}[{axis}]" for axis in range(len(spec.shape or ()))}
    for name in dims:
        if name not in names:
            raise UsageError(
                f"unknown dimension '{name}'",
                f"The inputs are {describe_inputs(model)}.",
                did_you_mean(name, names),
                code="SM111",
            )
    symbols: dict[str, int] = {name: size for name, size in dims.items() if name in model.symbols}
    wanted: dict[tuple[str, int], int] = {}
    batched = _batched(model, dims) if batch is not None else set()
    for spec in model.inputs:
        if spec.shape is None:
            raise DimensionError(
                f"input '{spec.name}' has no rank",
                "Its number of dimensions is not in the file, so nothing can be sized.",
                "Export the model again with a shape for this input (sizes may be symbolic).",
                code="SM112",
            )
        if spec.name in batched:
            wanted[spec.name, 0] = batch or 0
        if resolution is not None and spec.is_image and not _has_sides_named(spec, dims):
            for axis, size in zip(_sides(spec, resolution), resolution, strict=True):
                wanted[spec.name, axis] = size
        for axis in range(len(spec.shape)):
            size = dims.get(f"{spec.name}[{axis}]")
            if size is not None:
                wanted[spec.name, axis] = size
    by_name = {spec.name: spec for spec in model.inputs}
    for (name, axis), size in wanted.items():
        dim = (by_name[name].shape or ())[axis]
        if isinstance(dim, str) and symbols.setdefault(dim, size) != size:
            raise DimensionError(
                f"dimension '{dim}' is asked to be both {symbols[dim]} and {size}",
                f"Input '{name}' uses it on axis {axis}, and another flag or input gave it a different size.",
                "Give one size for it.",
                code="SM113",
            )
    if resolution is not None and not any(spec.is_image for spec in model.inputs):
        raise UsageError(
            "--resolution does not apply",
            f"No input is a 4-D image: {describe_inputs(model)}.",
            "Use --dim NAME=VALUE for other shapes.",
            code="SM114",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    missing: dict[str, tuple[InputSpec, int]] = {}
    rebound: list[str] = []
    for spec in model.inputs:
        sizes: list[int] = []
        for axis, dim in enumerate(spec.shape or ()):
            if isinstance(dim, str):
                size = symbols.get(dim)
                if size is None and axis:  # the batch is the question; other sizes may be those of the example
                    size = model.sizes.example.get(dim)
                    if size is not None:
                        symbols[dim] = size
                if size is None:
                    missing.setdefault(dim, (spec, axis))
                sizes.append(size or 0)
            else:
                size = wanted.get((spec.name, axis), dim)
                if size != dim:
                    rebound.append(f"{spec.name}[{axis}]")
                sizes.append(size)
        shapes[spec.name] = tuple(sizes)
    if missing:
        raise _missing(missing)
    for name, size in symbols.items():
        bounds = model.symbols.get(name, SymbolRange())
        if (bounds.low is not None and size < bounds.low) or (bounds.high is not None and size > bounds.high):
            low = bounds.low if bounds.low is not None else 1
            high = bounds.high if bounds.high is not None else "any size"
            is_batch = any(spec.shape and spec.shape[0] == name for spec in model.inputs if spec.name in batched)
            raise DimensionError(
                f"--batch cannot be {size}" if is_batch else f"dimension '{name}' cannot be {size}",
                f"The export allows {low} to {high}.",
                f"Choose a size in that range, or export at this one: {export_command(model, shapes)}",
                code="SM115",
            )
    check_conditions(model, model.sizes, symbols, shapes)
    return Binding(symbols, shapes, tuple(rebound))


def export_command(model: ModelFile, shapes: Mapping[str, Sequence[int]]) -> str:
    """The command that exports the code of a model with inputs of these shapes."""
    inputs = []
    for spec in model.inputs:
        dtype = "" if spec.dtype.name == "float32" else f":{spec.dtype.name}"
        inputs.append(f"--input {'x'.join(map(str, shapes[spec.name]))}{dtype}")
    return f"staticmem export MODULE:FACTORY {' '.join(inputs)} -o FILE"


def check_conditions(
    model: ModelFile, sizes: TracedSizes, symbols: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raises DimensionError for sizes, and `shapes` of the inputs, at which the model's code would not take the way
    that was traced."""
    condition = sizes.refusal(symbols)
    if condition is None:
        return
    from staticmem.ir import expressions  # late: most files have none

    condition = expressions.readable(condition)
    for spec in model.inputs:
        for axis, dim in enumerate(spec.shape or ()):
            condition = re.sub(rf"\b{re.escape(str(dim))}\b", f"{spec.name}[{axis}]", condition)
    raise DimensionError(
        "the model's code takes another way at these sizes",
        f"It was traced where {condition[:300]} holds.",
        f"Choose sizes for which it holds, or export at these: {export_command(model, shapes)}",
        code="SM115",
    )


def _batched(model: ModelFile, dims: Mapping[str, int]) -> set[str]:
    """The inputs whose axis 0 is the batch: those where it is open, else those where the export fixed the same size.

    A fixed size beside an open one, and a 1 beside larger ones, are no batch.

    Raises:
        DimensionError: the export fixed several sizes, so that nothing tells which of them is the batch.
    """
    first = {s.name: s.shape[0] for s in model.inputs if s.shape and f"{s.name}[0]" not in dims}
    if any(isinstance(size, str) for size in first.values()):
        return {name for name, size in first.items() if isinstance(size, str)}
    named = {place for place, name in model.fixed_axes.items() if name == "batch"}
    if any(f"{name}[0]" in named for name in first):
        return {name for name in first if f"{name}[0]" in named}
    sizes = set(first.values())
    if len(sizes) > 1:
        sizes.discard(1)
    if len(sizes) > 1:
        raise DimensionError(
            "--batch does not say which size it means",
            f"The export fixed axis 0 of the inputs to several sizes: {describe_inputs(model)}.",
            f"Name what changes: --dim {next(iter(first))}[0]=N.",
            code="SM120",
        )
    return {name for name, size in first.items() if size in sizes}


def _has_sides_named(spec: InputSpec, dims: Mapping[str, int]) -> bool:
    """Whether `--dim` says the sizes of an image of which the file does not say where height and width are."""
    return spec.sides is None and any(f"{spec.name}[{axis}]" in dims for axis in (1, 2, 3))


def _sides(spec: InputSpec, resolution: tuple[int, int]) -> tuple[int, int]:
    """The axes of height and width of an image.

    Raises:
        DimensionError: the file does not tell them.
    """
    if spec.sides is not None:
        return spec.sides
    choices = []
    for axes in (CHANNELS_LAST, CHANNELS_FIRST):
        flags = [f"--dim '{spec.name}[{axis}]={size}'" for axis, size in zip(axes, resolution, strict=True)]
        choices.append(" ".join(flags))
    sizes = ", ".join(str(size) for size in spec.shape or ())
    raise DimensionError(
        f"--resolution does not say which axes of '{spec.name}' it means",
        f"Its shape [{sizes}] looks like channels last, but no node of the graph shows that it is.",
        f"Name them: {choices[0]} with channels last, {choices[1]} with channels first.",
        code="SM299",
    )


def _missing(missing: Mapping[str, tuple[InputSpec, int]]) -> DimensionError:
    flags = []
    for name, (spec, axis) in missing.items():
        sides = spec.resolution_of(spec.shape or ())
        if axis == 0:
            flags.append("--batch N")
        elif sides is not None and name in sides and missing.keys() >= {*sides}:
            flags.append("--resolution N")  # it gives both, height and width
        else:
            flags.append(f"--dim '{name}=N'" if "[" in name else f"--dim {name}=N")
    listed = ", ".join(f"'{name}' (axis {axis} of '{spec.name}')" for name, (spec, axis) in missing.items())
    return DimensionError(
        f"no size for {listed}",
        "The file leaves it open, and memory depends on it.",
        f"Give it: {' '.join(dict.fromkeys(flags))}",
        code="SM116",
    )


def describe_inputs(model: ModelFile) -> str:
    """The inputs with their shapes, for messages: `x: float32[batch, 3, 224, 224]`."""
    parts = []
    for spec in model.inputs:
        sizes = "?" if spec.shape is None else ", ".join(str(d) for d in spec.shape)
        parts.append(f"{spec.name}: {spec.dtype.name}[{sizes}]")
    return "; ".join(parts) if parts else "none"
