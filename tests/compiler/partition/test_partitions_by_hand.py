"""Partitions of small graphs that can be worked out by hand, and the answers to graphs that have none."""

from __future__ import annotations

from random import Random

import pytest

from staticmem.compiler.graphs import JointGraph
from staticmem.compiler.partition import Partitioner, partition
from staticmem.compiler.partition.cut import SINK, SOURCE, UNLIMITED, sink_side, solve_large, solve_small
from staticmem.compiler.partition.extract import knapsack, runtime
from staticmem.eager.strides import Form, contiguous_strides, form_of
from staticmem.errors import StaticmemError, UsageError
from staticmem.ir import dtypes
from staticmem.ops.registry import rules
from staticmem.tracing.nodes import GETITEM, PLACEHOLDER, Node, Result

rules()  # nodes that are made by hand import no family


def form(*shape: int) -> Form:
    return form_of(shape, contiguous_strides(shape), dtypes.float32)


FORM = form(8, 8)


def node(target: str, *args: object, of: Result = FORM, region: int = 0) -> Node:
    return Node(target, args, of, must_recompute=region)


def given(name: str, of: Result = FORM) -> Node:
    return Node(PLACEHOLDER, (), of, name=name)


def joint(nodes: list[Node], outputs: list[Node | None], static: tuple[Node, ...] = ()) -> JointGraph:
    """The first output is the forward's."""
    placeholders = [n for n in nodes if n.target == PLACEHOLDER]
    tangents = tuple(n for n in placeholders if n.name == "tangent")
    primals = tuple(n for n in placeholders if n.name != "tangent")
    return JointGraph(tuple(nodes), tuple(outputs), 1, primals, tangents, static)


def linear_and_relu() -> JointGraph:
    """relu(x @ w): its backward needs where the result is positive, x and w."""
    x, w, tangent = given("x"), given("w"), given("tangent")
    product = node("aten::mm", x, w)
    relu = node("aten::relu", product)
    mask = node("aten::le.Scalar", relu, 0, of=form_of((8, 8), (8, 1), dtypes.bool_))
    grad = node("aten::where.self", mask, tangent, tangent)
    of_w = node("aten::mm", node("aten::permute", x, (1, 0)), grad)
    of_x = node("aten::mm", grad, node("aten::permute", w, (1, 0)))
    nodes = [x, w, tangent, product, relu, mask, grad, of_w.args[0], of_w, of_x.args[1], of_x]
    return joint(nodes, [relu, of_x, of_w], (w,))


def test_the_smaller_of_two_values_is_saved() -> None:
    """The mask has a quarter of the bytes of what it is computed of."""
    made = partition(linear_and_relu())
    assert [n.name or n.target for n in made.saved] == ["w", "aten::le.Scalar", "aten::permute"]
    assert [n.target for n in made.forward.nodes] == [
        PLACEHOLDER, PLACEHOLDER, "aten::mm", "aten::relu", "aten::le.Scalar", "aten::permute",
    ]  # fmt: skip
    assert made.forward.outputs[1:] == made.saved
    assert [n.target for n in made.backward.nodes] == [
        *[PLACEHOLDER] * 4, "aten::where.self", "aten::mm", "aten::permute", "aten::mm",
    ]  # fmt: skip
    assert made.recomputed == ()
    assert made.backward.placeholders[0].name == "w"
    assert not set(made.backward.nodes) & set(made.forward.nodes)
    assert all(read in set(made.backward.nodes) for n in made.backward.nodes for read in n.inputs)


def test_a_graph_without_gradients_is_all_forward() -> None:
    x = given("x")
    out = node("aten::relu", x)
    made = partition(joint([x, out], [out, None]))
    assert [n.target for n in made.forward.nodes] == [PLACEHOLDER, "aten::relu"]
    assert made.saved == made.backward.nodes == made.recomputed == ()
    assert made.backward.outputs == (None,)


def test_a_long_chain_is_cut_and_getitems_stand_behind_their_call() -> None:
    x, tangent = given("x"), given("tangent")
    nodes = [x, tangent]
    cur = x
    for k in range(150):
        cur = node("aten::mul.Scalar", cur, float(k))
        nodes.append(cur)
    pair = node("aten::sort", cur, of=(FORM, FORM))
    between = node("aten::relu", cur)
    first, second = node(GETITEM, pair, 0), node(GETITEM, pair, 1)
    out = node("aten::add.Tensor", first, second)
    grad = node("aten::mul.Tensor", tangent, nodes[60])
    last = node("aten::add.Tensor", grad, between)
    made = partition(joint([*nodes, pair, between, first, second, out, grad, last], [out, last]))
    targets = [n.target for n in made.forward.nodes]
    assert targets[targets.index("aten::sort") + 1 :][:2] == [GETITEM, GETITEM]
    assert len(made.saved) < 3


