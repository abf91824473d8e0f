"""Other sizes than the file's own: a static export has them in constants of Reshape, Expand and the like.

Sizes are inferred node by node. Where a constant has an old size in it, the constant follows: the input's axes and the
output's are matched in blocks of equal products, and what the changed axes became is scaled. Whatever cannot be matched
is an error that names the node, because a size that was guessed wrong would change memory silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from staticmem.errors import DimensionError
from staticmem.frontends.onnx.fold import Folder
from staticmem.ir.graph import Value
from staticmem.ir.onnx_graph import Net, Node

_FIXED = {"Reshape": 1, "Expand": 1, "Resize": 3, "ConstantOfShape": 0}

Sizes = tuple[int, ...]


class Rebinder(Folder):
    """Infers sizes at other dimensions than the file's. `old` is the graph at the file's own."""

    def __init__(self, net: Net, model: Any, old: Net, changed: str, keep_ones: bool) -> None:
        super().__init__(net, model)
        self.old, self.before = old.values, old.consts
        self.changed, self.keep_ones = changed, keep_ones
        self.followed = 0
        self.recurrent = any(node.op in ("LSTM", "GRU", "RNN") for node in net.nodes)
        self.nodes: list[Node] = []
        self.axes = {
            was: size
            for name in net.inputs
            if name in net.values and name in self.old
            for was, size in zip(self.old[name].shape or (), net.values[name].shape or (), strict=False)
            if was != size
        }

    def run(self) -> None:
        """Fills `net.values` and `net.consts` at the new dimensions.

        Raises:
            DimensionError: a constant of the file contradicts them.
        """
        with np.errstate(all="ignore"):
            for index, node in enumerate(self.net.nodes):
                proto = self.model.graph.node[index]
                node = self._follow(node, proto)
                self.nodes.append(node)
                self.contents(node)
                self._sizes(node, proto)
                self.contents(node)
                self._check(node)
        self.net.nodes = tuple(self.nodes)

    def _check(self, node: Node) -> None:
        for name in node.outputs:
            before, now = self.old.get(name), self.net.values.get(name)
            if before is None or before.shape is None or not name:
                continue
            if now is None or now.shape is None or len(now.shape) != len(before.shape):
                raise self._error(node, "its result has no sizes then")

    def _error(self, node: Node, why: str) -> DimensionError:
        return DimensionError(
            f"{self.changed} contradicts node {node.op} '{node.name or (node.outputs or ('',))[0]}'",
            f"The export fixed sizes in the graph, and {why}.",
            "Export the model again with this dimension dynamic (dynamic_shapes, or dynamic_axes).",
            code="SM156",
        )

    def _follow(self, node: Node, proto: Any) -> Node:
        """The node with a constant that fits the new sizes."""
        position = _FIXED.get(node.op)
        if position is None or node.domain or position >= len(node.inputs):
            return node
        name = node.inputs[position]
        constant = self.net.ints(name) if name in self.net.consts else None
        output = self.old.get(node.outputs[0])
        if constant is None or output is None or output.shape is None:
            return node
        if self._computed(name) or (not output.dtype.is_floating_point and len(output.shape) < 2):
            return node  # sizes that are computed follow by themselves
        wanted = self._wanted(node, constant, output.shape)
        if wanted == constant:
            return node
        self.followed += 1
        fresh = f"{node.outputs[0]}::sizes"
        self.net.consts[fresh] = np.asarray(wanted, dtype=np.int64)
        self.net.values[fresh] = Value(fresh, self.net.values[name].dtype, (len(wanted),))
        inputs = (*node.inputs[:position], fresh, *node.inputs[position + 1 :])
        proto.input[position] = fresh
        return replace(node, inputs=inputs)

    def _computed(self, name: str) -> bool:
        """Whether a size comes from the graph itself: it is right already."""
        before = self.before.get(name)
        now = self.net.consts.get(name)
        return before is not None and now is not None and not np.array_equal(before, now)

    def _wanted(self, node: Node, constant: Sizes, output: Sizes) -> Sizes:
        if self.recurrent and node.op in ("ConstantOfShape", "Expand") and len(constant) == 3:
            # an initial state is [layers, batch, hidden]
            return (constant[0], self.axes.get(constant[1], constant[1]), constant[2])
        if node.op == "ConstantOfShape":
            return tuple(self.axes.get(c, c) if c > 1 or not self.keep_ones else c for c in constant)
        before, now = self.old.get(node.inputs[0]), self.net.values.get(node.inputs[0])
        if before is None or now is None or before.shape is None or now.shape is None:
            raise self._error(node, "the sizes of its input are not known")
        if node.op == "Resize":
            return (*now.shape[:2], *constant[2:]) if len(constant) == len(now.shape) else constant
        if node.op == "Expand":
            return self._expand(constant, before.shape, now.shape)
        if math.prod(before.shape) != math.prod(output):
            return constant
        sizes = _reshape(before.shape, now.shape, output, self.axes)
        if sizes is None:
            raise self._error(node, f"{list(constant)} does not say which of its sizes follows")
        return sizes

    def _expand(self, constant: Sizes, before: Sizes, now: Sizes) -> Sizes:
        result = list(constant)
        offset = len(constant) - len(before)
        for axis, size in enumerate(constant):
            source = axis - offset
            if source >= 0 and before[source] != now[source] and size == before[source]:
                result[axis] = now[source]
            elif size in self.axes and (source < 0 or before[source] == 1) and axis == 0:
                if size == 1 and self.keep_ones:
                    continue
                result[axis] = self.axes[size]
        return tuple(result)


def _reshape(before: Sizes, now: Sizes, output: Sizes, axes: Mapping[int, int]) -> Sizes | None:
    """The output's sizes when the input has `now` instead of `before`.

    Where a batch of 1 stands between two axes it can belong to either. Features are last and seldom take a batch in,
    then the first axis is the better one to keep.
    """
    candidates = [_blocks(before, now, output, axes, left) for left in (False, True)]
    sizes = [f for f in candidates if f is not None]
    return max(sizes, key=lambda f: (f[-1:] == output[-1:], f[:1] == output[:1]), default=None)


def _blocks(before: Sizes, now: Sizes, output: Sizes, axes: Mapping[int, int], left_ones: bool) -> Sizes | None:
    """Sizes by blocks of axes with equal products; an axis of 1 between two blocks goes to the left or right one."""
    result: list[int] = []
    i = j = 0
    while i < len(before) or j < len(output):
        start_i, start_j = i, j
        left = right = 1
        while left != right or i == start_i or j == start_j:
            if i < len(before) and (left <= right or j == len(output)):
                left *= before[i]
                i += 1
            elif j < len(output):
                right *= output[j]
                j += 1
            else:
                break
        if left != right:
            return None
        while j < len(output) and output[j] == 1 and not (i < len(before) and before[i] == 1):
            j += 1
        while left_ones and i < len(before) and before[i] == 1 and not (j < len(output) and output[j] == 1):
            i += 1
        block = _block(before[start_i:i], now[start_i:i], output[start_j:j], axes)
        if block is None:
            return None
        result.extend(block)
    return tuple(result)


def _block(before: Sizes, now: Sizes, output: Sizes, axes: Mapping[int, int]) -> Sizes | None:
    """Axes that were joined or divided among themselves."""
    if before == now:
        return output
    total, old = math.prod(now), math.prod(before)
    if len(output) == 1:
        return (total,)
    if old == 0:
        return None
    # the batch by its own size, else an axis that has the size of the input's changed axis
    for sizes in (axes, {a: b for a, b in zip(before, now, strict=True) if a != b}):
        where = [k for k, size in enumerate(output) if size in sizes]
        result = tuple(sizes[size] if k in where else size for k, size in enumerate(output))
        if len(where) == len({output[k] for k in where}) and math.prod(result) == total:
            return result
    if output[0] * total % old:
        return None
    return (output[0] * total // old, *output[1:])  # a batch that was joined with other axes leads them
