"""The least and the most that a custom autograd function can do in training."""

from __future__ import annotations

from dataclasses import replace

from small_graphs import Builder

from staticmem.engine.step import run_step
from staticmem.ir.graph import Frame, Graph, Ref, SourceLine
from staticmem.liveness import Lifetimes
from staticmem.passes.restoring.custom_functions import ends_of_functions, functions
from staticmem.scenario.step import Scenario

X = Ref("x")
CALL = (SourceLine("net.py", 3, "forward", "return Swish.apply(x)"),)

TRAIN = Scenario(mode="train")


def swish(line: tuple[SourceLine, ...] = CALL) -> Graph:
    b = Builder(x=(64, 64), w=(64, 64))
    y = b.call("mm", X, Ref("w"), name="y")
    gate = b.call("sigmoid", y, name="gate")
    graph: Graph = b.graph(b.call("mul.Tensor", y, gate, name="out"))
    first, *function = graph.ops
    return replace(graph, ops=(first, *(replace(op, stack=line) for op in function)))


def peak(graph: Graph) -> int:
    return Lifetimes(run_step(graph, Scenario(mode="infer"), "expected").trace).peak_bytes


def test_the_ends_differ_in_what_is_saved() -> None:
    ends = ends_of_functions(swish(), TRAIN)
    assert ends is not None
    least, most = ends
    assert [op.grad for op in least.ops] == [True, False, False, True]
    assert least.outputs == ("out::function",)
    assert least.ops[-1].args[1:] == ((Ref("y"),), (), 0)
    assert most.ops[-1].args[2] == (Ref("y"), Ref("gate"), Ref("out"))
    assert peak(least) == peak(most) == peak(swish())  # in inference they are the same


def test_files_without_such_a_call_are_certain() -> None:
    assert ends_of_functions(swish(()), TRAIN) is None
    torch = (SourceLine("/site-packages/torch/utils/checkpoint.py", 3, "checkpoint", "CheckpointFunction.apply(x)"),)
    assert ends_of_functions(swish(torch), TRAIN) is None


def test_silu_without_classes_may_be_two_ops() -> None:
    b = Builder(x=(4, 4))
    ends = ends_of_functions(b.graph(b.call("silu", X, name="y")), TRAIN)
    assert ends is not None
    assert [op.base for op in ends[0].ops] == ["aten::silu"]
    assert [op.base for op in ends[1].ops] == ["aten::sigmoid", "aten::mul"]


def test_a_module_that_is_called_on_the_line_of_a_function_is_no_part_of_it() -> None:
    """`self.head(Reverse.apply(x))`: each has a `forward`."""
    called = SourceLine("net.py", 3, "forward", "y = self.head(Reverse.apply(x))")
    root, head = Frame("", "net.Net", 0), Frame("head", "torch.nn.modules.linear.Linear", 0)
    b = Builder(x=(64, 64), w=(64, 64))
    view = b.call("view_as", X, X, name="view")
    graph: Graph = b.graph(b.call("mm", view, Ref("w"), name="y"))
    function, product = graph.ops
    own = SourceLine("net.py", 9, "forward", "return x.view_as(x)")
    linear = SourceLine("/site-packages/torch/nn/modules/linear.py", 125, "forward", "return F.linear(input)")
    function = replace(function, modules=(root,), stack=(called, own))
    product = replace(product, modules=(root, head), stack=(called, linear))
    graph = replace(graph, ops=(function, product))
    assert [(r.start, r.end) for r, _ in functions(graph)] == [(0, 1)]
    ends = ends_of_functions(graph, TRAIN)
    assert ends is not None
    assert [op.base for op in ends[1].ops] == ["aten::view_as", "staticmem::own_backward", "aten::mm"]
