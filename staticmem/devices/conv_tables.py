"""Which form of workspace a convolution takes, from tables that scripts/conv_workspace_tables.py derives from cuDNN.

A table is a decision tree over `conv_features.FEATURES` for one cuDNN, architecture, precision, layout and pass. A leaf
has the forms that cuDNN took there, the most frequent first; those after it are what the band is made of.

A file is conv/<cuDNN version>/<architecture>.json: version, cudnn, features, and trees by name (`tf32 nchw forward`),
each with the names of its forms and its nodes in preorder: `3<56` goes to the next node if feature 3 is at most 56,
else behind that subtree; `2,0` is a leaf with forms 2 and 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from staticmem.devices.conv import Convolution
from staticmem.devices.conv_features import FEATURES, Form, features, parse_form

FOLDER = Path(__file__).parent / "conv"
WITHOUT_TF32 = ("sm_70", "sm_75")  # no TF32 before Ampere: float32 is float32


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
    """The forms that cuDNN takes for such a convolution, the likeliest first; empty where no table knows it.

    `cudnn` is the version that is meant; the tables of the closest version are taken (`closest`).
    """
    found = tree(closest(cudnn), architecture, table_of(conv, architecture))
    return found.find(features(conv)) if found is not None else ()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


@lru_cache(maxsize=1)
def versions() -> tuple[str, ...]:
    """The cuDNN versions that there are tables of, the oldest first."""
    return tuple(sorted((path.name for path in FOLDER.iterdir() if path.is_dir()), key=numbers))


@lru_cache(maxsize=8)
def closest(cudnn: str) -> str:
    """The version whose tables stand for a version: the latest that is not later, else the oldest."""
    known = versions()
    return max((v for v in known if numbers(v) <= numbers(cudnn)), key=numbers, default=known[0])


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
    """The tree of a table that is there, by its exact version."""
    found = _trees(cudnn, architecture).get(name)
    return parse(found["forms"], found["nodes"]) if found is not None else None


def parse(names: Sequence[str], nodes: str) -> Tree:
    """A tree out of its text."""
    known = [parse_form(name) for name in names]
    tree = Tree([], [], [], [])
    open_nodes: list[int] = []  # branches whose right subtree has not begun
    for token in nodes.split():
        left, less, right = token.partition("<")
        index = len(tree.feature)
        tree.feature.append(int(left) if less else -1)
        tree.threshold.append(int(right) if less else 0)
        tree.right.append(0)
        tree.leaf.append(() if less else tuple(known[int(n)] for n in token.split(",")))
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
