"""What code may keep from one call to the next."""

from __future__ import annotations

from small_graphs import Builder

from staticmem.engine.step import run_step
from staticmem.ir.graph import Graph, Ref, SourceLine
from staticmem.liveness import Lifetimes
from staticmem.scenario.step import Scenario
from staticmem.studies.stored_tensors import moved_by_kept_tensors

X = Ref("x")
TRAINING = Scenario(mode="train", optimizer="sgd", loss="mean")
INFERENCE = Scenario(mode="infer")


def moved(graph: Graph, scenario: Scenario = INFERENCE) -> tuple[int, int]:
    return moved_by_kept_tensors(graph, Lifetimes(run_step(graph, scenario).trace), scenario.training)


def test_a_mask_may_have_been_made_in_the_first_call() -> None:
    b = Builder(x=(4, 512)).within()
    mask = b.call("ones", (4, 512))
    assert moved(b.graph(b.call("mul.Tensor", X, mask))) == (8192, 0)  # it is alive at the peak


def test_noise_and_what_depends_on_inputs_are_made_in_each_call() -> None:
    b = Builder(x=(4, 512)).within()
    noise = b.call("mul.Tensor", b.call("rand", (4, 512)), 2.0)
    assert moved(b.graph(b.call("mul.Tensor", b.call("cos", X), noise))) == (0, 0)
    b = Builder(x=(4, 512)).within("m:transformers.models.bert.BertModel")
    assert moved(b.graph(b.call("mul.Tensor", X, b.call("ones", (4, 512))))) == (0, 0)


def test_an_attribute_lives_on_with_what_autograd_keeps_for_it() -> None:
    b = Builder(x=(4, 512)).within()
    weight = b.parameter("w", 4, 512)
    b.stack = (SourceLine("net.py", 1, "forward", "y = x * self.w"),)
    y = b.call("mul.Tensor", X, weight, name="y")
    b.stack = (SourceLine("net.py", 2, "forward", "self.heat = y.exp()"),)
    b.call("exp", y, name="heat")
    b.stack = (SourceLine("net.py", 3, "forward", "return y * 2"),)
    graph = b.graph(b.call("mul.Tensor", y, 2.0))
    assert moved(graph, INFERENCE) == (0, 8192)  # the attribute alone
    assert moved(graph, TRAINING) == (0, 2 * 2 * 8192)  # `heat` and `y`, of this step and of the one before
