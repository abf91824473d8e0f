"""What holds of every plan, over random graphs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.plan import Plan
from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.tracing.nodes import PLACEHOLDER, Node

SIZE = 48


def node(target: str, *args: object) -> Node:
    return Node(target, args, form_of((SIZE, SIZE), (SIZE, 1), dtypes.float32))


@st.composite
def graphs(draw: st.DrawFn) -> NodeGraph:
    """Products, sums, views, reductions and concatenations of square matrices, in any mixture."""
    square = form_of((SIZE, SIZE), contiguous_strides((SIZE, SIZE)), dtypes.float32)
    nodes = [Node(PLACEHOLDER, (), square, name=f"x{i}") for i in range(draw(st.integers(1, 3)))]
    values = list(nodes)
    for _ in range(draw(st.integers(1, 16))):
        one, other = (values[draw(st.integers(max(0, len(values) - 6), len(values) - 1))] for _ in range(2))
        kind = draw(st.sampled_from(["relu", "add", "mm", "permute", "sum", "cat", "attention", "scatter"]))
        if kind == "relu":
            made = [node("aten::relu", one)]
        elif kind in ("add", "mm"):
            made = [node("aten::add.Tensor" if kind == "add" else "aten::mm", one, other)]
        elif kind == "permute":
            made = [node("aten::permute", one, (1, 0))]
        elif kind == "sum":
            row = Node("aten::sum.dim_IntList", (one, (0,), True), form_of((1, SIZE), (SIZE, 1), dtypes.float32))
            made = [row, node("aten::mul.Tensor", other, row)]
        elif kind == "cat":
            whole = Node("aten::cat", ((one, other), 0), form_of((2 * SIZE, SIZE), (SIZE, 1), dtypes.float32))
            made = [whole, node("aten::slice.Tensor", whole, 0, SIZE // 2, SIZE // 2 + SIZE)]
        elif kind == "attention":
            pair = Node("aten::unknown_pair", (one, other), (square, square))
            made = [pair, Node("operator::getitem", (pair, draw(st.integers(0, 1))), square)]
        else:
            index = Node("aten::full", ((SIZE, SIZE), 0), form_of((SIZE, SIZE), (SIZE, 1), dtypes.int64))
            made = [index, node("aten::scatter_add", one, 0, index, other)]
        nodes += made
        values.append(made[-1])
    count = draw(st.integers(1, 3))
    return NodeGraph(tuple(nodes), tuple(values[-count:]))


def check(made: Plan) -> None:
    alive: set[int] = set(range(made.inputs))
    freed: set[int] = set()
    for step in made.steps:
        for number in step.allocates:
            assert number >= made.inputs, "inputs are not allocated"
            assert number not in alive, "a storage is allocated once"
            assert number not in freed
            alive.add(number)
        for number in step.frees:
            assert number in alive, "what is freed is there, and freed once"
            alive.remove(number)
            freed.add(number)
    kept = {output.storage for output in made.outputs if output is not None}
    assert kept <= alive, "outputs stay"
    assert {number for number in alive if number >= made.inputs} <= kept, "all else goes"
    assert len({number for step in made.steps for number in step.allocates}) == len(made.buffers)
    for output in made.outputs:
        if output is not None and output.storage >= made.inputs:
            assert output.form.nbytes <= made.buffers[output.storage - made.inputs].form.nbytes


@settings(max_examples=60, deadline=None)
@given(graphs(), st.booleans())
def test_plans_are_sound(graph: NodeGraph, backward: bool) -> None:
    inputs = graph.placeholders
    check(plan(graph, backward=backward, inference=not backward, donated=inputs[:1] if backward else ()))
