"""Methods that stack traces leave out: found by the children that run during a line without being named in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_graphs import Builder

from staticmem.ir.graph import Graph, Ref, SourceLine
from staticmem.passes.variables.policy import Held
from staticmem.passes.variables.releases import held_values
from staticmem.passes.variables.unseen_code import has_unseen_code, values_in_methods

CHILD = SourceLine("/env/torch/nn/modules/linear.py", 10, "forward", "return F.linear(input, self.weight, self.bias)")


def network(*lines: str) -> Graph:
    """Three layers in a row; `lines` is what forward's line says during each."""
    builder = Builder(x=(4, 8))
    value = Ref("x")
    for number, (name, text) in enumerate(zip("abc", lines, strict=True)):
        builder.within(f"{name}:Linear")
        place = lines.index(text)  # the same text is the same line
        builder.stack = (SourceLine("net.py", 100 + place, "forward", text), CHILD)
        weight = builder.parameter(f"{name}.weight", 8, 8)
        value = builder.call("linear.default", value, weight, name=f"v{number}")
    return builder.graph(value)


def test_a_method_hides_its_variables() -> None:
    graph = network(*["x = self.features(x)"] * 3)
    assert has_unseen_code(graph)
    assert values_in_methods(graph) == {"v0", "v1"}


@pytest.mark.parametrize(
    "lines", [("x = self.a(x)", "x = self.b(x)", "x = self.c(x)"), ("x = self.c(self.b(self.a(x)))",) * 3]
)
def test_children_that_are_named_hide_nothing(lines: tuple[str, str, str]) -> None:
    graph = network(*lines)
    assert not has_unseen_code(graph)
    assert values_in_methods(graph) == set()


TURNS = "return self.last(self.turns(x))"


def turns(file: str = "net.py", line: str = TURNS) -> Graph:
    """`x = x.exp()`, then three times `gate = self.mix(x).sigmoid(); x = x * gate`, then `self.last(x)`."""
    builder = Builder(x=(4, 8))
    forward = SourceLine(file, 100, "forward", line)

    def linear(layer: str, value: Ref, name: str) -> Ref:
        builder.within(f"{layer}:Linear").stack = (forward, CHILD)
        result = builder.call("linear.default", value, weights[layer], name=name)
        builder.within().stack = (forward,)
        return result

    weights = {layer: builder.parameter(f"{layer}.weight", 8, 8) for layer in ("mix", "last")}
    builder.within().stack = (forward,)
    state = builder.call("exp.default", Ref("x"), name="state0")
    for turn in range(1, 4):
        gate = builder.call("sigmoid.default", linear("mix", state, f"mixed{turn}"))
        state = builder.call("mul.Tensor", state, gate, name=f"state{turn}")
    return builder.graph(linear("last", state, "result"))


@pytest.mark.parametrize("training", [False, True])
def test_a_loop_of_a_hidden_method_assigns_its_names_again(training: bool) -> None:
    """`state1` ends where `state2` is made. `state0` is no loop's, and after the last turn the method returns."""
    held = held_values(turns(), training=training)
    assert held.frames == {"state0": 0, "state2": 0}
    assert held.until["state1"] == 6


def test_loops_of_pytorch_are_as_they_were_compared() -> None:
    held = held_values(turns("/env/lib/python3.12/site-packages/torch/nn/net.py"))
    assert held.frames == {"state0": 0, "state1": 0, "state2": 0}


def test_lines_that_name_nothing_are_lines() -> None:
    """Without a hidden method the lines say all: no rule about code without traces applies."""
    graph = turns(line="return self.last(x.exp() * self.mix(x).sigmoid())")
    assert held_values(graph) == Held()


def test_modules_without_source_are_hidden() -> None:
    """Traces have no line of code that `exec` ran, and those of the layers that it calls."""
    graph = turns()
    ops = tuple(replace(op, stack=op.stack[1:]) for op in graph.ops)
    assert held_values(replace(graph, ops=ops)).frames == {"state0": 0, "state1": 0, "state2": 0}


def test_without_traces_everything_is_hidden() -> None:
    builder = Builder(x=(4, 8))
    assert has_unseen_code(builder.graph(builder.call("relu.default", Ref("x"))))
