"""What published classes run in place: staticmem/passes/inplace.json.

`class_tables.py` calls this for every model that it runs (`watch`). For every class of torchvision, timm and
transformers: which activations and additions in it ran in place. A class that does both is told apart by the classes
around it; places that differ still are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from staticmem.ir.graph import Graph, Op
from staticmem.passes.inplace import CANDIDATES, owner_and_place, owners

Seen = dict[str, dict[str, set[bool]]]


def counts_batches(op: Op) -> bool:
    """`num_batches_tracked.add_(1)`: what an ONNX export does not have."""
    return op.base.startswith("aten::add") and op.modules[-1].cls.rpartition(".")[2].startswith("BatchNorm")


def collect(graph: Graph, seen: Seen) -> None:
    """Adds what one model shows."""
    for op in graph.ops:
        if op.base.rstrip("_") not in CANDIDATES or not op.modules or counts_batches(op):
            continue
        found = owner_and_place(op)
        for key in owners(op) if found is not None else ():
            seen.setdefault(key, {}).setdefault(found[1] if found else "", set()).add(op.base.endswith("_"))


def table(seen: Mapping[str, Mapping[str, set[bool]]]) -> dict[str, dict[str, bool]]:
    """Places that are always in place, or never, in order; with classes around them only where they must be."""
    made: dict[str, dict[str, bool]] = {}
    for key in sorted(seen):
        inner = key.partition(">")[2]
        for place, ran in sorted(seen[key].items()):
            if len(ran) == 1 and (not inner or len(seen[inner][place]) > 1):
                made.setdefault(key, {})[place] = True in ran
    return made


__all__ = ["collect", "counts_batches", "table"]
