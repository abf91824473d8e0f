"""Which modules to checkpoint: the blocks that a model repeats, and the set that costs least under a memory budget.

The blocks are searched greedily: in the order of the bytes that they keep for backward to the operations that would run
again; the shortest beginning of that order that stays within the budget, by bisection. Where even all blocks are
not enough, groups of 2, 3, ... that share a checkpoint are tried. Then come modules of all levels, in the sets that
minimum cuts propose: the first within the budget is taken, if it costs less than the blocks. Of what is taken
each module is left out again, the most expensive first, where the step stays within the budget without it. Every figure
is that of a step that was run. The result is not proven to be the least, and says so in its note.

A checkpoint drops what lies within its module until backward, and runs its operations again: in a cut, dropping is
worth `price` operations a byte. A module lies within its parent, and a value within the innermost module that has all
of its users. The set that is worth most at a price is a maximum closure over the modules (Picard, Management Science
22, 1976; `networkx.minimum_cut`). PyTorch's partitioner cuts values in the same way
(torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`); here they are bound to modules, as
`torch.utils.checkpoint` takes functions. What a module keeps is there again while it runs again, so that modules which
keep more than a limit are left whole; each limit gives other sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from staticmem.ir.graph import Frame, Graph
from staticmem.liveness import Lifetimes
from staticmem.report.sweep import SAME, LeverRow, need
from staticmem.scenario.request import as_flags
from staticmem.studies.trials import Lever, Trials

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


SHARE = 0.3  # of the forward's ops: blocks with fewer of them keep too little to be worth a checkpoint
MANY = 6  # blocks that are enough to choose among


@dataclass(frozen=True)
class Blocks:
    """Blocks that are called by one name: `selector` is what `--checkpoint` takes, `paths` the modules it names.

    `row` is the most of them in one parent, which can share checkpoints.
    """

    selector: str
    paths: tuple[str, ...]
    row: int


def repeated_blocks(graph: Graph) -> list[Blocks]:
    """Classes of modules that the forward calls more than once, that contain others, and that have much of its ops;
    outermost first.

    Modules of torch.nn itself are left out (a Sequential is how others are written), but for its own encoder layers.
    Where a file has no classes, blocks are siblings that are numbered (`layers.0`, `layers.1`).
    """
    frames: dict[str, tuple[Frame, int]] = {}
    parents: set[str] = set()
    for op in graph.ops:
        for depth, frame in enumerate(op.modules):
            frames.setdefault(frame.path, (frame, depth))
            if depth:
                parents.add(op.modules[depth - 1].path)
    inner = {path: pair for path, pair in frames.items() if path in parents and path}
    named = {path: frame.cls.rpartition(".")[2] for path, (frame, _) in inner.items() if _is_own(frame.cls)}
    selectors = named or {path: _numbered(path) for path in inner if _numbered(path)}
    ops = Counter(name for op in graph.ops for name in {selectors.get(frame.path, "") for frame in op.modules})
    by_depth: list[tuple[float, Blocks]] = []
    for name in dict.fromkeys(selectors.values()):
        paths = tuple(path for path, other in selectors.items() if other == name)
        if len(paths) >= 2 and ops[name] >= SHARE * len(graph.ops):
            row = max(Counter(path.rpartition(".")[0] for path in paths).values())
            by_depth.append((sum(inner[path][1] for path in paths) / len(paths), Blocks(name, paths, row)))
    return [blocks for _, blocks in sorted(by_depth, key=lambda pair: (pair[0], pair[1].selector))]


def blocks_to_choose(graph: Graph) -> Blocks | None:
    """The outermost blocks that are many enough to choose among, else the outermost."""
    candidates = repeated_blocks(graph)
    outermost = candidates[0] if candidates else None
    return next((blocks for blocks in candidates if len(blocks.paths) >= MANY), outermost)


_BLOCKS_OF_TORCH = ("TransformerEncoderLayer", "TransformerDecoderLayer")


def _is_own(cls: str) -> bool:
    short = cls.rpartition(".")[2]
    return bool(cls) and (not cls.startswith("torch.nn.") or short in _BLOCKS_OF_TORCH)


def _numbered(path: str) -> str:
    parent, _, last = path.rpartition(".")
    return f"{parent}.*" if parent and last.isdigit() else ""


def last_layer(graph: Graph) -> str:
    """The path of the last module with trained parameters that the forward runs; empty where there is none."""
    owners = {p.value.name: p.fqn.rpartition(".")[0] for p in graph.parameters if p.trainable}
    for op in reversed(graph.ops):
        for name in op.refs():
            if owners.get(name):
                return owners[name]
    return ""


# -- under a budget ----------------------------------------------------------------------------------------------

MOST_RUNS = 64  # steps of the search among blocks, and as many of the search among modules


def best_set(trials: Trials, budget: int) -> LeverRow | None:
    """The row of the best set; None where no set is needed, or none is enough."""
    request = trials.study.request
    if need(trials.base) <= budget or request.checkpoint or request.checkpoint_segments:
        return None
    return _Search(trials, budget).run()


class _Search:
    def __init__(self, trials: Trials, budget: int) -> None:
        self.trials, self.budget = trials, budget
        one = trials.ask({})
        self.graph = one.result.graph
        self.modules = modules_of(self.graph, one.lifetimes, trials.counter(True).of_op)
        self.whole = totals(self.modules)  # bytes and operations
        self.blocks = blocks_to_choose(self.graph)

    def run(self) -> LeverRow | None:
        best = self._try_blocks() if self.blocks is not None else None
        return self._try_modules(best) or best

    def _try_blocks(self) -> LeverRow | None:
        assert self.blocks is not None
        paths = sorted(self.blocks.paths, key=lambda path: (-self._worth(path), path))
        if not self._fits(paths):
            return self._try_groups(self.blocks)
        low, high = 0, len(paths)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(paths[:middle]) else (middle, high)
        return self._row(self._pruned(paths[:high]), f"of {len(paths)} blocks", "a greedy search")

    def _worth(self, path: str) -> float:
        kept, operations = self.whole[path]
        return kept / max(operations, 1)

    def _try_groups(self, blocks: Blocks) -> LeverRow | None:
        """All blocks, several to a checkpoint: less is kept, and more is alive while a group runs again."""
        for every in range(2, min(blocks.row, 9)):
            options = {"checkpoint": (blocks.selector,), "checkpoint_every": every}
            does, note = f"checkpoint all blocks, {every} together, for the budget", _note("a greedy search")
            row = self.trials.try_out(Lever(does, options, SAME, note))
            if need(row) <= self.budget:
                return row
        return None

    def _try_modules(self, best: LeverRow | None) -> LeverRow | None:
        """The row of the first proposal within the budget, if it costs less than `best`."""
        end = self.trials.runs + MOST_RUNS
        for paths in proposals(self.modules):
            if self.trials.runs >= end:
                break
            if self._fits(paths):
                row = self._row(self._pruned(list(paths)), f"of {len(self.modules)} modules", "minimum cuts")
                return row if best is None or row.operations < best.operations else None
        return None

    def _pruned(self, paths: list[str]) -> list[str]:
        """Without those that the budget does not ask for, the most expensive first."""
        end = self.trials.runs + MOST_RUNS
        for path in sorted(paths, key=lambda path: -self.whole[path][1]):
            fewer = [other for other in paths if other != path]
            if fewer and self.trials.runs < end and self._fits(fewer):
                paths = fewer
        return paths

    def _fits(self, paths: Sequence[str]) -> bool:
        return need(self._row(paths, "", "")) <= self.budget

    def _row(self, paths: Sequence[str], of: str, search: str) -> LeverRow:
        does = f"checkpoint {len(paths)} {of}, for the budget"
        options = {"checkpoint": tuple(sorted(paths))}  # whatever their order it is one step, which runs once
        row = self.trials.try_out(Lever(does, options, SAME, _note(search)))
        return replace(row, flags=as_flags({"checkpoint": tuple(paths)}))


def _note(search: str) -> str:
    return f"the least compute within the budget that {search} found; every set was analysed in full"
