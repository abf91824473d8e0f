"""Sets that minimum cuts propose, against all sets of a tree that is small enough to list them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import staticmem
from staticmem.studies.checkpoints import Module, proposals, totals

MODELS = Path(__file__).parents[2] / "models"
TREE = {
    m.path: m
    for m in (
        Module("a", "", kept=40, operations=1),  # what lies between its children
        Module("a.0", "a", kept=30, operations=20),
        Module("a.1", "a", kept=5, operations=60),
        Module("b", "", kept=0, operations=0),
        Module("b.0", "b", kept=25, operations=5),
    )
}


def _sets() -> Iterator[frozenset[str]]:
    """All sets in which a module's children are with it."""
    for count in range(len(TREE) + 1):
        for paths in combinations(TREE, count):
            chosen = frozenset(paths)
            if all(m.path in chosen for m in TREE.values() if m.parent in chosen):
                yield chosen


def _with_children(paths: tuple[str, ...]) -> frozenset[str]:
    return frozenset(m for m in TREE if any(m == path or m.startswith(f"{path}.") for path in paths))


def test_totals_have_all_that_a_module_calls() -> None:
    assert totals(TREE) == {"a": (75, 81), "a.0": (30, 20), "a.1": (5, 60), "b": (25, 5), "b.0": (25, 5)}


def test_no_set_keeps_less_for_fewer_operations() -> None:
    """Each proposal is worth most at some price, or at some price among modules that keep no more than a limit."""
    whole = totals(TREE)
    proposed = proposals(TREE)
    assert ("a", "b") in proposed
    assert ("b",) in proposed
    for paths in proposed:
        limit = max(whole[path][0] for path in paths)
        mine = _with_children(paths)
        kept, operations = (sum(getattr(TREE[m], name) for m in mine) for name in ("kept", "operations"))
        for other in _sets():
            if all(whole[m][0] <= limit for m in other):
                dropped = sum(TREE[m].kept for m in other)
                assert dropped < kept or sum(TREE[m].operations for m in other) >= operations or other == mine


def test_modules_of_all_levels_beat_the_blocks_of_one() -> None:
    """A whole layer of ResNet-50 drops what lies between its blocks too. Of blocks it takes four, which cost 8.6 %."""
    base = staticmem.analyze(MODELS / "resnet50.onnx", batch=16, optimizer="sgd").peak.live_bytes
    found = staticmem.levers(MODELS / "resnet50.onnx", batch=16, optimizer="sgd", budget=base * 3 // 4)
    row = next(row for row in found.rows if "for the budget" in row.does)
    assert row.flags == "--checkpoint layer1"
    assert row.live_bytes <= base * 3 // 4
    assert round(row.compute, 3) == 0.055
