"""Which form of workspace a convolution takes, from tables of cuDNN's answers.

scripts/convolutions/conv_workspace_tables.py makes the tables.

The workspaces that cuDNN names are sums of a few terms: a copy of the input, the weight or the result in the layout and
channel padding that a tensor-core kernel wants, and partial sums of the weight gradient in float32, one for each slice
of a split reduction. A `Form` names such a sum.

A table is a decision tree over `FEATURES` for one cuDNN, architecture, precision, layout and pass. A leaf has the forms
that cuDNN took there, the most frequent first; those after it are what the band is made of.

A file is conv/<cuDNN version>/<architecture>.json: version, cudnn, features, and trees by name (`tf32 nchw forward`),
each with the names of its forms and its nodes in preorder: `3<56` goes to the next node if feature 3 is at most 56,
else behind that subtree; `2,0` is a leaf with forms 2 and 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from staticmem.devices.conv import BACKWARD_DATA, BACKWARD_FILTER, FORWARD, Convolution

FOLDER = Path(__file__).parent / "conv"
WITHOUT_TF32 = ("sm_70", "sm_75")  # no TF32 before Ampere: float32 is float32


FEATURES = tuple(
    "batch channels results pixels result_pixels window stride dilated groups depthwise channel_alignment "
    "result_alignment rows depth columns work tiles padded".split()
)


def _alignment(channels: int) -> int:
    """The largest power of two up to 64 that divides the number of channels."""
    return min(channels & -channels, 64)


def features(conv: Convolution) -> tuple[int, ...]:
    """Integers on which the tables branch, in the order of `FEATURES`. Channels are those of one group."""
    n, c, k, g = conv.x[0], conv.w[1], conv.w[0] // conv.groups, conv.groups
    pixels, result_pixels, window = prod(conv.x[2:]), prod(conv.y[2:]), prod(conv.w[2:])
    # the matrix product that a pass amounts to: rows x columns, summed over depth
    rows, columns, depth = {
        FORWARD: (n * result_pixels, k, c * window),
        BACKWARD_DATA: (n * pixels, c, k * window),
        BACKWARD_FILTER: (c * window, k, n * result_pixels),
    }[conv.direction]
    sizes = (n, c, k, pixels, result_pixels, window, max(conv.stride), max(conv.dilation), g, int(conv.depthwise))
    work, tiles = rows * columns // 1024 * depth // 1024, -(-rows // 128) * -(-columns // 128) * g
    return (*sizes, _alignment(c), _alignment(k), rows, depth, columns, work, tiles, max(conv.padding))


class Form(NamedTuple):
    """`pieces` of x, w, y copied with channels rounded up to `pad`, and 2 ** (step / 2) float32 copies of the weight.

    `step` None: no partial sums.
    """

    pieces: str
    pad: int
    step: int | None

    def __str__(self) -> str:
        pad = "" if self.pad == 1 else f"@{self.pad}"
        return f"{self.pieces or '0'}{pad}{'' if self.step is None else f'^{self.step}'}"


_FORM = re.compile(r"(0|(?=[xyw])x?y?w?)(?:@(\d+))?(?:\^(-?\d+))?")


def parse_form(text: str) -> Form:
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"no form of a workspace: {text!r}")
    pieces, pad, step = match.groups()
    return Form("" if pieces == "0" else pieces, int(pad or 1), None if step is None else int(step))


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


def piece_bytes(conv: Convolution, pad: int = 1) -> dict[str, int]:
    """Bytes of input, result and weight, with the channels of a group rounded up to `pad`."""
    c, k = _round(conv.w[1], pad), _round(conv.w[0] // conv.groups, pad)
    size, g = conv.itemsize, conv.groups
    return {
        "x": conv.x[0] * c * g * prod(conv.x[2:]) * size,
        "y": conv.y[0] * k * g * prod(conv.y[2:]) * size,
        "w": k * g * c * prod(conv.w[2:]) * size,
    }


def form_bytes(conv: Convolution, form: Form) -> int:
    """Bytes of a form for a convolution."""
    sizes = piece_bytes(conv, form.pad)
    total = sum(sizes[p] for p in form.pieces)
    if form.step is not None:
        total += round(2 ** (form.step / 2) * prod(conv.w) * 4)
    return total


# -- trees -----------------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """Parallel lists over nodes: feature (-1: a leaf), threshold, the node behind the left subtree, forms of a leaf."""

    feature: list[int]
    threshold: list[int]
    right: list[int]
    leaf: list[tuple[Form, ...]]

    def find(self, values: Sequence[int]) -> tuple[Form, ...]:
        node = 0
        while (feature := self.feature[node]) >= 0:
            node = node + 1 if values[feature] <= self.threshold[node] else self.right[node]
        return self.leaf[node]


def table_name(precision: str, channels_last: bool, direction: str) -> str:
    return f"{precision} {'nhwc' if channels_last else 'nchw'} {direction}"


def table_of(conv: Convolution, architecture: str) -> str:
    """The table for a convolution: bfloat16 shares float16's; there is no TF32 before sm_80."""
    precision = "float16" if conv.precision == "bfloat16" else conv.precision
    if precision == "tf32" and architecture in WITHOUT_TF32:
        precision = "float32"
    return table_name(precision, conv.channels_last, conv.direction)


