"""Kinds of ops against an installed PyTorch: each is a fact that its ops show when they run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from staticmem.ops import kinds_of, rules
from staticmem.ops.registry import SIGNS, Kind
from staticmem.ops.tags import tagged

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

VIEW_KINDS: tuple[Kind, ...] = ("expanded", "part", "permuted", "reshaped", "split")


def bases() -> list[str]:
    return sorted({target.split(".", 1)[0] for target in rules()})


def names_of(kind: Kind, in_place: bool = False) -> Iterator[str]:
    """Names of ATen ops of a kind that have a rule, those in place too where they are asked for."""
    for base in bases():
        if kind in kinds_of(base) and base.startswith("aten::") and (in_place or not base.endswith("_")):
            yield base.removeprefix("aten::")


def called(name: str, *args: Any) -> Any:
    return getattr(torch.ops.aten, name)(*args)


def test_activations_are_functions_and_modules_with_an_argument_inplace() -> None:
    functional, modules = torch.nn.functional, {name.lower(): cls for name, cls in vars(torch.nn).items()}
    with_argument = {
        name
        for name, function in vars(functional).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and "inplace" in inspect.signature(function).parameters
    }
    known = {name for name in with_argument if "dropout" not in name} - {"rrelu"}  # random, and without a rule
    assert set(names_of("activation")) == known
    for name in known:
        assert "inplace" in inspect.signature(modules[name.replace("_", "")]).parameters
        assert "has_in_place" in kinds_of(f"aten::{name}")


def test_views_are_those_of_the_schemas() -> None:
    views = {base for base in bases() if "view" in kinds_of(base)}
    # composites of views, in either form; `t_` and its like change sizes of the tensor itself
    assert {base.removeprefix("aten::") for base in views - tagged("view")} == {
        "_unsafe_view",
        "broadcast_tensors",
        *("detach_", "squeeze_", "t_", "transpose_", "unsqueeze_"),
        *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
    }
    # no other shape: they return what they are given, or a copy of it; `conj` of real numbers
    others = {base.removeprefix("aten::") for base in tagged("view").intersection(bases()) - views}
    assert others == {"conj", "contiguous", "positive", "resolve_neg", "to"}


def test_a_view_is_of_one_kind() -> None:
    """Those of none have other numbers in other places: `as_strided`, and parts of complex numbers."""
    of_none = set()
    for base in bases():
        kinds = kinds_of(base).intersection(VIEW_KINDS)
        assert len(kinds) <= 1
        assert not kinds or "view" in kinds_of(base)
        if "view" in kinds_of(base) and not kinds:
            of_none.add(base.removeprefix("aten::"))
    assert of_none == {"as_strided", "imag", "real", "view_as_complex", "view_as_real"}


def test_steps_have_a_derivative_of_zero() -> None:
    for name in names_of("step"):
        x = torch.tensor([-1.4, 0.3, 2.6], requires_grad=True)
        if "comparison" in kinds_of(f"aten::{name}"):
            assert not called(name, x, 0.5).requires_grad
        else:
            called(name, x).sum().backward()
            assert x.grad.tolist() == [0.0, 0.0, 0.0]


def test_operands_of_commutative_ops_may_be_exchanged() -> None:
    a, b = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])
    for name in names_of("commutative"):
        assert torch.equal(called(name, a, b), called(name, b, a))


def test_running_sums_of_small_integers_are_of_64_bits() -> None:
    numbers = torch.ones(2, dtype=torch.int8)
    for name in names_of("running"):
        result = called(name, numbers, 0) if name.startswith("cum") else called(name, numbers)
        assert result.dtype == torch.int64


def test_copies_have_the_same_numbers_in_order() -> None:
    x = torch.arange(6.0).reshape(2, 3).t()
    for name in names_of("copy"):
        result = called(name, x)
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()


def test_a_form_in_place_writes_to_its_argument() -> None:
    for base in bases():
        if "has_in_place" in kinds_of(base) and base.startswith("aten::"):
            schemas = torch._C._jit_get_schemas_for_operator(f"{base}_")
            assert all(schema.arguments[0].alias_info.is_write for schema in schemas), base


@pytest.mark.parametrize("sign", SIGNS)
def test_operators_of_python_run_their_op(sign: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    ran: list[str] = []

    class Recorded(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func._schema.name))
            return func(*args, **(kwargs or {}))

    values = {"x": torch.ones(2, 2), "y": torch.full((2, 2), 2.0)}
    with Recorded():
        exec(f"x {sign} y", values)
        if sign != "@":  # a product has no form in place
            exec(f"x {sign}= y", values)
    expected = ["aten::mm"] if sign == "@" else [f"aten::{SIGNS[sign]}", f"aten::{SIGNS[sign]}_"]
    assert ran == expected
