"""Parameters without gradients: `requires_grad_(False)` for those whose name matches a pattern.

Backward then computes only what leads to a parameter that still trains: a layer before the first of them saves nothing,
a frozen layer after it still passes gradients on, but makes none for its own weights (LoRA's base model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.ir.graph import Graph, Note

if TYPE_CHECKING:
    from staticmem.passes.pipeline import Asked


def thaw(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """A file in which no parameter requires a gradient was exported for inference: a training step trains them all."""
    if not graph.parameters or any(p.trainable for p in graph.parameters):
        return graph, ()
    parameters = tuple(replace(p, trainable=p.value.dtype.is_differentiable) for p in graph.parameters)
    text = "no parameter requires a gradient in the file: all are trained (--freeze says which are not)"
    return replace(graph, parameters=parameters), [Note("assumption", "SM315", text)]


def freeze(graph: Graph, asked: Asked) -> tuple[Graph, Sequence[Note]]:
    """The graph with `trainable` False where the pattern is found in a name of `Module.named_parameters()`.

    A parameter with several names (tied weights) has the first of them there: `asked.parameters` has the model's order.
    """
    pattern = asked.freeze or ""
    storages = {p.value.name: p.alias_of or p.value.name for p in graph.parameters}
    names = _tied(graph) if graph.format == "onnx" else {}
    for p in asked.parameters:
        names.setdefault(storages.get(p.value.name, p.value.name), p.fqn)
    from staticmem.passes.backtracking import searcher  # has numpy, which is not needed without

    search = searcher(pattern, names.values())
    frozen = {storage for storage, name in names.items() if search(name)}
    if not frozen:
        text = f"--freeze '{pattern}' matches no parameter: everything is trained"
        return graph, [Note("warning", "SM310", text)]
    parameters = tuple(
        replace(p, trainable=False) if (p.alias_of or p.value.name) in frozen else p for p in graph.parameters
    )
    return replace(graph, parameters=parameters), ()


def _tied(graph: Graph) -> dict[str, str]:
    """Names of weights that two modules read, by the module that reads first: an ONNX file keeps one name of them."""
    leaves = {p.value.name: p.fqn.rpartition(".") for p in graph.parameters}
    readers: dict[str, dict[str, None]] = {}
    for op in graph.ops:
        for name in op.refs():
            if name in leaves and op.modules and op.modules[-1].path:
                readers.setdefault(name, {})[op.modules[-1].path] = None
    return {
        name: f"{next(iter(paths))}.{leaves[name][2]}"
        for name, paths in readers.items()
        if len(paths) > 1 and leaves[name][0] in paths
    }
