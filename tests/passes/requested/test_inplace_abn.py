"""Batch norms with their activation as InPlaceABN: which ones, and what the op makes. Steps of real networks with the
modules of the package are in tests/engine/test_levers_measured.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prepared import run_step

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Ref, Value
from staticmem.liveness import Lifetimes
from staticmem.ops.normalization import INPLACE_ABN
from staticmem.passes.requested.inplace_abn import replace_norms
from staticmem.scenario.request import Request
from staticmem.scenario.step import Scenario

F32 = dtypes.float32
IMAGE, CHANNELS = (2, 128, 8, 8), 128
SIZE = 2 * 128 * 8 * 8 * 4  # bytes of an activation
STATISTIC = CHANNELS * 4
FRAMES = (Frame("", "Net"),)


def value(name: str, *shape: int) -> Value:
    return Value(name, F32, shape)


def op(name: str, target: str, *args: Any) -> Op:
    return Op(name, f"aten::{target}", tuple(Ref(a) if isinstance(a, str) else a for a in args), {}, (name,), FRAMES)


def net(activation: str = "relu", *after: Op) -> Graph:
    """conv, batch norm, activation, conv, and what comes `after` them."""
    own = [Parameter(value(name, CHANNELS), f"norm.{name}") for name in ("weight", "bias")]
    filters = [Parameter(value(name, CHANNELS, CHANNELS, 1, 1), f"{name}.weight") for name in ("first", "second")]
    running = tuple(Parameter(value(name, CHANNELS), f"norm.{name}") for name in ("mean", "var"))
    ops = (
        op("c", "conv2d", "x", "first"),
        op("n", "batch_norm", "c", "weight", "bias", "mean", "var", True, 0.1, 1e-5, True),
        op("a", activation, "n", *((0.0, 6.0) if activation == "hardtanh" else ())),
        op("y", "conv2d", "a", "second"),
        *after,
    )
    return Graph(
        name="net", format="pt2", producer="test", inputs=(value("x", *IMAGE),), parameters=(*filters, *own),
        buffers=running, ops=ops, outputs=(ops[-1].outputs[0],), values={"y": value("y", *IMAGE)},
    )  # fmt: skip


def train(graph: Graph, **levers: Any) -> StepResult:
    return run_step(graph, Scenario(mode="train", loss="mean", **levers))


def born(result: StepResult, kernel: str) -> list[int]:
    kernels = result.trace.kernels
    return [b.nbytes for b in result.trace.buffers if kernels[b.kernel].name == f"inplace_abn.{kernel}.default"]


@pytest.mark.parametrize("activation", ["relu", "relu_", "leaky_relu", "elu_"])
def test_one_op_takes_the_place_of_both(activation: str) -> None:
    changed, notes = replace_norms(net(activation))
    assert [o.target for o in changed.ops] == ["aten::conv2d", INPLACE_ABN, "aten::conv2d"]
    assert (changed.ops[1].args[0], changed.ops[1].outputs) == (Ref("c"), ("a",))
    (note,) = notes
    assert (note.code, note.count) == ("SM348", 1)
    assert ("1 of them had a ReLU" in note.text) == activation.startswith("relu")


def test_what_the_op_saves_and_makes() -> None:
    """conv2d saves x, the norm its result, which the second convolution saves too: one tensor in place of two. The
    first convolution's result is that tensor. Backward: the normalised input, the gradient and two sums."""
    plain, result = train(net()), train(net(), inplace_abn=True)
    before, after = (Lifetimes(r.trace).level_before(r.trace.marks["forward_end"]) for r in (plain, result))
    # batch norm saves mean and inverse std, InPlaceABN the variance and the count of 512 bytes
    assert before - after == SIZE + 2 * STATISTIC - (STATISTIC + 512)
    assert born(result, "statistics") == [STATISTIC, STATISTIC, 8]
    assert born(result, "backward_reduce") == [SIZE, SIZE, STATISTIC, STATISTIC]
    assert result.trained == 4


def test_statistics_are_in_float32_beside_float16() -> None:
    result = train(net(), inplace_abn=True, amp=dtypes.float16)
    assert born(result, "statistics") == [STATISTIC, STATISTIC, 8]
    assert born(result, "backward_reduce") == [SIZE // 2, SIZE // 2, STATISTIC, STATISTIC]


UNFIT = {
    "an activation without inverse": net("hardtanh"),
    "the input is read twice": net("relu", op("z", "add.Tensor", "y", "c")),
    "the result is read twice": net("relu", op("z", "add.Tensor", "y", "n")),
    "the input is the model's": replace(
        net(), ops=tuple(replace(o, args=(Ref("x"), *o.args[1:])) if o.name == "n" else o for o in net().ops[1:])
    ),
    "evaluation form": replace(
        net(), ops=tuple(replace(o, args=(*o.args[:5], False)) if o.name == "n" else o for o in net().ops)
    ),
    "no bias": replace(
        net(), ops=tuple(replace(o, args=(*o.args[:2], None, *o.args[3:])) if o.name == "n" else o for o in net().ops)
    ),
    "the input is saved": replace(
        net(), ops=(*net().ops[:1], op("s", "sigmoid", "c"), *(
            replace(o, args=(Ref("s"), *o.args[1:])) if o.name == "n" else o for o in net().ops[1:]
        )),
    ),
}  # fmt: skip


@pytest.mark.parametrize("graph", UNFIT.values(), ids=UNFIT)
def test_others_stay(graph: Graph) -> None:
    with pytest.raises(UsageError) as refused:
        replace_norms(graph)
    assert refused.value.code == "SM138"


@pytest.mark.parametrize("other", [{"compile": True}, {"amp": "bf16"}, {"dtype": "bf16"}])
def test_what_is_not_covered_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        Request(mode="train", inplace_abn=True, **other).scenario()
    assert refused.value.code == "SM138"
