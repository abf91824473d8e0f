"""Kinds of ops against an installed PyTorch: each is a fact that its ops show when they run."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from staticmem.ops import kinds_of, rules
from staticmem.ops.registry import SIGNS, Kind, one_name
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
        *("detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
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


def composite_names() -> set[str]:
    """ATen ops that call others, those for PyTorch's own use apart."""
    key = "CompositeImplicitAutograd"
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    composite = {
        name.split(".")[0].removeprefix("aten::")
        for name in names
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    return {name for name in composite if not re.match(r"_(?!_)|.*_backward", name)}


def signatures(name: str) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Types of the arguments and results of an op's overloads, without those of numbers alone and of `out`."""
    found = set()
    for overload in getattr(torch.ops.aten, name).overloads():
        schema = getattr(getattr(torch.ops.aten, name), overload)._schema
        types = tuple(str(argument.type) for argument in schema.arguments)
        if any("Tensor" in each for each in types) and not any(each.is_out for each in schema.arguments):
            found.add((types, tuple(str(result.type) for result in schema.returns)))
    return found


def called_alone(name: str) -> str:
    """The op that a call of an op is: all that it runs is that one with its own arguments, whatever they are, as
    PyTorch's profiler sees it, and those that are left out are the same. "" where there is none."""
    x, image = torch.full((2, 2), 0.5), torch.ones(1, 2, 2, 3)
    one = [(x,), (x.long(),), (x[0],), (image[0],), ([x, x],), ([x[0], x[0]],)]
    two = [(x, x), (x.bool(), x.bool()), (x[0], x[0]), (x, x[0].long()), (image, image[:, 0].long())]
    numbers = [(x, 1), (1, x), (x, [2]), (x.t(), [4]), (x, 0, 1), (x, [1], [0]), (x, 0.1, 0.9)]
    found: set[str] = set()
    for args in [*one, *two, *numbers]:
        with contextlib.suppress(RuntimeError, TypeError, IndexError, ValueError):
            called(name, *copy.deepcopy(args))
            with torch.autograd.profiler.profile(record_shapes=True) as profile:
                result = called(name, *copy.deepcopy(args))
            outer = next(each for each in profile.function_events if each.name == f"aten::{name}")
            if [given(inner) for inner in outer.cpu_children] != [given(outer)]:
                return ""
            found.add(outer.cpu_children[0].name.removeprefix("aten::"))
            if len(found) > 1 or repr(called(*found, *copy.deepcopy(args))) != repr(result):
                return ""
    return "".join(found)


def given(call: Any) -> list[tuple[Any, Any]]:
    """Sizes of the tensors of a call, and its numbers; a list of one number is that number."""
    numbers = [each[0] if isinstance(each, list) and len(each) == 1 else each for each in call.concrete_inputs]
    return list(zip(call.input_shapes, numbers, strict=True))


def test_other_names_of_ops_are_those_of_pytorch() -> None:
    """All that PyTorch has of ops with a rule are known, and no others."""
    ruled = {base.removeprefix("aten::") for base in bases() if base.startswith("aten::")}
    known = {name: one_name(f"aten::{name}").removeprefix("aten::") for name in ruled}
    by_signature = {name: signatures(name) for name in ruled if hasattr(torch.ops.aten, name)}
    found = {}
    for name in composite_names():
        of_name = signatures(name)
        if any(of_name and of_name <= by_signature[other] for other in by_signature if other != name):
            op = called_alone(name)
            if of_name <= by_signature.get(op, set()):
                found[name] = op
    assert found == {name: op for name, op in known.items() if op != name}
