"""What the last turn of a loop computes for a turn that never comes, and exporters drop."""

from __future__ import annotations

from small_graphs import Builder

from staticmem.ir.graph import Graph, Ref
from staticmem.passes.restoring.module_calls import ends_of_loops
from staticmem.scenario.step import Scenario

NET = ":my.Net"

TRAIN = Scenario(mode="train")


def wavenet(*, turns: int = 3, whole: bool = False, scale: float = 2.0) -> Graph:
    """`y = blocks[i](x); x = (x + y[:2]) * scale; skip = skip + y[2:]`, without the last turn's `x` unless `whole`."""
    b = Builder(x=(4, 4))
    x: object = b.within(NET, "start:my.Child").call("exp", Ref("x"), name="x_start")
    skip: object = b.within(NET, "first:my.Child").call("exp", Ref("x"), name="skip_start")
    for turn in range(turns):
        y = b.within(NET, f"blocks.{turn}:my.Child").call("exp", x, name=f"y{turn}")
        b.within(NET)
        if whole or turn < turns - 1:
            left = b.call("slice.Tensor", y, 0, 0, 2, name=f"left{turn}")
            step = b.call("add.Tensor", x, left, name=f"sum{turn}")
            x = b.call("mul.Tensor", step, scale, name=f"x{turn}")
        right = b.call("slice.Tensor", y, 0, 2, 4, name=f"right{turn}")
        skip = b.call("add.Tensor", skip, right, name=f"skip{turn}")
    return b.graph(b.within(NET, "end:my.Child").call("exp", skip, name="end"))


def test_the_last_turn_gets_what_the_others_compute() -> None:
    graph = wavenet()
    longer = ends_of_loops(graph, TRAIN)
    assert longer is not None
    added = [op for op in longer[1].ops if op not in graph.ops]
    assert [op.target for op in added] == ["aten::slice.Tensor", "aten::add.Tensor", "aten::mul.Tensor"]
    assert added[0].refs() == ("y2",)
    assert added[1].refs() == ("x1", *added[0].outputs)
    assert added[2].refs() == added[1].outputs
    assert longer[1].ops.index(added[0]) > next(i for i, op in enumerate(longer[1].ops) if "y2" in op.outputs)
    assert longer[1].ops[-1].outputs == ("end",)


def test_a_loop_that_is_whole_is_as_it_was() -> None:
    assert ends_of_loops(wavenet(whole=True), TRAIN) is None


def test_two_turns_do_not_show_what_a_turn_is() -> None:
    assert ends_of_loops(wavenet(turns=2), TRAIN) is None


def test_a_module_that_the_last_turn_does_not_call_is_no_sign() -> None:
    b = Builder(x=(4, 4))
    x: object = Ref("x")
    for turn in range(4):
        x = b.within(NET, f"blocks.{turn}:my.Child").call("exp", x)
        if turn < 3:
            x = b.within(NET, f"downs.{turn}:my.Child").call("exp", x)
    assert ends_of_loops(b.graph(b.within(NET, "end:my.Child").call("exp", x)), TRAIN) is None
