"""Orders of kernels against the plain text of torch/_inductor/memory.py (PyTorch 2.15), over random graphs."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.inductor import schedule_of
from staticmem.compiler.inductor.order import Sizes, breadth_first, depth_first, least_peak_first
from staticmem.eager.strides import form_of
from staticmem.ir import dtypes
from staticmem.tracing.nodes import PLACEHOLDER, Node


class Graph:
    """What `Sizes` has of a graph: each node writes one buffer, with the number of the node."""

    def __init__(self, edges: list[list[int]], sizes: list[int], inputs: list[tuple[int, list[int]]], out: int) -> None:
        count = len(sizes)
        self.nodes = list(range(count))
        self.before = [sorted({e % at for e in found}) if at else [] for at, found in enumerate(edges)]
        self.after: list[list[int]] = [[] for _ in range(count)]
        for at, found in enumerate(self.before):
            for wanted in found:
                self.after[wanted].append(at)
        self.outputs = [[at] for at in range(count)]
        self.alloc = dict(enumerate(sizes))
        self.free = dict(self.alloc)
        self.readers = {at: list(self.after[at]) for at in range(count)}
        self.held = [list(found) for found in self.before]
        self.inputs = set()
        for at, (size, readers) in enumerate(inputs):
            number = -1 - at
            self.inputs.add(number)
            self.free[number] = size
            self.readers[number] = sorted({reader % count for reader in readers})
            for reader in self.readers[number]:
                self.held[reader].append(number)
        self.returned = {at for at in range(count) if not self.after[at] or at == out % count}
        self.size = sizes


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(1, 14))
    edges = [draw(st.lists(st.integers(0, 30), max_size=3)) for _ in range(count)]
    sizes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    inputs = draw(
        st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 30), min_size=1, max_size=3)), max_size=3)
    )
    return Graph(edges, sizes, inputs, draw(st.integers(0, 30)))


def least_peak_first_reference(graph: Graph) -> list[int]:
    """`topological_sort_lpmf`, in which each choice looks at all that is ready."""
    indegree = [len(found) for found in graph.before]
    outdegree = {number: len(readers) + (number in graph.returned) for number, readers in graph.readers.items()}
    ready = [at for at in graph.nodes if not indegree[at]]
    live = sum(graph.free[number] for number in graph.inputs)
    peak = max(live, sum(graph.free[number] for number in graph.returned))
    gap = peak - live
    frees = [sum(graph.free[n] for n in graph.held[at] if outdegree[n] == 1) for at in graph.nodes]
    for at in graph.nodes:
        frees[at] += graph.free[at] if outdegree[at] == 0 else 0
    order = []
    while ready:
        chosen = min(
            ready, key=lambda at: (graph.size[at] if graph.size[at] > gap else 0, graph.size[at] - frees[at], at)
        )
        ready.remove(chosen)
        order.append(chosen)
        live += graph.size[chosen]
        peak = max(peak, live)
        live -= frees[chosen]
        gap = peak - live
        for then in graph.after[chosen]:
            indegree[then] -= 1
            if not indegree[then]:
                ready.append(then)
        for number in graph.held[chosen]:
            outdegree[number] -= 1
            if outdegree[number] == 1:
                for reader in graph.readers[number]:
                    frees[reader] += graph.free[number]
    return order


@settings(max_examples=150, deadline=None)
@given(random_graphs())
def test_least_peak_first(graph: Graph) -> None:
    assert least_peak_first(cast(Sizes, graph)) == least_peak_first_reference(graph)


@settings(max_examples=80, deadline=None)
@given(random_graphs())
def test_orders_are_topological(graph: Graph) -> None:
    for method in (least_peak_first, breadth_first, depth_first):
        order = method(cast(Sizes, graph))
        assert sorted(order) == graph.nodes
        place = {at: step for step, at in enumerate(order)}
        assert all(place[wanted] < place[at] for at in graph.nodes for wanted in graph.before[at])


def test_breadth_first_takes_what_waited_longest() -> None:
    """Two chains, 0 -> 2 -> 4 and 1 -> 3: by the places of what each waited for."""
    graph: Any = Graph([[], [], [0], [1], [2]], [1, 1, 1, 1, 1], [], 0)
    graph.before = [[], [], [0], [1], [2]]
    graph.after = [[2], [3], [4], [], []]
    assert breadth_first(graph) == [0, 1, 2, 3, 4]


def test_a_saved_tensor_counts_as_often_as_its_last_reader_reads_it() -> None:
    """`get_freeable_input_buf`: the elements that the loops of the last access reach, not those that there are."""
    rows = Node(PLACEHOLDER, (), form_of((8, 1), (1, 1), dtypes.float32), name="rows")
    wide = Node("aten::expand", (rows, (8, 64)), form_of((8, 64), (1, 0), dtypes.float32))
    flat = Node("aten::view", (wide, (512,)), form_of((512,), (1,), dtypes.float32))
    grad = Node(PLACEHOLDER, (), form_of((512,), (1,), dtypes.float32), name="grad")
    product = Node("aten::mul.Tensor", (grad, flat), form_of((512,), (1,), dtypes.float32))
    schedule = schedule_of(NodeGraph((rows, grad, wide, flat, product), (product,)), inference=False, backward=True)
    number = schedule.low.inputs[0].number
    assert Sizes(schedule, schedule.nodes, {number}).free[number] == 512 * 4
