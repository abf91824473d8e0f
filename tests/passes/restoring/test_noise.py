"""Noise for stochastic depth is made in the dtype of what it multiplies."""

from __future__ import annotations

from typing import Any

import pytest
from prepared import only
from small_graphs import Builder, targets

from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Ref
from staticmem.scenario.step import Scenario


def follow_operand(graph: Graph) -> Graph:
    return only("noise of stochastic depth", graph, Scenario())


def depth(*, divide: bool = True, early: bool = True, last: str = "mul.Tensor", **kwargs: Any) -> Graph:
    """torchvision: `noise = torch.empty(size, dtype=x.dtype).bernoulli_(p).div_(p); x * noise`."""
    b = Builder(x=(2, 3))
    if early:
        b.call("relu", Ref("x"), name="h")
    noise = b.call("empty.memory_format", (2, 1), dtype=dtypes.float32, **kwargs, name="e")
    noise = b.call("bernoulli_.float", noise, 0.8)
    if divide:
        noise = b.call("div_.Scalar", noise, 0.8)
    if not early:
        b.call("relu", Ref("x"), name="h")
    return b.graph(b.call(last, Ref("h"), noise))


@pytest.mark.parametrize("divide", [True, False])
def test_it_follows_the_operand(divide: bool) -> None:
    after = follow_operand(depth(divide=divide, pin_memory=False))
    made = after.ops[1]
    assert made.target == "aten::new_empty"
    assert made.args == (Ref("h"), (2, 1))
    assert made.kwargs == {"pin_memory": False}
    assert targets(after)[2:] == targets(depth(divide=divide))[2:]


@pytest.mark.parametrize("other", [{"last": "add.Tensor"}, {"early": False}])
def test_anything_else_stays(other: dict[str, Any]) -> None:
    before = depth(**other)
    assert follow_operand(before) is before


def test_an_empty_tensor_that_nothing_fills_stays() -> None:
    b = Builder(x=(2, 3))
    before = b.graph(b.call("empty.memory_format", (2, 1)))
    assert follow_operand(before) is before
