"""What `Knowledge` claims of index tensors and masks, against the same programs in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmem.ir import dtypes
from staticmem.ir.graph import Op, Ref
from staticmem.passes.affine import Affine, Content, Knowledge, Mask

Array = np.ndarray


def as_array(known: Content) -> Array:
    """The tensor that a claim describes."""
    indices = np.indices(known.shape)

    def values(affine: Affine) -> Array:
        total = np.full(known.shape, affine.const, dtype=np.int64)
        for coef, index in zip(affine.coef, indices, strict=True):
            total = total + coef * index
        return total

    if isinstance(known, Affine):
        return values(known)
    if known.never:
        return np.zeros(known.shape, dtype=bool)
    result = np.ones(known.shape, dtype=bool)
    for term in known.terms:
        result &= values(term) >= 0
    return result


class Program:
    """Runs every call twice: in NumPy, and as ops that `Knowledge` sees."""

    def __init__(self) -> None:
        self.knowledge = Knowledge()
        self.arrays: dict[str, Array] = {}

    def call(self, target: str, result: Array, *args: Any, **kwargs: Any) -> str:
        name = f"t{len(self.arrays)}"
        self.arrays[name] = result
        refs = tuple(Ref(a) if isinstance(a, str) else a for a in args)
        self.knowledge.visit(Op(name, f"aten::{target}", refs, kwargs, (name,)))
        return name

    def claims(self) -> dict[str, Content]:
        return self.knowledge.contents

    def check(self) -> None:
        for name, known in self.claims().items():
            expected = self.arrays[name]
            assert known.shape == expected.shape, name
            np.testing.assert_array_equal(as_array(known), expected, err_msg=name)
            if isinstance(known, Mask):
                if known.always:
                    assert expected.all()
                if known.causal:
                    np.testing.assert_array_equal(
                        expected, np.broadcast_to(np.tri(*expected.shape[-2:]), expected.shape)
                    )
                for axis in range(expected.ndim):
                    if known.independent_of(axis) and expected.shape[axis]:
                        assert (expected == np.take(expected, [0], axis)).all()
            elif known.constant is not None:
                assert (expected == known.constant).all()
            elif expected.size:
                low, high = known.bounds()
                assert low <= expected.min()
                assert expected.max() <= high


small = st.integers(-4, 4)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    p = Program()
    for _ in range(draw(st.integers(1, 3))):
        start, stop, step = draw(small), draw(small), draw(small.filter(bool))
        p.call("arange.start_step", np.arange(start, stop, step), start, stop, step)
    for _ in range(draw(st.integers(1, 9))):
        step_of(draw, p)
    return p


def step_of(draw: st.DrawFn, p: Program) -> None:
    """One random op over what is there; calls that NumPy refuses are left out."""
    pick = draw(st.sampled_from(sorted(p.arrays)))
    a = p.arrays[pick]
    axis = draw(st.integers(-a.ndim, a.ndim - 1)) if a.ndim else 0
    kind = draw(st.sampled_from(sorted(KINDS)))
    KINDS[kind](draw, p, pick, a, axis)


def _binary(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    name, function = draw(st.sampled_from([
        ("add.Tensor", np.add), ("sub.Tensor", np.subtract), ("mul.Tensor", np.multiply), ("le.Tensor", np.less_equal),
        ("lt.Tensor", np.less), ("ge.Tensor", np.greater_equal), ("gt.Tensor", np.greater), ("eq.Tensor", np.equal),
        ("ne.Tensor", np.not_equal),
    ]))  # fmt: skip
    other = draw(st.one_of(small, st.sampled_from(sorted(p.arrays))))
    b = p.arrays[other] if isinstance(other, str) else np.int64(other)
    if a.dtype == bool or np.asarray(b).dtype == bool:
        return
    try:
        p.call(name, np.asarray(function(a, b)), pick, other)
    except ValueError:
        return


def _and(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    other = draw(st.sampled_from(sorted(p.arrays)))
    b = p.arrays[other]
    if a.dtype != bool or b.dtype != bool:
        return
    try:
        p.call("bitwise_and.Tensor", a & b, pick, other)
    except ValueError:
        return


def _unsqueeze(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    if a.ndim < 4:
        where = draw(st.integers(-a.ndim - 1, a.ndim))
        p.call("unsqueeze", np.expand_dims(a, where), pick, where)


def _squeeze(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    if a.ndim:
        p.call("squeeze.dim", np.squeeze(a, axis) if a.shape[axis] == 1 else a, pick, axis)


def _expand(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    size = [draw(st.integers(1, 3)) if s == 1 else draw(st.sampled_from([s, -1])) for s in a.shape]
    size = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, max(0, 4 - a.ndim))))] + size
    lead = len(size) - a.ndim
    real = [a.shape[i - lead] if s == -1 else s for i, s in enumerate(size)]
    p.call("expand", np.broadcast_to(a, real), pick, tuple(size))


def _slice(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    if not a.ndim:
        return
    start, end = draw(st.one_of(st.none(), st.integers(-5, 5))), draw(st.one_of(st.none(), st.integers(-5, 9)))
    step = draw(st.integers(1, 3))
    index: list[slice] = [slice(None)] * a.ndim
    index[axis] = slice(start, end, step)
    given = (axis, start, end, step)[: draw(st.sampled_from([3, 4]))]
    index[axis] = slice(start, end, step if len(given) == 4 else 1)
    p.call("slice.Tensor", a[tuple(index)], pick, *given)


def _permute(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    if a.ndim:
        other = draw(st.integers(-a.ndim, a.ndim - 1))
        p.call("transpose.int", np.swapaxes(a, axis, other), pick, axis, other)
        order = tuple(draw(st.permutations(range(a.ndim))))
        p.call("permute", np.transpose(a, order), pick, order)


def _view(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    shapes = [(-1,), (1, -1), (-1, 1), tuple(s for s in a.shape if s != 1), (1, *a.shape), (*a.shape, 1), a.shape[::-1]]
    shape = draw(st.sampled_from(shapes))
    if a.size and len(shape) < 5:
        p.call("view", a.reshape(shape), pick, shape)


def _cast(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    dtype, kind = draw(st.sampled_from([(dtypes.bool_, bool), (dtypes.int64, np.int64), (dtypes.int8, np.int8)]))
    p.call("to.dtype", a.astype(kind), pick, dtype)


def _cumsum(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    if a.ndim:
        p.call("cumsum", np.cumsum(a, axis, dtype=np.int64), pick, axis)


def _index(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    chosen = [draw(st.sampled_from(sorted(p.arrays))) for _ in a.shape]
    if not chosen or any(p.arrays[c].dtype != np.int64 for c in chosen):
        return
    try:
        p.call("index.Tensor", a[tuple(p.arrays[c] for c in chosen)], pick, tuple(Ref(c) for c in chosen))
    except IndexError:
        return


def _filled(draw: st.DrawFn, p: Program, pick: str, a: Array, axis: int) -> None:
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    p.call("ones", np.ones(shape, dtype=bool), shape, dtype=dtypes.bool_)
    p.call("zeros", np.zeros(shape, dtype=np.int64), shape, dtype=dtypes.int64)


Step = Callable[[st.DrawFn, Program, str, Array, int], None]
KINDS: dict[str, Step] = {
    "binary": _binary, "binary again": _binary, "and": _and, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "expand": _expand, "slice": _slice, "permute": _permute, "view": _view, "cast": _cast, "cumsum": _cumsum,
    "index": _index, "filled": _filled,
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(programs())
def test_claims_are_true(p: Program) -> None:
    p.check()


def position_mask(length: int, *, strict: bool = False) -> Program:
    """`torch.arange(L)[None] <= torch.arange(L)[:, None]`."""
    p = Program()
    i = p.call("arange", np.arange(length), length)
    column = p.call("unsqueeze", np.arange(length)[:, None], i, 1)
    row = p.call("unsqueeze", np.arange(length)[None], i, 0)
    grid = np.arange(length)
    p.call(
        "lt.Tensor" if strict else "le.Tensor",
        (grid < grid[:, None]) if strict else (grid <= grid[:, None]),
        row,
        column,
    )
    return p


def last(p: Program) -> Content | None:
    return p.claims().get(f"t{len(p.arrays) - 1}")


def test_a_lower_triangle_is_causal_and_a_strict_one_is_not() -> None:
    for strict in (False, True):
        p = position_mask(5, strict=strict)
        p.check()
        mask = last(p)
        assert isinstance(mask, Mask)
        assert mask.causal is not strict
        assert not mask.always


def test_a_window_is_not_causal() -> None:
    p = position_mask(5)
    i, grid = "t0", np.arange(5)
    shifted = p.call("add.Tensor", grid + 3, i, 3)
    wide = p.call("unsqueeze", (grid + 3)[None], shifted, 0)
    near = p.call("gt.Tensor", (grid + 3) > grid[:, None], wide, "t1")
    p.call("bitwise_and.Tensor", (grid <= grid[:, None]) & ((grid + 3) > grid[:, None]), "t3", near)
    p.check()
    mask = last(p)
    assert isinstance(mask, Mask)
    assert len(mask.terms) == 2
    assert not mask.causal


def test_a_triangle_that_is_not_square_is_not_causal() -> None:
    p = position_mask(5)
    p.call("slice.Tensor", p.arrays["t3"][:, :3], "t3", 1, 0, 3)
    p.check()
    mask = last(p)
    assert isinstance(mask, Mask)
    assert not mask.causal


@pytest.mark.parametrize("write", ["fill_.Scalar", "copy_", "index_put_", "masked_fill_.Scalar", "logical_not_"])
def test_a_write_through_a_view_ends_the_knowledge(write: str) -> None:
    """`mask[:, 0] = False`: a view of the mask is written to."""
    p = Program()
    p.call("ones", np.ones((2, 3), dtype=bool), (2, 3), dtype=dtypes.bool_)
    p.call("clone", np.ones((2, 3), dtype=bool), "t0")
    p.call("select.int", np.ones(2, dtype=bool), "t0", 1, 0)
    assert set(p.claims()) == {"t0", "t1"}
    p.call(write, np.zeros(2, dtype=bool), "t2", False)
    assert set(p.claims()) == {"t1"}


def test_detaching_in_place_writes_nothing() -> None:
    p = Program()
    p.call("ones", np.ones(3, dtype=bool), (3,), dtype=dtypes.bool_)
    p.call("detach_", np.ones(3, dtype=bool), "t0")
    assert "t0" in p.claims()


@pytest.mark.parametrize("args", [
    (0, 2.5), (0.5, 4), (Ref("n"),), (0, Ref("n")), (0, 4, 0), (), (0, 1, 2, 3), (True,),
])  # fmt: skip
def test_a_range_of_anything_but_integers_is_unknown(args: tuple[Any, ...]) -> None:
    p = Program()
    p.call("arange", np.zeros(0), *args)
    assert not p.claims()


@pytest.mark.parametrize(("dtype", "last_exact"), [("int8", 127), ("uint8", 255), ("bfloat16", 256), ("float16", 2048)])
def test_what_an_element_type_cannot_hold_is_unknown(dtype: str, last_exact: int) -> None:
    """Integers wrap and floats round: the claim would be false."""
    for end, known in ((last_exact + 1, True), (last_exact + 2, False)):
        p = Program()
        p.call("arange", np.arange(end), end)
        p.call("to.dtype", np.arange(end), "t0", dtypes.ALL[dtype])
        p.call("arange", np.arange(end), end, dtype=dtypes.ALL[dtype])
        assert ("t1" in p.claims(), "t2" in p.claims()) == (known, known)


def test_index_out_of_range_and_negative_is_unknown() -> None:
    for start in (-1, 1):
        p = Program()
        p.call("arange", np.arange(3), 3)
        p.call("arange.start", np.arange(start, start + 3), start, start + 3)
        p.call("index.Tensor", np.zeros(3), "t0", (Ref("t1"),))
        assert "t2" not in p.claims()


@pytest.mark.parametrize(("args", "known"), [
    (("t0", 1, -1, Ref("t1")), True), (("t0", 1, 1, Ref("t1")), True), (("t0", 2, -1, Ref("t1")), False),
    (("t0", 1, 0, Ref("t1")), False), (("t0", 1, -1), False),
])  # fmt: skip
def test_differences_of_positions(args: tuple[Any, ...], known: bool) -> None:
    """transformers' packed-sequence check: `torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)`."""
    p = Program()
    p.call("arange", np.arange(4), 4)
    positions = np.arange(4)[None]
    p.call("unsqueeze", positions, "t0", 0)
    p.call("slice.Tensor", positions[:, :1], "t1", 1, 0, 1)
    p.call("sub.Tensor", positions[:, :1] - 1, "t2", 1)
    renamed = [{"t0": "t1"}.get(a, a) if isinstance(a, str) else Ref("t3") if isinstance(a, Ref) else a for a in args]
    p.call("diff", np.ones((1, 4), dtype=np.int64), *renamed)
    assert ("t4" in p.claims()) == known
    p.check()
