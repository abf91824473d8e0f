"""Which axes of an image are its height and width.

ONNX computes with channels first. Exports of TensorFlow and Keras keep inputs with channels last and transpose them,
unless an optimizer merged that into something else: with one channel the transpose is a Reshape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir.model_file import CHANNELS_FIRST, CHANNELS_LAST, InputSpec
from staticmem.ir.onnx_graph import Node

TO_CHANNELS_FIRST = (0, 3, 1, 2)  # a permutation of axes
CHANNELS = (1, 3, 4)  # of an image: gray, RGB, RGB with alpha or depth


def with_sides(inputs: Sequence[InputSpec], nodes: Sequence[Node]) -> tuple[InputSpec, ...]:
    """The inputs with what the graph does with them: a convolution reads channels first, and a transpose to channels
    first reads channels last. Where nothing tells, an image whose last axis alone has the size of channels may be
    either."""
    images = {spec.name for spec in inputs if spec.is_image}
    told: dict[str, tuple[int, int]] = {}
    for node in nodes:
        name = node.inputs[0] if node.inputs else ""
        if name not in images:
            continue
        if node.op == "Conv":
            told.setdefault(name, CHANNELS_FIRST)
        elif node.op == "Transpose" and node.attrs.get("perm") == TO_CHANNELS_FIRST:
            told.setdefault(name, CHANNELS_LAST)
    return tuple([replace(spec, sides=told.get(spec.name, _by_sizes(spec))) for spec in inputs])


def _by_sizes(spec: InputSpec) -> tuple[int, int] | None:
    if not spec.is_image or spec.shape is None:
        return CHANNELS_FIRST
    looks_last = spec.shape[3] in CHANNELS and spec.shape[1] not in CHANNELS
    return None if looks_last else CHANNELS_FIRST
