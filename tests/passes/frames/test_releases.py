"""Methods that stack traces leave out: found by the children that run during a line without being named in it."""

from __future__ import annotations

import pytest
from small_graphs import Builder

from staticmem.ir.graph import Graph, Ref, SourceLine
from staticmem.passes.frames.policy import Held
from staticmem.passes.frames.published_names import Table
from staticmem.passes.frames.releases import held_values
from staticmem.passes.frames.source_lines import held_by_lines
from staticmem.passes.frames.unseen_code import has_unseen_code, values_in_methods

CHILD = SourceLine("linear.py", 10, "forward", "return F.linear(input, self.weight, self.bias)")


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


def test_only_inference_guesses_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Graph] = []

    def hidden(graph: Graph) -> set[str]:
        asked.append(graph)
        return set()

    monkeypatch.setattr("staticmem.passes.frames.unseen_code.values_in_methods", hidden)
    graph = network(*["x = self.features(x)"] * 3)
    assert held_values(graph, training=True) == Held(until=held_by_lines(graph))
    assert not asked
    held_values(graph)
    assert asked == [graph]


def test_without_traces_everything_is_hidden() -> None:
    builder = Builder(x=(4, 8))
    assert has_unseen_code(builder.graph(builder.call("relu.default", Ref("x"))))


def test_names_of_published_classes_tell_of_functions_that_traces_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table({"Net": {"a": "kept'", "b": "y'", "c": ""}})
    monkeypatch.setattr("staticmem.passes.frames.published_names.table_of", lambda graph: table)
    graph = network(*["x = self.features(x)"] * 3)
    assert held_values(graph).until == {"v0": 2, "v1": 2, "v2": 2}
    assert held_values(graph, "last-use") == held_values(graph, "most") == held_values(graph)


def test_what_modules_keep_in_evaluation_mode_is_kept_although_traces_are_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LeViT computes its attention biases anew in training, and keeps them afterwards."""
    table = Table({"Net": {"a": "", "b": "", "c": ""}}, {}, {"Net": {"a": ["self.cache[]"]}})
    monkeypatch.setattr("staticmem.passes.frames.published_names.table_of", lambda graph: table)
    graph = network("x = self.a(x)", "x = self.b(x)", "x = self.c(x)")
    traced = held_by_lines(graph)
    assert traced["v0"] == 1
    assert held_values(graph).until == {**traced, "v0": 2}
    assert held_values(graph, training=True).until == traced