def forms(conv: Convolution, architecture: str, cudnn: str) -> tuple[Form, ...]:
    """The forms that cuDNN takes for such a convolution, the likeliest first; empty without a table.

    The tables are those of the version that is `closest` to `cudnn`.
    """
    decisions = tree(closest(cudnn), architecture, table_of(conv, architecture))
    return decisions.find(features(conv)) if decisions is not None else ()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


@lru_cache(maxsize=1)
def versions() -> tuple[str, ...]:
    """The cuDNN versions that there are tables of, the oldest first."""
    return tuple(sorted((path.name for path in FOLDER.iterdir() if path.is_dir()), key=numbers))


@lru_cache(maxsize=8)
def closest(cudnn: str) -> str:
    """The version whose tables are used for a version: the latest that is not later, else the oldest."""
    available = versions()
    return max((v for v in available if numbers(v) <= numbers(cudnn)), key=numbers, default=available[0])


@lru_cache(maxsize=8)
def _trees(cudnn: str, architecture: str) -> Mapping[str, Mapping[str, Any]]:
    try:
        text = (FOLDER / cudnn / f"{architecture}.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    document = json.loads(text)
    if document.get("version") != 1 or document.get("features") != list(FEATURES):
        raise ValueError(f"the workspace table of {architecture} is not one that this version reads")
    trees: Mapping[str, Mapping[str, Any]] = document["trees"]
    return trees


@lru_cache(maxsize=1)
def _search_ranges() -> Mapping[str, Mapping[str, list[float]]]:
    document = json.loads((FOLDER / "search.json").read_text(encoding="utf-8"))
    ranges: Mapping[str, Mapping[str, list[float]]] = document["ranges"]
    return ranges


def search_range(conv: Convolution, architecture: str) -> tuple[float, float, float]:
    """Low, median and high of the largest plan's workspace over the bytes of input, weight and result."""
    low, median, high = _search_ranges().get(architecture, {}).get(table_of(conv, architecture), (0.0, 1.0, 3.0))
    return low, median, high


@lru_cache(maxsize=64)
def tree(cudnn: str, architecture: str, name: str) -> Tree | None:
    """The tree of a table of exactly this version; None if there is none."""
    data = _trees(cudnn, architecture).get(name)
    return parse(data["forms"], data["nodes"]) if data is not None else None


def parse(names: Sequence[str], nodes: str) -> Tree:
    """A tree out of its text."""
    forms = [parse_form(name) for name in names]
    tree = Tree([], [], [], [])
    open_nodes: list[int] = []  # branches whose right subtree has not begun
    for token in nodes.split():
        left, less, right = token.partition("<")
        index = len(tree.feature)
        tree.feature.append(int(left) if less else -1)
        tree.threshold.append(int(right) if less else 0)
        tree.right.append(0)
        tree.leaf.append(() if less else tuple(forms[int(n)] for n in token.split(",")))
        if less:
            open_nodes.append(index)
        elif open_nodes:
            tree.right[open_nodes.pop()] = index + 1
    if open_nodes or not tree.feature or max(tree.right) >= len(tree.feature):
        raise ValueError("a table is cut off")
    return tree


def dump(tree: Tree) -> tuple[list[str], str]:
    """The text of a tree: names of its forms, and its nodes."""
    names: dict[Form, int] = {}
    tokens = []
    for feature, threshold, leaf in zip(tree.feature, tree.threshold, tree.leaf, strict=True):
        if feature >= 0:
            tokens.append(f"{feature}<{threshold}")
        else:
            tokens.append(",".join(str(names.setdefault(form, len(names))) for form in leaf))
    return [str(form) for form in names], " ".join(tokens)