def test_regions_of_checkpoints_save_what_stands_between_them() -> None:
    """Two regions in a row: the first one's result is saved, all else is computed again."""
    x, w, tangent = given("x"), given("w"), given("tangent")
    first = node("aten::mm", x, w, region=1)
    second = node("aten::mm", first, w, region=2)
    third = node("aten::mm", second, w, region=2)
    grad = node("aten::mul.Tensor", tangent, third)
    again = node("aten::mul.Tensor", grad, second)
    made = partition(joint([x, w, tangent, first, second, third, grad, again], [third, again, None], (w,)))
    assert list(made.saved) == [w, first]
    assert [n.target for n in made.recomputed] == ["aten::mm", "aten::mm"]


def test_budgets() -> None:
    partitioner = Partitioner(linear_and_relu())
    saved = [partitioner.partition(budget).saved for budget in (0.0, 1.0)]
    assert [n.name for n in saved[0]] == ["x", "w"]
    assert [n.name or n.target for n in saved[1]] == ["w", "aten::le.Scalar", "aten::permute"]
    for budget in (-0.1, 1.5):
        with pytest.raises(UsageError):
            partitioner.partition(budget)


def test_a_graph_that_has_no_cut_is_refused() -> None:
    """The backward reads all results of a call at once: they can neither be saved nor computed again."""
    x, tangent = given("x"), given("tangent")
    pair = node("aten::sort", x, of=(FORM, FORM))
    out = node(GETITEM, pair, 0)
    grad = node("aten::cat", (tangent, pair))
    with pytest.raises(StaticmemError, match="cannot be cut"):
        partition(joint([x, tangent, pair, out, grad], [out, grad]))


def test_the_cut_nearest_the_sink_is_taken() -> None:
    """Two edges of one capacity in a row: the second is cut. Nothing flows to 5 and 6: what they lead to decides."""
    edges = {(SOURCE, 4): 7, (4, 3): UNLIMITED, (3, SINK): 7, (5, 2): 5, (2, SINK): 9, (6, 3): 2}
    assert sink_side(edges) == {SINK, 2, 5}
    assert sink_side({(SOURCE, 3): 6, (3, 2): UNLIMITED, (2, SINK): 7}) == {SINK, 2, 3}


def test_both_solvers_take_the_same_cut() -> None:
    for seed in range(200):
        random = Random(seed)
        count = random.randrange(3, 12)
        edges = {(SOURCE, count): random.randrange(1, 9), (2, SINK): random.randrange(1, 9)}
        for start in range(3, count + 1):
            for _ in range(random.randrange(1, 4)):
                edges[start, random.randrange(1, start)] = random.choice([1, 1, 2, 3, 5, UNLIMITED])
            if random.random() < 0.4:
                edges[SOURCE, start] = random.randrange(1, 9)
        edges = {edge: 4 if edge[1] == SINK and capacity == UNLIMITED else capacity for edge, capacity in edges.items()}
        listed = tuple((start, end, capacity) for (start, end), capacity in edges.items())
        assert solve_small(listed) == solve_large(listed)


def test_the_knapsack_takes_the_most_valuable_that_fit() -> None:
    assert knapsack([5, 4, 6, 3], [10, 40, 30, 50], 10) == [False, True, False, True]
    assert knapsack([0, 3], [1, 1], 2) == [True, False]
    assert knapsack([1, 1], [1e9, 1], 5) == [True, False]  # in 32 bits 1 more is no more


def test_times_are_flops() -> None:
    x, w = given("x", form(4, 16)), given("w", form(16, 32))
    assert runtime(node("aten::mm", x, w, of=form(4, 32))) == 2 * 4 * 16 * 32
    assert runtime(node("aten::addmm", given("b", form(32)), x, w, of=form(4, 32))) == 2 * 4 * 16 * 32
    image, kernel = given("image", form(2, 3, 8, 8)), given("kernel", form(6, 3, 3, 3))
    args = (image, kernel, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    assert runtime(node("aten::convolution", *args, of=form(2, 6, 6, 6))) == 2 * 2 * 6 * 6 * 6 * 3 * 3 * 3
    q, k = given("q", form(2, 4, 8, 16)), given("k", form(2, 4, 8, 16))
    attention = node("aten::_scaled_dot_product_flash_attention", q, k, k, of=(form(2, 4, 8, 16),))
    assert runtime(attention) == 2 * (2 * 4 * 8 * 8 * 16) * 2
    assert runtime(node("aten::relu", x)) == 1
