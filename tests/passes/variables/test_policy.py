"""The stated policy for local variables, one graph for each of its rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_graphs import Builder

from staticmem.ir.graph import Frame, Graph, Ref
from staticmem.ir.stacks import common_depth
from staticmem.passes.variables.policy import POLICIES, held_by_policy
from staticmem.passes.variables.releases import releases_of

X = Ref("x")
CHILD, OTHER = "a:Block", "b:Block"


def operands() -> Graph:
    b = Builder(x=(4, 4)).within(CHILD)
    q, k = b.call("relu", X, name="q"), b.call("exp", X, name="k")
    return b.graph(b.call("neg", b.call("matmul", q, k, name="r")))


def product_for_a_child() -> Graph:
    b = Builder(x=(4, 4)).within(CHILD)
    r = b.call("matmul", X, X, name="r")
    return b.graph(b.within(CHILD, "a.c:Linear").call("relu", r))


def three_parts() -> Graph:
    b = Builder(x=(4, 4)).within(CHILD)
    parts = tuple(b.call("relu", X, name=n) for n in "pqr")
    return b.graph(b.call("cat", parts))


def parts_that_are_written_within() -> Graph:
    """`cat([h[src], h[dst], e])`: two parts that the frame makes by an op each, and an input."""
    b = Builder(x=(4, 4)).within(CHILD)
    return b.graph(b.call("cat", (b.call("relu", X, name="p"), b.call("relu", X, name="q"), X)))


def two_parts() -> Graph:
    b = Builder(x=(4, 4)).within(CHILD)
    return b.graph(b.call("cat", (b.call("relu", X, name="p"), b.call("relu", X, name="q"))))


def two_children_added() -> Graph:
    b = Builder(x=(4, 4))
    p = b.within(CHILD).call("relu", X, name="p")
    q = b.within(OTHER).call("relu", X, name="q")
    return b.graph(b.within().call("add.Tensor", p, q))


def branch_plus_nothing() -> Graph:
    b = Builder(x=(4, 4))
    p = b.within(CHILD).call("relu", X, name="p")
    return b.graph(b.within().call("add.Tensor", p, 0))


def later_argument() -> Graph:
    b = Builder(x=(4, 4)).within()
    p, q = b.call("relu", X, name="p"), b.call("exp", X, name="q")
    b.within(CHILD).call("neg", p)
    return b.graph(b.call("neg", q))


def canvas(target: str = "zeros", *args: object) -> Graph:
    """`c = torch.zeros(4, 4); c[1:2] = x[1:2]`, which a child reads last."""
    b = Builder(x=(4, 4)).within()
    c = b.call(target, *(args or ((4, 4),)), name="c")
    part = b.call("slice.Tensor", X, 0, 1, 2)
    b.call("copy_", b.call("slice.Tensor", c, 0, 1, 2), part)
    return b.graph(b.within(CHILD).call("relu", c))


def canvas_of_a_result() -> Graph:
    """`x = f(x); x[1:2] = ...` takes a name that code often assigns again."""
    return canvas("exp", X)


def model_output() -> Graph:
    b = Builder(x=(4, 4))
    p = b.within("bert:transformers.models.bert.modeling_bert.BertModel").call("relu", X, name="p")
    return b.graph(b.within("head:Linear").call("relu", p))


def lookup_that_two_models_share() -> Graph:
    b = Builder(x=(4, 4), ids=(4,))
    b.within("m.encoder:transformers.models.t5.modeling_t5.T5Stack", "m.encoder.embed_tokens:Embedding")
    p = b.call("embedding", X, Ref("ids"), name="p")
    return b.graph(b.within("m.decoder:transformers.models.t5.modeling_t5.T5Stack").call("relu", p))


def unpacked() -> Graph:
    b = Builder(x=(4, 4)).within(CHILD)
    b.call("chunk", X, 2, outputs=("p", "q"))
    return b.graph(b.call("neg", b.call("cat", (Ref("p"), Ref("q")))))


def numbered_children_added() -> Graph:
    """`self.blocks[0](x) + self.blocks[1](x)`, and a third that is added to the sum: a loop adds them to a total."""
    b = Builder(x=(4, 4))
    total, *rest = (b.within(f"blocks.{i}:Block").call("relu", X, name=f"p{i}") for i in range(3))
    for value in rest:
        total = b.within().call("add.Tensor", total, value)
    return b.graph(b.call("neg", total))


def one_of_two_results() -> Graph:
    """`x, skip = block(x); total = total + skip`: of several results each has a name."""
    b = Builder(x=(4, 4))
    total = b.within().call("add.Tensor", X, 1, name="total")
    b.within("blocks.0:Block")
    value, part = b.call("relu", X, name="p"), b.call("exp", X, name="q")
    return b.graph(b.within().call("add.Tensor", b.call("add.Tensor", total, part), b.call("neg", value)))


def chain() -> Graph:
    b = Builder(x=(4, 4)).within()
    return b.graph(b.call("neg", b.call("exp", b.call("relu", X, name="p"), name="q")))


RULES: list[tuple[Callable[[], Graph], dict[str, int]]] = [
    (operands, {"q": 1, "k": 1}), (product_for_a_child, {"r": 1}), (three_parts, {"p": 1, "q": 1, "r": 1}),
    (two_parts, {}), (two_children_added, {"p": 0, "q": 0}), (branch_plus_nothing, {"p": 0}),
    (parts_that_are_written_within, {}),
    (later_argument, {"q": 0}), (model_output, {"p": 0}),
    (lookup_that_two_models_share, {}), (unpacked, {"p": 1, "q": 1}),
    (canvas, {"c": 0}), (canvas_of_a_result, {}), (chain, {}),
    (numbered_children_added, {}), (one_of_two_results, {"q": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "held"), RULES, ids=lambda v: getattr(v, "__name__", ""))
def test_expected(make: Callable[[], Graph], held: dict[str, int]) -> None:
    assert held_by_policy(make()).frames == held


@pytest.mark.parametrize("make", [make for make, _ in RULES], ids=lambda v: v.__name__)
def test_the_policies_enclose_each_other(make: Callable[[], Graph]) -> None:
    last, expected, most = (releases_of(make(), policy, training=False) for policy in ("last-use", "expected", "most"))
    assert POLICIES == ("expected", "last-use", "most")
    assert last.frames == {}
    for name, index in last.last_use.items():
        assert index <= expected.last_use[name] <= most.last_use[name]


def test_the_argument_of_a_call_lives_until_the_product_of_its_result() -> None:
    """`x = self.gamma * self.mlp(x)`: the line assigns when it is done."""
    b = Builder(x=(4, 4), gamma=(4,)).within()
    p = b.call("relu", X, name="p")
    inner = b.within(CHILD).call("exp", p)
    inner = b.call("neg", inner)
    graph = b.graph(b.within().call("mul.Tensor", Ref("gamma"), inner))
    assert held_by_policy(graph).until == {"p": 3}
    assert held_by_policy(graph, "last-use").until == {}


def test_depth() -> None:
    a, b, c = Frame("", "N"), Frame("x", "B"), Frame("x", "B", 1)
    assert common_depth((a, b), (a, b)) == 2
    assert common_depth((a, b), (a, c)) == 1
    assert common_depth((), (a,)) == 0


def test_a_list_of_modules_is_a_loop_that_assigns_again() -> None:
    """`skip = skip + y[:, c:]` in each turn: two results of children are added, and the names are assigned again."""
    b = Builder(x=(4, 4))
    value: object = X
    for turn in range(3):
        left = b.within(f"a.{turn}:Block").call("relu", value, name=f"p{turn}")
        right = b.within(f"b.{turn}:Block").call("relu", value, name=f"q{turn}")
        value = b.within().call("add.Tensor", left, right, name=f"s{turn}")
    graph = b.graph(b.call("neg", value))
    assert set(held_by_policy(graph).frames) == {f"{name}{turn}" for name in "pq" for turn in range(3)}
    releases = releases_of(graph, "expected", training=False)
    assert set(releases.frames) == {"p2", "q2"}  # the last turn's
    assert releases.last_use["p0"] == 3


def test_what_a_turn_of_a_loop_reads_twice_ends_with_the_next() -> None:
    """`y = blocks[i](x); x = x + y[:c]; skip = skip + y[c:]`: the name of `y` is assigned again."""
    b = Builder(x=(4, 4))
    value: object = X
    skip: object = X
    for turn in range(3):
        y = b.within(f"r.{turn}:Block").call("relu", value, name=f"y{turn}")
        value = b.within().call("add.Tensor", value, b.call("exp", y))
        skip = b.call("add.Tensor", skip, b.call("neg", y))
    graph = b.graph(b.call("add.Tensor", value, skip))
    second = next(index for index, op in enumerate(graph.ops) if "y1" in op.outputs)
    assert releases_of(graph, "expected", training=False).last_use["y0"] == second
