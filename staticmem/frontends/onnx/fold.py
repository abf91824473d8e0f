"""Contents of small integer tensors (shapes, sizes, indices) and the sizes that onnx's inference leaves open."""

from __future__ import annotations

from typing import Any

from staticmem.recover.nodes import Net


class Folder:
    """Evaluates size computations of a bound graph, in order."""

    def __init__(self, net: Net, model: Any) -> None:
        self.net, self.model = net, model

    def run(self) -> None:
        """Fills `net.consts` and the holes in `net.values`."""
