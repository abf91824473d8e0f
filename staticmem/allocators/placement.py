"""The order in which a model's tensors come to the device: `module.to(device)`.

Source: `Module._apply` in torch/nn/modules/module.py: children first, in order of registration, then the module's own
parameters, then its own buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from staticmem.eager.trace import Buffer


@dataclass(slots=True)
class _Module:
    children: dict[str, _Module] = field(default_factory=dict)
    parameters: list[Buffer] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)


def model_to_order(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Parameters and buffers in the order of `model.to(device)`, from their order of registration and their names.

    A child module without parameters is taken to be registered behind those that have some.
    """
    root = _Module()
    for buffer in sorted(buffers, key=lambda b: b.category != "parameter"):  # parameters tell the order of modules
        *path, _ = buffer.name.split(".")
        module = root
        for part in path:
            module = module.children.setdefault(part, _Module())
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
