"""Losses, taken apart as the dynamo exporter does it, become the call that PyTorch ran."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from prepared import restored as after
from small_graphs import Builder

from staticmem.ir.graph import Op, Ref, SourceLine

X, Y = Ref("x"), Ref("y")
Make = Callable[[Builder], Ref]


def bce(b: Builder) -> Ref:
    rest = b.call("max.other", b.call("log1p", b.call("neg", X)), b.call("new_full", X, (), -100))
    first = b.call("mul.Tensor", b.call("sub.Tensor", Y, 1), rest)
    log = b.call("max.other", b.call("log", X), b.call("new_full", X, (), -100))
    return b.call("sub.Tensor", first, b.call("mul.Tensor", Y, log))


def logits(b: Builder) -> Ref:
    first = b.call("mul.Tensor", b.call("rsub.Scalar", Y, 1), X)
    return b.call("sub.Tensor", first, b.call("log_sigmoid", X))


def weighted_logits(b: Builder) -> Ref:
    share = b.call("add.Tensor", b.call("mul.Tensor", b.call("sub.Tensor", Ref("pos"), 1), Y), 1)
    first = b.call("mul.Tensor", b.call("rsub.Scalar", Y, 1), X)
    return b.call("sub.Tensor", first, b.call("mul.Tensor", share, b.call("log_sigmoid", X)))


def huber(b: Builder) -> Ref:
    d = b.call("abs", b.call("sub.Tensor", X, Y))
    near = b.call("mul.Tensor", b.call("mul.Tensor", d, 0.5), d)
    far = b.call("mul.Tensor", b.call("sub.Tensor", d, 1.0), 2.0)
    return b.call("where.self", b.call("lt.Scalar", d, 2.0), near, far)


def smooth(b: Builder) -> Ref:
    d = b.call("abs", b.call("sub.Tensor", X, Y))
    near = b.call("div.Tensor", b.call("mul.Tensor", b.call("pow.Tensor_Scalar", d, 2), 0.5), 1.0)
    return b.call("where.self", b.call("lt.Scalar", d, 1.0), near, b.call("sub.Tensor", d, 0.5))


def soft(b: Builder) -> Ref:
    return b.call("log1p", b.call("exp", b.call("mul.Tensor", b.call("neg", X), Y)))


def started(text: str = "") -> Builder:
    b = Builder(x=(4, 8), y=(4, 8), pos=(8,), w=(8,))
    b.stack = (SourceLine("m.py", 3, "forward", text),) if text else ()
    return b


def restored(b: Builder, result: Ref) -> list[Op]:
    return list(after(b.ops, (result.name,)).ops)


@pytest.mark.parametrize("text", ["", "loss = self.criterion(x, y)"])
@pytest.mark.parametrize(("make", "target", "args"), [
    (bce, "binary_cross_entropy", (X, Y, None, 1)),
    (logits, "binary_cross_entropy_with_logits", (X, Y, None, None, 1)),
    (weighted_logits, "binary_cross_entropy_with_logits", (X, Y, None, Ref("pos"), 1)),
    (huber, "huber_loss", (X, Y, 1, 2.0)),
    (smooth, "smooth_l1_loss", (X, Y, 1, 1.0)),
    (soft, "soft_margin_loss", (X, Y, 1)),
])  # fmt: skip
def test_a_loss_and_its_mean_are_one_call(text: str, make: Make, target: str, args: tuple[object, ...]) -> None:
    b = started(text)
    result = b.call("mean", make(b))
    (op,) = restored(b, result)
    assert (op.target, op.args, op.outputs) == (f"aten::{target}", args, (result.name,))


def test_reductions() -> None:
    b = started("loss = F.binary_cross_entropy(x, y, reduction='sum')")
    assert restored(b, b.call("sum", bce(b)))[0].args[-1] == 2
    b = started("loss = F.binary_cross_entropy(x, y, reduction='none').mean()")
    ops = restored(b, b.call("mean", bce(b)))
    assert [op.base for op in ops] == ["aten::binary_cross_entropy", "aten::mean"]
    assert ops[0].args[-1] == 0
    b = started("each = F.binary_cross_entropy(x, y, reduction='none')")
    each = bce(b)
    b.stack = (SourceLine("m.py", 4, "forward", "loss = each.mean()"),)
    assert [op.base for op in restored(b, b.call("mean", each))] == ["aten::binary_cross_entropy", "aten::mean"]


@pytest.mark.parametrize(("text", "weight"), [
    ("loss = F.binary_cross_entropy(x, y, weight=w)", Ref("w")),
    ("loss = F.binary_cross_entropy(", Ref("w")),  # the call goes on in the next line
    ("loss = (bce(x, y) * w).mean()", None),
])  # fmt: skip
def test_a_weight_belongs_to_the_call_or_not(text: str, weight: Ref | None) -> None:
    b = started(text)
    op = restored(b, b.call("mean", b.call("mul.Tensor", bce(b), Ref("w"))))[0]
    assert op.args[2] == weight


@pytest.mark.parametrize(("make", "text"), [
    (bce, "loss = -(y * p.log().clamp(min=-100) + (1 - y) * torch.log1p(-p)).mean()"),
    (logits, "loss = ((1 - y) * z - F.logsigmoid(z)).mean()"),
    (huber, "loss = torch.where(d < 2, 0.5 * d * d, 2 * (d - 1)).mean()"),
    (soft, "loss = torch.log1p(torch.exp(-z * y)).mean()"),
])  # fmt: skip
def test_a_formula_by_hand_is_left_as_it_is(make: Make, text: str) -> None:
    b = started(text)
    result = b.call("mean", make(b))
    assert restored(b, result) == b.ops


def test_parts_of_two_lines_are_no_call() -> None:
    b = started("d = self.distance(x, y)")
    d = b.call("abs", b.call("sub.Tensor", X, Y))
    b.stack = (SourceLine("m.py", 4, "forward", "return self.robust(d)"),)
    near = b.call("mul.Tensor", b.call("mul.Tensor", d, 0.5), d)
    far = b.call("mul.Tensor", b.call("sub.Tensor", d, 1.0), 2.0)
    result = b.call("where.self", b.call("lt.Scalar", d, 2.0), near, far)
    assert restored(b, result) == b.ops


def test_numbers_may_be_constants_of_the_file() -> None:
    b = started()
    first = b.call("mul.Tensor", b.call("sub.Tensor", Ref("one"), Y), X)
    result = b.call("sub.Tensor", first, b.call("log_sigmoid", X))
    consts = {"one": np.ones((), np.float32)}
    assert [op.base for op in list(after(b.ops, (result.name,), consts=consts).ops)] == [
        "aten::binary_cross_entropy_with_logits"
    ]
    consts["one"] = np.full((), 2, np.float32)
    assert list(after(b.ops, (result.name,), consts=consts).ops) == b.ops
