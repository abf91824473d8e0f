"""From --batch, --resolution and --dim to the sizes of all inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from staticmem.errors import DimensionError, StaticmemError, UsageError
from staticmem.ir import dtypes
from staticmem.ir.model_file import (
    MAX_DIM,
    Binding,
    InputSpec,
    ModelFile,
    SymbolRange,
    TracedSizes,
    describe_inputs,
    resolve,
)


@dataclass
class Model(ModelFile):
    inputs: tuple[InputSpec, ...]
    symbols: Mapping[str, SymbolRange] = field(default_factory=dict)
    path: str = "m"
    format: str = "pt2"
    producer: str = "test"
    graphs: None = None
    sizes: TracedSizes = field(default_factory=TracedSizes)


def model(*shapes: tuple[int | str, ...] | None, dtype: dtypes.DType = dtypes.float32, **ranges: SymbolRange) -> Model:
    inputs = tuple(InputSpec("xyz"[k], dtype, shape) for k, shape in enumerate(shapes))
    symbols = {d: SymbolRange() for shape in shapes for d in shape or () if isinstance(d, str)}
    return Model(inputs, {**symbols, **ranges})


def shapes(binding: Binding) -> list[tuple[int, ...]]:
    return list(binding.shapes.values())


def code(m: Model, **sizes: Any) -> str:
    with pytest.raises(StaticmemError) as caught:
        resolve(m, **sizes)
    assert caught.value.what
    assert caught.value.why
    return caught.value.code


IMAGE = model(("b", 3, "h", "w"))


def test_batch_resolution_and_dims() -> None:
    binding = resolve(IMAGE, batch=4, resolution=(32, 64))
    assert shapes(binding) == [(4, 3, 32, 64)]
    assert binding.symbols == {"b": 4, "h": 32, "w": 64}
    assert binding.rebound == ()
    assert shapes(resolve(IMAGE, dims={"b": 2, "x[2]": 5, "w": 6})) == [(2, 3, 5, 6)]


def test_one_symbol_of_two_inputs_has_one_size() -> None:
    m = model(("b", "t"), ("b", "t", 8))
    assert shapes(resolve(m, batch=3, dims={"t": 7})) == [(3, 7), (3, 7, 8)]
    assert code(m, batch=3, dims={"b": 4, "t": 7}) == "SM113"
    assert code(m, batch=3, dims={"x[1]": 5, "y[1]": 6}) == "SM113"


def test_fixed_sizes_that_change_are_listed() -> None:
    binding = resolve(model((2, 3, 8, 8)), batch=4, resolution=(8, 9))
    assert shapes(binding) == [(4, 3, 8, 9)]
    assert binding.rebound == ("x[0]", "x[3]")
    assert resolve(model((2, 3)), batch=2).rebound == ()


def test_the_batch_is_what_inputs_agree_on() -> None:
    """A fixed size beside an open one, and a 1 beside others, are no batch; several sizes are not guessed at."""
    assert shapes(resolve(model((4, 8), (4, 3), (1, 8)), batch=2)) == [(2, 8), (2, 3), (1, 8)]
    assert shapes(resolve(model(("b", 8), (5, 3)), batch=2)) == [(2, 8), (5, 3)]
    assert shapes(resolve(model((1, 8), (1,)), batch=2)) == [(2, 8), (2,)]
    graph = model((5000, 8), (2, 40000))
    assert code(graph, batch=2) == "SM120"
    assert shapes(resolve(graph, batch=7, dims={"y[0]": 2})) == [(7, 8), (2, 40000)]
    assert shapes(resolve(graph, dims={"x[0]": 7})) == [(7, 8), (2, 40000)]


def test_what_is_missing_is_named_with_its_flag() -> None:
    with pytest.raises(DimensionError, match="no size for") as caught:
        resolve(IMAGE)
    assert caught.value.hint == "Give it: --batch N --resolution N"
    with pytest.raises(DimensionError, match="no size for") as caught:
        resolve(model(("b", "t"), (1, "y[1]")), batch=1)
    assert caught.value.hint == "Give it: --dim t=N --dim 'y[1]=N'"
    for shape, hint in ((("b", 3, 48, "w"), "--batch N --dim w=N"), ((1, 3, "s", "s"), "--resolution N")):
        with pytest.raises(DimensionError, match="no size for") as caught:
            resolve(model(shape))  # --resolution would set a fixed height too
        assert caught.value.hint == f"Give it: {hint}"


@pytest.mark.parametrize(("size", "low", "high"), [(1, 2, None), (9, None, 8), (9, 2, 8)])
def test_bounds_of_the_export(size: int, low: int | None, high: int | None) -> None:
    m = model(("b",), b=SymbolRange(low, high))
    assert code(m, batch=size) == "SM115"
    with pytest.raises(DimensionError, match=f"--batch cannot be {size}"):
        resolve(m, batch=size)
    assert shapes(resolve(m, batch=4)) == [(4,)]


@pytest.mark.parametrize("sizes", [
    {"batch": 0}, {"batch": -1}, {"batch": MAX_DIM + 1}, {"resolution": (0, 4)}, {"dims": {"b": 0}},
    {"dims": {"nobody": 3}}, {"dims": {"x[4]": 3}}, {"dims": {"x[-1]": 3}},
])  # fmt: skip
def test_sizes_that_are_none(sizes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        resolve(IMAGE, **sizes)


def test_resolution_needs_an_image() -> None:
    assert code(model(("b", 3)), batch=1, resolution=(2, 2)) == "SM114"
    assert code(model((1, 2, 3, 4), dtype=dtypes.int64), resolution=(2, 2)) == "SM114"


def test_an_input_without_rank() -> None:
    assert code(model(None), batch=1) == "SM112"


def test_scalars_and_no_inputs() -> None:
    assert shapes(resolve(model(()), batch=5)) == [()]
    assert shapes(resolve(model(), batch=5)) == []
    assert describe_inputs(model()) == "none"
    assert describe_inputs(model(("b", 3), None)) == "x: float32[b, 3]; y: float32[?]"
