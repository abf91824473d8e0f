"""`x[a:b] += y` in files of the TorchScript exporter: a sum that is assigned twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prepared import restored

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.passes.pipeline import NODES


def augmented(ops: list[Op], outputs: tuple[str, ...]) -> list[Op]:
    return list(restored(ops, outputs, ["augmented parts"], NODES).ops)


def op(target: str, output: str, *args: Arg) -> Op:
    return Op(output, f"aten::{target}", tuple(Ref(a) if isinstance(a, str) else a for a in args), {}, (output,))


SUM = [op("mul.Tensor", "h", "x", 2.0), op("slice.Tensor", "v", "h", 1, 2, 6), op("add.Tensor", "s", "v", 1.0)]
FIRST = [
    op("expand", "e1", "s", (4, 4, 8)),
    op("reshape", "r1", "e1", (4, 4, 8)),
    op("slice.Tensor", "p1", "h", 1, 6, 10),
    op("copy_", "c1", "p1", "r1"),
]
SECOND = [
    op("expand", "e2", "s", (4, 4, 8)),
    op("reshape", "r2", "e2", (4, 4, 8)),
    op("slice.Tensor", "p2", "h", 1, 6, 10),
    op("copy_", "c2", "p2", "r2"),
]
LAST = [op("relu", "y", "h")]


def changed(ops: list[Op], index: int, *args: Arg) -> list[Op]:
    return [*ops[:index], replace(ops[index], args=args), *ops[index + 1 :]]


def test_a_sum_that_is_assigned_twice_was_in_place() -> None:
    ops = augmented([*SUM, *FIRST, *SECOND, *LAST], ("y",))
    assert [(o.target, o.outputs[0]) for o in ops] == [
        ("aten::mul.Tensor", "h"), ("aten::slice.Tensor", "v"), ("aten::add_.Tensor", "s"),
        *((o.target, o.outputs[0]) for o in SECOND), ("aten::relu", "y"),
    ]  # fmt: skip


def test_a_view_of_a_view_and_the_number_of_one_element() -> None:
    """`x[:, 2, 1:3] *= 0.5`"""
    given = [
        op("mul.Tensor", "h", "x", 2.0), op("select.int", "a", "h", 1, 2), op("slice.Tensor", "v", "a", 1, 1, 3),
        op("mul.Tensor", "s", "v", 0.5),
        op("slice.Tensor", "q1", "h", 1, 9, 10), op("slice.Tensor", "p1", "q1", 2, 6, 8), op("copy_", "c1", "p1", "s"),
        op("slice.Tensor", "q2", "h", 1, 9, 10), op("slice.Tensor", "p2", "q2", 2, 6, 8), op("copy_", "c2", "p2", "s"),
    ]  # fmt: skip
    ops = augmented(given, ("h",))
    assert [o.outputs[0] for o in ops] == ["h", "a", "v", "s", "q2", "p2", "c2"]
    assert ops[3].target == "aten::mul_.Tensor"


@pytest.mark.parametrize(
    "given",
    [
        [*SUM, *FIRST, *LAST],  # x[a:b] = x[a:b] + 1
        [*SUM, *FIRST, *changed(SECOND, 2, Ref("h"), 1, 0, 4), *LAST],  # to two places
        [*SUM, *FIRST, *changed(SECOND, 0, Ref("x"), (4, 4, 8)), *LAST],  # another value
        [*changed(SUM, 1, Ref("x"), 1, 2, 6), *FIRST, *SECOND, *LAST],  # a sum of something else
        [*SUM, *FIRST, *SECOND, op("relu", "z", "s"), *LAST],  # the sum is used otherwise
    ],
)  # fmt: skip
def test_other_assignments_stay(given: list[Op]) -> None:
    assert augmented(given, ("y",)) == given
