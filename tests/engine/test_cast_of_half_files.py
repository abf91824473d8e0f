"""`--dtype bf16` of a file that is in bfloat16 already: its casts to float32 are real ones."""

from __future__ import annotations

from dataclasses import replace

from prepared import run_step

from staticmem.ir import dtypes
from staticmem.ir.graph import Frame, Graph, Op, Parameter, Ref, Value
from staticmem.liveness import Lifetimes
from staticmem.scenario.step import Scenario

BATCH, WIDTH = 64, 256
FRAMES = (Frame("", "Net"),)
LAYER = (*FRAMES, Frame("output", "torch.nn.modules.linear.Linear"))


def half_precision() -> Graph:
    """`self.output(x).float()`."""
    dtype = dtypes.bfloat16
    ops = (
        Op("linear", "aten::linear", (Ref("x"), Ref("w")), {}, ("h",), LAYER),
        Op("to", "aten::to.dtype", (Ref("h"), dtypes.float32), {}, ("y",), FRAMES),
    )
    return Graph(
        name="net", format="pt2", producer="test", inputs=(Value("x", dtype, (BATCH, WIDTH)),),
        parameters=(Parameter(Value("w", dtype, (WIDTH, WIDTH)), "weight"),), buffers=(), ops=ops, outputs=("y",),
        values={"h": Value("h", dtype, (BATCH, WIDTH)), "y": Value("y", dtypes.float32, (BATCH, WIDTH))},
    )  # fmt: skip


def test_the_cast_of_the_output_is_a_copy() -> None:
    graph = half_precision()
    scenario = Scenario(mode="train", loss="cross-entropy", dtype=dtypes.bfloat16, outputs="dropped")
    cast, plain = run_step(graph, scenario), run_step(graph, replace(scenario, dtype=None))
    assert cast.output_dtypes == (dtypes.float32,)
    assert Lifetimes(cast.trace).live == Lifetimes(plain.trace).live
