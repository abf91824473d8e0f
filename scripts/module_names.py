"""Makes staticmem/training/module_names.json from exports with stack traces.

    python scripts/module_names.py "VERSIONS" EXPORT.pt2... > staticmem/training/module_names.json

For every class of torchvision, timm and transformers: the variable that takes each result of its `forward`, as the
source lines in the stack traces name it. Where calls of a class differ, the entry is null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from staticmem.analysis.request import Request
from staticmem.analysis.study import Study
from staticmem.errors import StaticmemError
from staticmem.graph.ir import Graph
from staticmem.recover.export_only import clean
from staticmem.training.hidden_frames import hidden_results
from staticmem.training.module_names import results
from staticmem.training.source_locals import names_taken

LIBRARIES = ("torchvision.", "timm.", "transformers.")
Seen = dict[str, dict[str, list[str | None]]]


def _holds(name: str) -> int:
    """How long a name holds: nothing, a variable, an attribute, a list, the caller's list."""
    return (name != "") + name.startswith("self.") + 2 * name.endswith("[]") + name.startswith("^")


def collect(graph: Graph, seen: Seen) -> None:
    """Adds what one export shows."""
    names: dict[tuple[int, str], str] = {}
    for level, name, value in names_taken(graph):
        name = "^[]" if name.startswith("^") else name  # callers differ in what they call it
        names[level, value] = max(names.get((level, value), ""), name, key=_holds)
    hidden = hidden_results(graph)
    for result in results(graph):
        if not result.cls.startswith(LIBRARIES) or len(graph.ops[result.index].stack) < len(result.call):
            continue
        at = (len(result.call) - 1, result.value)
        name = None if (result.value, at[0]) in hidden else names.get(at, "")
        found = seen.setdefault(result.cls, {}).setdefault(result.producer, [])
        if result.nth == len(found):
            found.append(name)
        elif result.nth < len(found) and found[result.nth] != name:
            found[result.nth] = None


def entry(producer: str, names: list[str | None]) -> str | list[str | None] | None:
    """One name where all results have it (of an op only if it was seen more than once), else a list; None: unknown."""
    if set(names) == {None}:
        return None
    single = names[0] if len(set(names)) == 1 else None
    return single if single is not None and (len(names) > 1 or "::" not in producer) else names


def table(seen: Seen) -> dict[str, dict[str, str | list[str | None]]]:
    """The classes in order, without entries that say nothing."""
    made = {c: {p: e for p, n in sorted(seen[c].items()) if (e := entry(p, n)) is not None} for c in sorted(seen)}
    return {cls: found for cls, found in made.items() if any(e for e in found.values())}


def main(versions: str, paths: Iterable[str]) -> None:
    """Writes the table to standard output; what cannot be read is named on standard error.

    `versions` names the packages whose classes these are: "timm 1.0.31, torchvision 0.29.1".
    """
    seen: Seen = {}
    for path in paths:
        try:
            graph = clean(Study.open(path, Request(mode="infer")).graph, False)
        except StaticmemError as error:
            print(f"{path}: {error}", file=sys.stderr)
            continue
        collect(graph, seen)
    about = (
        f"names that forward gives results; scripts/module_names.py, from stack traces of torch.export of {versions}"
    )
    print(
        json.dumps({"about": about, "classes": table(seen)}, indent=None, separators=(",", ":")).replace("},", "},\n")
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
