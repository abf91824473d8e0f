"""How long code that source lines show in part may hold a value."""

from __future__ import annotations

import pytest
from small_graphs import Builder

from staticmem.ir.graph import Graph, Ref, SourceLine
from staticmem.passes.variables.line_texts import calls_hidden_code
from staticmem.passes.variables.source_lines import certainly_held_by_lines, held_by_lines, longest_holds_of_lines


def forward(*lines: str) -> Graph:
    """A chain of ops, one a line; a repeated text is the same line again, and `||` puts two ops on a line."""
    b = Builder(x=(4, 8)).within(":user.Net")
    value = Ref("x")
    count = 0
    for text in lines:
        for _ in range(text.count("||") + 1):
            b.stack = (SourceLine("net.py", 100 + lines.index(text), "forward", text.replace("||", "").strip()),)
            value = b.call("relu", value, name=f"v{count}")
            count += 1
    return b.graph(b.call("exp", value, name="end"))


def test_hidden_code_may_hold_what_it_made_until_its_line_is_done() -> None:
    graph = forward("x = self.features(x) || ||", "x = torch.relu(x)")
    assert longest_holds_of_lines(graph)[0]["v0"] == 2
    assert "v0" not in held_by_lines(graph)
    assert "v0" not in longest_holds_of_lines(forward("x = torch.relu(torch.relu(x)) || ||", "x = torch.relu(x)"))[0]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("x = self.conv(x)", False), ("x = F.relu(self.conv(x).view(-1, 2))", False), ("x = self.block(x)", True),
        ("y = helper(x)", True), ("x = Swish.apply(x)", True), ("n = len(xs)", False), ("x = self.conv(", True),
        ("for b in self.conv:", False), ("x = einops.rearrange(x, 'a b -> b a')", False),
    ],
)  # fmt: skip
def test_what_hides_code(text: str, hidden: bool) -> None:
    assert calls_hidden_code(text, frozenset(("conv",))) is hidden


def test_a_part_of_a_statement_may_name_its_result() -> None:
    graph = forward("self.conv(x),", "y = torch.relu(x)", "z = torch.relu(y)")
    assert longest_holds_of_lines(graph)[0]["v0"] >= 3
    assert held_by_lines(graph).get("v0", 0) < 3


def test_a_list_that_no_line_assigns_may_hold_everything() -> None:
    read = forward("y = torch.relu(x)", "y = torch.sin(y)", "y = torch.cos(y)", "out = sum(skips)")
    assert longest_holds_of_lines(read)[0]["v0"] == len(read.ops) - 1
    plain = forward("y = torch.relu(x)", "y = torch.sin(y)", "y = torch.cos(y)", "out = torch.exp(y)")
    assert longest_holds_of_lines(plain)[0]["v0"] == 1


def test_joined_lists_are_no_certain_holds() -> None:
    b = Builder(x=(4, 8)).within(":user.Net")
    parts = []
    for number in range(3):
        b.stack = (SourceLine("net.py", 5, "forward", "y = torch.relu(x)"),)
        parts.append(b.call("relu", Ref("x"), name=f"p{number}"))
    b.stack = (SourceLine("net.py", 7, "forward", "y = torch.cat(parts)"),)
    joined = b.call("cat", tuple(parts), name="joined")
    b.stack = (SourceLine("net.py", 8, "forward", "y = torch.exp(y)"),)
    graph = b.graph(b.call("exp", joined, name="end"))
    assert held_by_lines(graph)["p0"] == 4
    assert certainly_held_by_lines(graph).get("p0", 0) < 4


def test_a_method_that_may_have_a_loop_is_no_certain_hold() -> None:
    """`y = self.run(x)` calls layers of a list: each may be a turn, and `y` means none of their results for certain."""
    b = Builder(x=(4, 8))
    value = Ref("x")
    for number in range(3):
        b.within(f"layers.{number}:user.Layer")
        inner = SourceLine("net.py", 9, "forward", "return torch.exp(x)")
        b.stack = (SourceLine("net.py", 5, "forward", "y = self.run(x)"), inner)
        value = b.call("exp", value, name=f"v{number}")
    b.within().stack = (SourceLine("net.py", 6, "forward", "return torch.cos(y)"),)
    graph = b.graph(b.call("cos", value, name="end"))
    assert not {"v0", "v1"} & certainly_held_by_lines(graph).keys()


def test_what_a_line_appends_may_be_popped_by_a_line_without_an_op() -> None:
    graph = forward("skips = [torch.relu(x)]", "skips.append(torch.sin(x))", "y = torch.cos(x)", "out = torch.exp(y)")
    assert {"v0", "v1"} <= held_by_lines(graph).keys()
    assert certainly_held_by_lines(graph).keys() == {"v2", "end"}


def test_what_a_call_returns_beside_its_result_outlives_it() -> None:
    b = Builder(x=(4, 8))
    outer = SourceLine("net.py", 5, "forward", "y, skip = self.block(x)")
    b.within(":user.Net", "block:user.Block").stack = (outer, SourceLine("net.py", 9, "forward", "out = torch.relu(x)"))
    out = b.call("relu", Ref("x"), name="out")
    b.stack = (outer, SourceLine("net.py", 10, "forward", "return torch.exp(out), out"))
    y = b.call("exp", out, name="y")
    b.within(":user.Net").stack = (SourceLine("net.py", 6, "forward", "return torch.sin(y)"),)
    _, passed_on = longest_holds_of_lines(b.graph(b.call("sin", y, name="end")))
    assert passed_on == {"out"}
