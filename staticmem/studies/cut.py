"""Sets of modules to checkpoint, proposed by minimum cuts.

A checkpoint drops what lies within its module until backward, and runs its operations again: dropping is worth
`price` operations a byte. A module lies within its parent, and a value within the innermost module that has all of its
users. The set that is worth most at a price is a maximum closure over the modules (Picard, Management Science 22, 1976;
`networkx.minimum_cut`). PyTorch's partitioner cuts values in the same way
(torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`); here they are bound to modules, as
`torch.utils.checkpoint` takes functions. What a module keeps is there again while it runs again, so that modules which
keep more than a limit are left whole; each limit gives other sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from staticmem.ir.graph import Graph
from staticmem.liveness import Lifetimes

LIMITS, PRICES = 8, 12  # how many of each are tried: a cut of a hundred modules takes some milliseconds


@dataclass
class Module:
    """A module that calls others. `kept` is what lies within it and in none of its children, in bytes, at the end of
    the forward; `operations` are those of its forward outside of its children."""

    path: str
    parent: str
    kept: int = 0
    operations: int = 0


def modules_of(graph: Graph, lifetimes: Lifetimes, operations: Sequence[int]) -> dict[str, Module]:
    """The modules that call others, parents first; `operations` has those of each op."""
    chains = [[frame.path for frame in op.modules if frame.path] for op in graph.ops]
    calls = {path for chain in chains for path in chain[:-1]}
    chains = [[path for path in chain if path in calls] for chain in chains]
    modules: dict[str, Module] = {}
    for chain, count in zip(chains, operations, strict=True):
        for parent, path in zip(["", *chain], chain, strict=False):
            modules.setdefault(path, Module(path, parent))
        if chain:
            modules[chain[-1]].operations += count
    within = list(chains)
    producers = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    for index, op in enumerate(graph.ops):
        for name in op.refs():
            if name in producers:
                producer = producers[name]
                within[producer] = _common(within[producer], chains[index])
    for name in graph.outputs:
        if name in producers:
            within[producers[name]] = []
    trace = lifetimes.trace
    for buffer in lifetimes.alive(trace.marks["forward_end"] - 1):
        producer = trace.kernels[buffer.kernel].op
        if buffer.category == "activation" and producer >= 0 and within[producer]:
            modules[within[producer][-1]].kept += buffer.size
    return modules


def _common(one: list[str], other: list[str]) -> list[str]:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return one[:shared]


def totals(modules: dict[str, Module]) -> dict[str, tuple[int, int]]:
    """Bytes and operations of each module with all that it calls."""
    whole = {path: (module.kept, module.operations) for path, module in modules.items()}
    for path in reversed(modules):
        parent = modules[path].parent
        if parent:
            whole[parent] = whole[parent][0] + whole[path][0], whole[parent][1] + whole[path][1]
    return whole


def proposals(modules: dict[str, Module]) -> list[tuple[str, ...]]:
    """Sets of modules, those first that run the fewest operations again."""
    whole = totals(modules)
    ratios = {Fraction(operations, kept) for kept, operations in whole.values() if kept}
    limits, prices = _spread({kept for kept, _ in whole.values() if kept}, LIMITS), _spread(ratios, PRICES)
    sets = {tuple(sorted(_covered(modules, whole, limit, price))) for limit in limits for price in prices}
    return sorted(filter(None, sets), key=lambda paths: (sum(whole[path][1] for path in paths), paths))


def _spread(values: set[int] | set[Fraction], count: int) -> list[int | Fraction]:
    """At most so many of the values, in even steps from the least to the most."""
    ordered: list[int | Fraction] = sorted(values)
    last = len(ordered) - 1
    return ordered if last < count else [ordered[last * i // (count - 1)] for i in range(count)]


def _covered(
    modules: Mapping[str, Module], whole: Mapping[str, tuple[int, int]], limit: int | Fraction, price: int | Fraction
) -> Iterator[str]:
    """The outermost modules of the set that is worth most at a price."""
    from networkx import DiGraph, minimum_cut  # only a budget asks for it

    small = {path: module for path, module in modules.items() if whole[path][0] <= limit}
    flow = DiGraph()
    flow.add_nodes_from(("dropped", "kept"))
    for path, module in small.items():
        flow.add_edge("dropped", (path,), capacity=module.kept * price.numerator)
        flow.add_edge((path,), "kept", capacity=module.operations * price.denominator)
        if module.parent in small:
            flow.add_edge((module.parent,), (path,))  # without a capacity: to drop a parent is to drop its children
    _, (dropped, _) = minimum_cut(flow, "dropped", "kept")
    return (path for path, module in small.items() if (path,) in dropped and (module.parent,) not in dropped)
