"""Shapes that no real model has end in an error with a code, in backward too (found by scripts/faults/fuzz.py)."""

from __future__ import annotations

import pytest
from prepared import run_step
from small_graphs import Builder

from staticmem.engine.step import StepResult
from staticmem.errors import DimensionError
from staticmem.ir.graph import Ref
from staticmem.scenario.step import Scenario


def batch_norm(*shape: int) -> StepResult:
    builder = Builder(x=(2, 4, 8, 8))
    weight, bias = builder.parameter("weight", *shape), builder.parameter("bias", *shape)
    out = builder.call("batch_norm.default", Ref("x"), weight, bias, None, None, True, 0.1, 1e-5, True, name="out")
    return run_step(builder.graph(out), Scenario(mode="train", optimizer="sgd", loss="mean"))


def test_the_real_shape_runs() -> None:
    assert batch_norm(4).trained == 2


@pytest.mark.parametrize("shape", [(4, 1), (4, 1, 1), (1, 4), (4, 0)])
def test_parameters_of_another_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(DimensionError, match="does not fit") as caught:
        batch_norm(*shape)
    assert caught.value.code == "SM118"


def test_a_bias_beyond_any_gpu() -> None:
    builder = Builder(x=(2, 3, 8, 8))
    weight, bias = builder.parameter("weight", 4, 3, 3, 3), builder.parameter("bias", 4, 2**45)
    out = builder.call("conv2d.default", Ref("x"), weight, bias, name="out")
    with pytest.raises(DimensionError):
        run_step(builder.graph(out), Scenario(mode="train", optimizer="sgd", loss="mean"))
