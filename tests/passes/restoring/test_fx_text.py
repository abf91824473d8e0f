"""The parser of FX node texts: the forms that torch.fx prints, and nothing else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmem.ir import dtypes
from staticmem.ir.graph import Ref
from staticmem.passes.restoring import fx_text
from staticmem.passes.restoring.fx_text import FxTextError


def node(target: str, args: str, kwargs: str = "{}") -> str:
    return f"%n : [num_users=1] = call_function[target={target}](args = {args}, kwargs = {kwargs})"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("(%x,)", (Ref("x"),)),
        ("()", ()),
        ("(%x, None, True, -1, 1e-05, inf)", (Ref("x"), None, True, -1, 1e-05, float("inf"))),
        ("(%x, [%s0, 2, -1])", (Ref("x"), (Ref("s0"), 2, -1))),
        ("([%a, %b], 1)", ((Ref("a"), Ref("b")), 1)),
        ("(%x, [[1, 2], []])", (Ref("x"), ((1, 2), ()))),
        ("(%x, torch.float16)", (Ref("x"), dtypes.float16)),
        ("(%x, constant)", (Ref("x"), "constant")),
    ],
)
def test_arguments(args: str, expected: tuple[object, ...]) -> None:
    assert fx_text.parse(node("torch.ops.aten.foo.default", args)).args == expected


def test_kwargs_and_targets() -> None:
    text = node("torch.ops.aten.to.dtype", "(%x,)", "{dtype: torch.float32, device: cpu, scale: 0.125}")
    parsed = fx_text.parse(text)
    assert parsed.target == "aten::to.dtype"
    assert parsed.kwargs == {"dtype": dtypes.float32, "device": "cpu", "scale": 0.125}
    assert fx_text.parse(node("operator.getitem", "(%split, 1)")).target == "operator::getitem"
    assert fx_text.parse(node("_operator.mul", "(%a, 2)")).target == "operator::mul"
    assert fx_text.parse(node("torch.ops.prims.iota.default", "()")).target == "prims::iota"


def test_the_equation_of_einsum_has_commas() -> None:
    parsed = fx_text.parse(node("torch.ops.aten.einsum.default", "(bij,bjk->bik, [%q, %k])"))
    assert parsed.args == ("bij,bjk->bik", (Ref("q"), Ref("k")))


@pytest.mark.parametrize(
    "text",
    [
        "", "%x", "placeholder", "%n = call_function[target=a]", node("aten.a", "(%x"), node("aten.a", "(%x))"),
        node("aten.a", "(" * 40), node("aten.a", "(%x)" + " " * 70_000), node("aten.a", "[1", "{a 1}"),
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(FxTextError):
        fx_text.parse(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="%()[]{},:=abc019. -", max_size=80))
def test_arbitrary_arguments_parse_or_are_refused(noise: str) -> None:
    with contextlib.suppress(FxTextError):
        fx_text.parse(node("torch.ops.aten.foo.default", f"({noise})"))
