"""The order in which a model's tensors come to the device: `module.to(device)`.

Source: `Module._apply` in torch/nn/modules/module.py: children first, in order of registration, then the module's own
parameters, then its own buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

from staticmem.eager.trace import Buffer


class _Module:
    __slots__ = ("buffers", "children", "parameters")

    def __init__(self) -> None:
        self.children: dict[str, _Module] = {}
        self.parameters: list[Buffer] = []
        self.buffers: list[Buffer] = []


def model_to_order(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Parameters and buffers in the order of `model.to(device)`, from their order of registration and their names.

    A child module without parameters is taken to be registered behind those that have some.
    """
    root = _Module()
    known = {"": root}
    for buffer in sorted(buffers, key=lambda b: b.category != "parameter"):  # parameters tell the order of modules
        path = buffer.name.rpartition(".")[0]
        module = known.get(path) or _added(path, known)
        (module.parameters if buffer.category == "parameter" else module.buffers).append(buffer)
    order: list[Buffer] = []
    stack: list[tuple[_Module, bool]] = [(root, False)]
    while stack:
        module, children_done = stack.pop()
        if children_done:
            order += module.parameters
            order += module.buffers
        else:
            stack.append((module, True))
            stack.extend((child, False) for child in reversed(module.children.values()))
    return order


def _added(path: str, known: dict[str, _Module]) -> _Module:
    """A new module, in those around it, which may be new too."""
    found = known[path] = _Module()
    inner = found
    while path:
        path, _, name = path.rpartition(".")
        outer = known.get(path)
        if outer is not None:
            outer.children[name] = inner
            break
        outer = known[path] = _Module()
        outer.children[name] = inner
        inner = outer
    return found
