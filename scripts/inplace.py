"""Makes staticmem/recover/inplace.json from torch.export archives in training mode.

    python scripts/inplace.py "VERSIONS" EXPORT.pt2... > staticmem/recover/inplace.json

For every class of torchvision and timm: which activations and additions in it ran in place. Places whose
exports differ are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from staticmem.analysis.request import Request
from staticmem.analysis.study import Study
from staticmem.errors import StaticmemError
from staticmem.graph.ir import Graph, Op
from staticmem.recover.inplace import CANDIDATES, owner_and_place

Seen = dict[str, dict[str, set[bool]]]


def counts_batches(op: Op) -> bool:
    """`num_batches_tracked.add_(1)`: what an ONNX export does not have."""
    return op.base.startswith("aten::add") and op.modules[-1].cls.rpartition(".")[2].startswith("BatchNorm")


def collect(graph: Graph, seen: Seen) -> None:
    """Adds what one export shows."""
    for op in graph.ops:
        if op.base.rstrip("_") not in CANDIDATES or (op.modules and counts_batches(op)):
            continue
        found = owner_and_place(op)
        if found is not None:
            cls, place = found
            seen.setdefault(cls, {}).setdefault(place, set()).add(op.base.endswith("_"))


def table(seen: Seen) -> dict[str, dict[str, bool]]:
    """Places that are always in place, or never, in order."""
    made = {cls: {p: True in v for p, v in sorted(seen[cls].items()) if len(v) == 1} for cls in sorted(seen)}
    return {cls: places for cls, places in made.items() if places}


def main(versions: str, paths: Iterable[str]) -> None:
    """Writes the table to standard output; what cannot be read is named on standard error.

    `versions` names the packages whose classes these are: "timm 1.0.31, torchvision 0.29.1".
    """
    seen: Seen = {}
    for path in paths:
        try:
            collect(Study.open(path, Request(mode="train", optimizer="sgd")).graph, seen)
        except StaticmemError as error:
            print(f"{path}: {error}", file=sys.stderr)
    about = f"what classes run in place; scripts/inplace.py, from torch.export archives of {versions}"
    print(json.dumps({"about": about, "classes": table(seen)}, separators=(",", ":")).replace("},", "},\n"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
