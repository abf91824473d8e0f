"""What explicit float32 casts of an export mean once the whole model is cast."""

from __future__ import annotations

import pytest
from prepared import run_step
from small_graphs import Builder

from staticmem.eager.trace import Buffer
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType, bfloat16, float32
from staticmem.ir.graph import Graph, Ref
from staticmem.scenario.step import Scenario

NORM, X = "n:transformers.models.llama.modeling_llama.LlamaRMSNorm", Ref("x")


def buffers(graph: Graph, dtype: DType | None = bfloat16) -> dict[str, Buffer]:
    return {b.name: b for b in run_step(graph, Scenario(dtype=dtype, outputs="dropped")).trace.buffers}


def rms_norm() -> Graph:
    """hidden = x.to(float32); ...; return weight * hidden.to(input_dtype), and a residual that reads x's other name."""
    b = Builder(x=(4, 8))
    weight = b.parameter("n.weight", 8)
    start = b.within().call("relu", X, name="start")
    b.within(NORM)
    up = b.call("to.dtype", start, float32, name="up")
    square = b.call("pow.Tensor_Scalar", up, 2, name="square")
    scaled = b.call("mul.Tensor", up, b.call("rsqrt", b.call("mean.dim", square, [-1], True), name="r"), name="scaled")
    back = b.call("to.dtype", scaled, float32, name="back")
    out = b.call("mul.Tensor", weight, back, name="out")
    return b.graph(b.within().call("add.Tensor", up, out, name="sum"))


def test_an_upcast_is_real_inside_and_the_input_outside() -> None:
    made = buffers(rms_norm())
    assert made["start"].dtype is bfloat16
    assert {made[n].dtype for n in ("up", "square", "scaled", "r")} == {float32}
    assert {made[n].dtype for n in ("back", "out", "sum")} == {bfloat16}  # the caller adds its own x
    assert made["up"].nbytes == 2 * made["start"].nbytes


def test_the_copy_goes_with_its_last_use_in_the_module() -> None:
    made = buffers(rms_norm())
    assert made["up"].died is not None
    assert made["up"].died < made["sum"].born
    assert made["start"].died is not None
    assert made["start"].died > made["sum"].born


def test_without_a_cast_the_casts_are_nothing() -> None:
    made = buffers(rms_norm(), None)
    assert {"up", "back"}.isdisjoint(made)
    assert {b.dtype for b in made.values()} == {float32}


def test_a_move_to_the_device_is_no_cast() -> None:
    """`positions.to(device)` is exported with all options that the tensor has: `to.dtype_layout`."""
    b = Builder(x=(4, 8))
    start = b.within().call("relu", X, name="start")
    moved = b.call("to.dtype_layout", start, float32, name="moved")
    made = buffers(b.graph(b.call("mul.Tensor", moved, 2.0, name="out")))
    assert "moved" not in made
    assert made["out"].dtype is bfloat16


@pytest.mark.parametrize(("target", "args"), [("zeros", ((4, 8),)), ("ones", ((4, 8),)), ("full", ((4, 8), 0.5))])
def test_factories_follow_the_model(target: str, args: tuple[object, ...]) -> None:
    b = Builder(x=(4, 8))
    made = b.call(target, *args, dtype=float32, name="made")
    graph = b.graph(b.call("add.Tensor", X, made, name="sum"))
    assert {buffers(graph)[n].dtype for n in ("made", "sum")} == {bfloat16}


def test_integers_become_float32() -> None:
    b = Builder()
    positions = b.input("p", 6, dtype=dtypes.int64)
    graph = b.graph(b.call("to.dtype", positions, float32, name="f"))
    made = buffers(graph)
    assert made["p"].dtype is dtypes.int64
    assert made["f"].dtype is float32


def test_rotary_angles_go_back_to_the_model_s_dtype() -> None:
    """LlamaRotaryEmbedding: positions in float32, `cos.to(dtype=x.dtype)`, which the export has as float32."""
    b = Builder(x=(4, 8))
    positions = b.input("p", 4, dtype=dtypes.int64)
    angles = b.call("to.dtype", positions, float32, name="angles")
    cos = b.call("cos", angles, name="cos")
    low = b.call("to.dtype", cos, float32, name="low")
    graph = b.graph(b.call("mul.Tensor", X, b.call("unsqueeze", low, 1), name="turned"))
    made = buffers(graph)
    assert (made["cos"].dtype, made["low"].dtype, made["turned"].dtype) == (float32, bfloat16, bfloat16)
