"""Merging of equal nodes, against PyTorch's `fx_graph_cse`, and by hand where 2.15 differs from 2.13."""

from __future__ import annotations

import math

import pytest

from staticmem.compiler.graphs import JointGraph
from staticmem.compiler.partition.cse import merged
from staticmem.eager.strides import form_of
from staticmem.ir import dtypes
from staticmem.tracing.nodes import PLACEHOLDER, Node

FORM = form_of((4, 4), (4, 1), dtypes.float32)


def node(target: str, *args: object) -> Node:
    return Node(target, args, FORM)


def joint(nodes: list[Node], outputs: list[Node], forward_outputs: int) -> JointGraph:
    primals = tuple(n for n in nodes if n.target == PLACEHOLDER)
    return JointGraph(tuple(nodes), tuple(outputs), forward_outputs, primals)


@pytest.mark.torch
def test_random_graphs_are_merged_as_pytorch_merges_them() -> None:
    """All outputs are the forward's: then 2.13 and 2.15 do the same."""
    pytest.importorskip("torch")
    from random_joints import joint_module
    from real_partitions import joint_of
    from torch._functorch.compile_utils import fx_graph_cse

    fewer = 0
    for seed in range(60):
        module, _, _ = joint_module(seed)
        before, _ = joint_of(module, len(module.graph.output_node().args[0]))
        module.graph.eliminate_dead_code()
        alive = len(module.graph.nodes)
        theirs = [str(n.target) for n in fx_graph_cse(module.graph).nodes if n.op != "output"]
        mine = [n.name or n.target for n in merged(before).nodes]
        assert len(mine) == len(theirs)
        for ours, real in zip(mine, theirs, strict=True):
            assert ours.replace("::", ".").split(".")[:2] == real.split(".")[:2] or "getitem" in real
        fewer += alive - 1 - len(theirs)
    assert fewer > 5  # the graphs have something to merge


def test_a_node_for_the_gradients_is_not_merged_with_one_for_the_outputs() -> None:
    """`partition_key` of 2.15. PyTorch 2.13 merges them, and may save the result for the backward."""
    x = Node(PLACEHOLDER, (), FORM, name="x")
    first, second, third = (node("aten::relu", x) for _ in range(3))
    shown, gradient, other = node("aten::neg", first), node("aten::exp", second), node("aten::sin", third)
    graph = merged(joint([x, first, second, third, shown, gradient, other], [shown, gradient, other], 1))
    assert [n.target for n in graph.nodes].count("aten::relu") == 2


def test_numbers_merge_with_their_equals_alone() -> None:
    x = Node(PLACEHOLDER, (), FORM, name="x")
    scalars = [1, 1.0, True, 0.0, -0.0, math.nan, math.nan, 1, 0.0]
    calls = [node("aten::mul.Scalar", x, scalar) for scalar in scalars]
    total = node("aten::cat", tuple(calls))
    graph = merged(joint([x, *calls, total], [total], 1))
    assert [n.target for n in graph.nodes].count("aten::mul.Scalar") == 6  # 1, 1.0, True, 0.0, -0.0, nan


SAME_HASH = [
    ((-2, -1, -2, -1), [-2, -1, -1]),
    ((-1, -2, -1, 0, 0), [-1, -2, 0]),
    ((-2.0, -1.0, -1.0), [-2.0, -1.0, -1.0]),
]


@pytest.mark.parametrize(("numbers", "kept"), SAME_HASH)
def test_numbers_of_one_hash(numbers: tuple[float, ...], kept: list[float]) -> None:
    """Python's hash of -1 is that of -2: the first of them merges with its equals, the other with none."""
    x = Node(PLACEHOLDER, (), FORM, name="x")
    calls = [node("aten::mul.Scalar", x, number) for number in numbers]
    total = node("aten::cat", tuple(calls))
    graph = merged(joint([x, *calls, total], [total], 1))
    assert [n.args[1] for n in graph.nodes if n.target == "aten::mul.Scalar"] == kept


@pytest.mark.torch
@pytest.mark.parametrize(("numbers", "kept"), SAME_HASH)
def test_pytorch_keeps_as_many_of_one_hash(numbers: tuple[float, ...], kept: list[float]) -> None:
    torch = pytest.importorskip("torch")
    from torch._functorch.compile_utils import fx_graph_cse

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(torch.ops.aten.mul.Scalar, (x, number)) for number in numbers])
    assert [n.args[1] for n in fx_graph_cse(graph).nodes if n.op == "call_function"] == kept


def test_what_shares_its_storage_with_an_output_stays_separate() -> None:
    x = Node(PLACEHOLDER, (), FORM, name="x")
    first, second = node("aten::relu", x), node("aten::relu", x)
    view = node("aten::permute", second, (1, 0))
    graph = merged(joint([x, first, second, view], [first, view], 2))
    assert [n.target for n in graph.nodes].count("aten::relu") == 2


def test_random_ops_stay_separate_and_dead_ones_go() -> None:
    x = Node(PLACEHOLDER, (), FORM, name="x")
    first, second, dead = node("aten::rand_like", x), node("aten::rand_like", x), node("aten::rand_like", x)
    total = node("aten::add.Tensor", first, second)
    graph = merged(joint([x, first, second, dead, total], [total], 1))
    assert list(graph.nodes) == [x, first, second, total]


def test_a_write_is_kept_and_nothing_is_merged_across_it() -> None:
    x, state = Node(PLACEHOLDER, (), FORM, name="x"), Node(PLACEHOLDER, (), FORM, name="state")
    first = node("aten::relu", x)
    write = node("aten::copy_", state, first)
    second = node("aten::relu", x)
    total = node("aten::neg", second)
    graph = merged(joint([x, state, first, write, second, total], [total], 1))
    assert list(graph.nodes) == [x, state, first, write, second, total]
