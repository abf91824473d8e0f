"""Values, module frames, odd results and errors of the run over a graph."""

from __future__ import annotations

from typing import Any

import pytest
from prepared import run_step
from small_graphs import Builder

from staticmem.eager.trace import Buffer
from staticmem.engine.step import StepResult
from staticmem.errors import DimensionError, ModelFileError, StaticmemError, UsageError
from staticmem.ir.graph import Graph, Ref
from staticmem.scenario.step import Scenario

X = Ref("x")


def infer(graph: Graph) -> StepResult:
    return run_step(graph, Scenario(outputs="dropped"), "last-use")


def buffers(result: StepResult) -> dict[str, Buffer]:
    return {b.name: b for b in result.trace.buffers}


def test_a_value_goes_with_its_last_use() -> None:
    b = Builder(x=(4,)).within()
    a = b.call("relu", X, name="a")
    c = b.call("exp", a, name="b")
    made = buffers(infer(b.graph(b.call("add.Tensor", c, b.call("neg", c, name="n"), name="out"))))
    assert made["a"].died == made["b"].born + 1
    assert (made["b"].died or 0) > made["out"].born
    assert made["x"].died is None


def test_an_argument_lives_until_its_module_returns() -> None:
    def graph(frames: tuple[str, ...]) -> Graph:
        b = Builder(x=(4,)).within()
        a = b.call("relu", X, name="a")
        inner = b.within(*frames).call("exp", a, name="i")
        last = b.call("neg", inner, name="j")
        return b.graph(b.within().call("cos", last, name="out"))

    alone, called = (buffers(infer(graph(f))) for f in ((), ("m:Block",)))
    assert (alone["a"].died or 0) < alone["j"].born
    assert called["j"].born < (called["a"].died or 0) < called["out"].born


def test_two_calls_of_a_module_are_two_frames() -> None:
    b = Builder(x=(4,)).within("m:Block@1")
    a = b.call("relu", X, name="a")
    first = b.call("exp", a, name="f")
    made = buffers(infer(b.graph(b.within("m:Block@2").call("neg", first, name="out"))))
    assert (made["a"].died or 0) < made["out"].born


def test_a_slice_of_everything_is_the_tensor() -> None:
    b = Builder(x=(4, 3))
    whole = b.call("slice.Tensor", X, 0, 0, 9223372036854775807, name="w")
    assert len(infer(b.graph(whole)).trace.buffers) == 1


def test_arithmetic_on_sizes_allocates_nothing() -> None:
    b = Builder(x=(4, 6))
    n = b.call("sym_size.int", X, 1, name="n")
    half = b.call("sym_numel", X, name="half")
    out = b.call("view", X, (n, -1), name="out")
    result = infer(b.graph(out))
    assert half.name == "half"
    assert result.output_shapes == ((6, 4),)
    assert len(result.trace.buffers) == 1


def test_an_op_in_place_on_the_input_makes_nothing() -> None:
    b = Builder(x=(4, 6))
    result = infer(b.graph(b.call("relu_", X, name="out")))
    assert [buffer.name for buffer in result.trace.buffers] == ["x"]


def test_absent_results_are_not_held() -> None:
    b = Builder(x=(4, 6))
    b.call("max.dim", X, 1, outputs=("values", ""))
    result = infer(b.graph(b.call("relu", Ref("values"), name="out")))
    assert all(buffer.died is not None for buffer in result.trace.buffers if buffer.name != "x")


def test_a_name_that_is_given_twice_lets_go() -> None:
    b = Builder(x=(4,))
    b.call("relu", X, name="a")
    b.call("exp", Ref("a"), name="a")
    result = infer(b.graph(b.call("neg", Ref("a"), name="out")))
    assert all(buffer.died is not None for buffer in result.trace.buffers if buffer.name != "x")


def test_an_unknown_op_is_sized_by_its_largest_input() -> None:
    b = Builder(x=(4, 6), y=(2,))
    result = infer(b.graph(b.call("nobody_knows", Ref("y"), X, name="out")))
    assert result.unknown == {"aten::nobody_knows": 1}
    assert result.output_shapes == ((4, 6),)


@pytest.mark.parametrize(("target", "args", "error", "code"), [
    ("view", (X, (5, 5)), DimensionError, "SM118"), ("mm", (X, X), DimensionError, "SM118"),
    ("relu", (Ref("nobody"),), ModelFileError, "SM119"), ("add.Tensor", (1, 2), ModelFileError, "SM122"),
    ("mm", (X,), ModelFileError, "SM122"), ("sym_size.int", (X, 7), ModelFileError, "SM122"),
    ("slice.Tensor", (X, 5, 0, 1), StaticmemError, ""), ("slice.Tensor", (), ModelFileError, "SM122"),
    ("dropout", (1.5, 0.5, True), ModelFileError, "SM122"), ("cat", ((),), StaticmemError, ""),
])  # fmt: skip
def test_errors_name_the_node(target: str, args: tuple[Any, ...], error: type[StaticmemError], code: str) -> None:
    b = Builder(x=(4, 6)).within("here:Module")
    with pytest.raises(error, match="'the_node'") as caught:
        infer(b.graph(b.call(target, *args, name="the_node")))
    assert not code or caught.value.code == code


def test_training_needs_an_output() -> None:
    b = Builder(x=(4,))
    for graph in (b.graph(), b.graph(Ref("nobody"))):
        with pytest.raises(UsageError):
            run_step(graph, Scenario(mode="train"))
        assert infer(graph).output_shapes == ()
