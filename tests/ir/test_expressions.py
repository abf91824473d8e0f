"""Size expressions against Python's own arithmetic, and texts that are none."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmem.errors import ModelFileError
from staticmem.ir.expressions import MAX_DEPTH, evaluate, parse, readable, symbols_of

Pair = tuple[str, int]  # a text as torch.export writes it, and its value
SYMBOLS = {"s0": 7, "s53": 12, "u1": 3}

_leaves = st.one_of(
    st.integers(-50, 50).map(lambda n: (f"Integer({n})", n)),
    st.integers(-50, 50).map(lambda n: (str(n), n)),
    st.sampled_from(sorted(SYMBOLS)).map(lambda n: (f"Symbol('{n}', positive=True, integer=True)", SYMBOLS[n])),
    st.sampled_from(sorted(SYMBOLS)).map(lambda n: (n, SYMBOLS[n])),
)


def _grown(children: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    several = st.lists(children, min_size=1, max_size=3)
    positive = children.filter(lambda p: p[1] > 0)
    return st.one_of(
        several.map(lambda xs: (f"Add({', '.join(t for t, _ in xs)})", sum(v for _, v in xs))),
        several.map(lambda xs: (f"Mul({', '.join(t for t, _ in xs)})", math.prod(v for _, v in xs))),
        several.map(lambda xs: (f"Max({','.join(t for t, _ in xs)})", max(v for _, v in xs))),
        several.map(lambda xs: (f"Min({','.join(t for t, _ in xs)})", min(v for _, v in xs))),
        st.tuples(children, positive).map(lambda p: (f"FloorDiv({p[0][0]}, {p[1][0]})", p[0][1] // p[1][1])),
        st.tuples(children, positive).map(lambda p: (f"Mod({p[0][0]}, {p[1][0]})", p[0][1] % p[1][1])),
        st.tuples(children, positive).map(
            lambda p: (f"CeilDiv({p[0][0]}, {p[1][0]})", p[0][1] // p[1][1] + bool(p[0][1] % p[1][1]))
        ),
        children.map(lambda p: (f"Abs({p[0]})", abs(p[1]))),
        st.tuples(children, children).map(lambda p: (f"Le({p[0][0]}, {p[1][0]})", int(p[0][1] <= p[1][1]))),
    )


@settings(max_examples=200, deadline=None)
@given(st.recursive(_leaves, _grown, max_leaves=12))
def test_values_are_those_of_python(pair: Pair) -> None:
    text, value = pair
    assert evaluate(parse(text), SYMBOLS) == value


def test_a_size_as_torch_writes_it() -> None:
    text = "Add(FloorDiv(Add(Symbol('s53', positive=True, integer=True), Integer(-1)), Integer(2)), Integer(1))"
    expression = parse(text)
    assert symbols_of(expression) == {"s53"}
    for size in range(1, 40):
        assert evaluate(expression, {"s53": size}) == (size - 1) // 2 + 1


@pytest.mark.parametrize(("text", "value"), [
    ("Pow(Integer(3), Integer(4))", 81), ("PowByNatural(s0, Integer(2))", 49), ("Rational(7, 1)", 7),
    ("floor(Mul(Rational(1, 2), s0))", 3), ("ceiling(Mul(Rational(1, 2), s0))", 4),
    ("ModularIndexing(s53, Integer(5), Integer(2))", 0), ("TruncToInt(Rational(-7, 2))", -3),
    ("CeilToInt(IntTrueDiv(7, 2))", 4), ("FloorToInt(Rational(-7, 2))", -4), ("RoundToInt(Rational(7, 2))", 4),
    ("TruncToInt(FloatPow(ToFloat(196), Rational(1, 2)))", 14), ("TruncToInt(OpaqueUnaryFn_sqrt(196))", 14),
    ("Where(Ge(s53, 2), 5, 6)", 5), ("TruncToFloat(Rational(7, 2))", 3), ("Identity(8)", 8),
    ("CleanDiv(s53, Integer(4))", 3), (" Add( 1 ,2 ) ", 3), ("Mul(IntTrueDiv(s53, 5), 5)", 12),
    ("Mul(Pow(Integer(2), Integer(-1)), s53)", 6), ("floor(Mul(ToFloat(s0), Rational(3, 2)))", 10),
])  # fmt: skip
def test_further_functions(text: str, value: int) -> None:
    assert evaluate(parse(text), SYMBOLS) == value


@pytest.mark.parametrize("text", [
    "", " ", "(", ")", "Add(", "Add(1", "Add(1,,2)", "Add(1) 2", "1 2", "__import__('os')", "eval('1')", "s0.real",
    "Symbol(", "Symbol('s0'", "Foo(1)", "'s0'", "1;2", "lambda: 1", "Add(1]", "9" * 200_000, "9" * 50_000,
    "Abs(" * 300 + "1" + ")" * 300, "Mul(" + ", ".join(["9" * 40] * 900) + ")", "Rational(1, 2)", "IntTrueDiv(3, 2)",
    "\x00", "Add(\u0661)", "Pow(2, 1000)", "Pow(9999999999999, 9)", "FloorDiv(1, 0)", "Mod(1, 0)", "Abs()", "Max()",
    "Pow(0, -1)", "Rational(1, 0)", "Abs(1, 2)",
])  # fmt: skip
def test_what_is_no_size_is_a_message(text: str) -> None:
    with pytest.raises(ModelFileError, match="size expression"):
        evaluate(parse(text), {})


def test_depth_is_bounded_and_the_bound_is_reached() -> None:
    deep = "Abs(" * MAX_DEPTH + "-3" + ")" * MAX_DEPTH
    assert evaluate(parse(deep), {}) == 3


def test_a_long_product_stays_small_or_is_refused() -> None:
    """40 squarings would have 2**40 digits."""
    text = "s0"
    for _ in range(40):
        text = f"Pow({text}, 2)"
    with pytest.raises(ModelFileError):
        evaluate(parse(text), {"s0": 10})


def test_a_symbol_without_a_value_is_named() -> None:
    with pytest.raises(KeyError, match="u1"):
        evaluate(parse("Add(s0, u1)"), {"s0": 1})


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="Add(),' s01Symbol=PowFloorDivInteger-\n\t", max_size=60))
def test_any_text_is_a_value_or_a_message(text: str) -> None:
    symbols: dict[str, Any] = {"s0": 2, "s1": 3}
    try:
        assert isinstance(evaluate(parse(text), symbols), int)
    except ModelFileError:
        pass
    except KeyError as error:
        assert error.args[0] in symbols_of(parse(text))  # noqa: PT017 - the symbol that has no value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Ne(Mul(batch,FloorDiv(height,4)),1)", "batch * (height // 4) != 1"),
        ("Eq(Mod(Add(s0,3),8),0)", "(s0 + 3) % 8 == 0"),
        ("And(Lt(s0, 9), Or(Ne(s0, 3), Gt(s1, 2)))", "s0 < 9 and (s0 != 3 or s1 > 2)"),
        ("Mul(Mul(2,s0),Max(s0,s1))", "2 * s0 * Max(s0, s1)"),
        ("no expression", "no expression"),
    ],
)
def test_an_expression_is_said_as_people_write_it(text: str, said: str) -> None:
    assert readable(text) == said
