"""Parameters without gradients: `requires_grad_(False)` for those whose name matches a pattern.

Backward then computes only what leads to a parameter that still trains: a layer before the first of them saves nothing,
a frozen layer after it still passes gradients on, but makes none for its own weights (LoRA's base model).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from staticmem.graph.ir import Graph, Note, Parameter


def freeze(graph: Graph, pattern: str, order: Sequence[Parameter]) -> tuple[Graph, list[Note]]:
    """The graph with `trainable` False where `pattern` is found in a name of `Module.named_parameters()`.

    A parameter with several names (tied weights) has the first of them there; `order` is the model's.
    """
    storages = {p.value.name: p.alias_of or p.value.name for p in graph.parameters}
    names: dict[str, str] = {}  # of a storage: the first name
    for p in order:
        names.setdefault(storages.get(p.value.name, p.value.name), p.fqn)
    found = re.compile(pattern)
    frozen = {storage for storage, name in names.items() if found.search(name)}
    if not frozen:
        text = f"--freeze '{pattern}' matches no parameter: everything is trained"
        return graph, [Note("warning", "SM310", text)]
    parameters = tuple(
        replace(p, trainable=False) if (p.alias_of or p.value.name) in frozen else p for p in graph.parameters
    )
    return replace(graph, parameters=parameters), []
