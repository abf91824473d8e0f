"""Fits a table of `staticmem.devices.conv_tables` to cuDNN's answers: labels them with forms, grows a tree."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from staticmem.devices.conv import Convolution
from staticmem.devices.conv_tables import Form, Tree, features, form_bytes, piece_bytes

NEGLIGIBLE = 8192  # bytes: tile counters and alignment, which no form describes
CLOSE = 0.003  # of the workspace
PIECES = ("", "x", "y", "w", "xy", "xw", "yw", "xyw")
LEAST_IN_LEAF = 3
LEAST_SHARE = 0.08  # of a leaf: rarer forms are not in the band

Answer = tuple[Convolution, int]  # and the bytes that cuDNN named


def label(conv: Convolution, workspace: int) -> Form:
    """The form that explains a workspace: copies that make it up, else copies and partial sums of the weight."""
    align = 4 if conv.itemsize == 4 else 8
    pads = [1]
    if conv.w[1] % align or (conv.w[0] // conv.groups) % align:
        pads.append(align)
    if conv.groups > 1:
        pads += [16, 32]
    best: tuple[int, int, int, str] | None = None
    for pad in pads:
        sizes = piece_bytes(conv, pad)
        for pieces in PIECES:
            rest = workspace - sum(sizes[p] for p in pieces)
            if 0 <= rest <= max(NEGLIGIBLE, CLOSE * workspace):
                return Form(pieces, pad, None)
            if rest > 0 and (best is None or (rest, len(pieces), pad) < best[:3]):
                best = (rest, len(pieces), pad, pieces)
    assert best is not None
    return Form(best[3], best[2], round(2 * math.log2(best[0] / (prod(conv.w) * 4))))


@dataclass
class Branch:
    """A node while it grows: rows of the data, then a split or nothing."""

    rows: NDArray[np.int64]
    split: tuple[int, int] | None = None
    below: list[Branch] = field(default_factory=list)


def _impurity(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    total = counts.sum(-1)
    return np.asarray(total - (counts * counts).sum(-1) / np.maximum(total, 1e-9))


def _best_split(
    x: NDArray[np.int64], hot: NDArray[np.float64], rows: NDArray[np.int64]
) -> tuple[float, int, int] | None:
    """(gain, feature, threshold) of the split that lowers Gini impurity most."""
    here = hot[rows]
    here = here[:, here.any(0)]
    if here.shape[1] < 2:
        return None
    total = here.sum(0)
    base = float(_impurity(total))
    best: tuple[float, int, int] | None = None
    for feature in range(x.shape[1]):
        values = x[rows, feature]
        order = np.argsort(values, kind="stable")
        values = values[order]
        cuts = np.nonzero(values[1:] != values[:-1])[0]
        cuts = cuts[(cuts + 1 >= LEAST_IN_LEAF) & (len(rows) - cuts - 1 >= LEAST_IN_LEAF)]
        if not len(cuts):
            continue
        left = np.cumsum(here[order], 0)[cuts]
        gains = base - _impurity(left) - _impurity(total - left)
        at = int(np.argmax(gains))
        if gains[at] > 1e-6 and (best is None or gains[at] > best[0]):
            low, high = int(values[cuts[at]]), int(values[cuts[at] + 1])
            middle = math.isqrt(low * high) if low > 0 else low
            best = (float(gains[at]), feature, min(max(middle, low), high - 1))
    return best


def grow(x: NDArray[np.int64], classes: NDArray[np.int64], weights: NDArray[np.float64], leaves: int) -> Branch:
    """A tree of at most `leaves` leaves, the split with the largest gain first."""
    hot = np.zeros((len(classes), int(classes.max()) + 1))
    hot[np.arange(len(classes)), classes] = weights
    root = Branch(np.arange(len(classes)))
    count = itertools.count()
    queue: list[tuple[float, int, Branch, tuple[float, int, int]]] = []

    def offer(branch: Branch) -> None:
        split = _best_split(x, hot, branch.rows)
        if split is not None:
            heapq.heappush(queue, (-split[0], next(count), branch, split))

    offer(root)
    for _ in range(leaves - 1):
        if not queue:
            break
        _, _, branch, (_, feature, threshold) = heapq.heappop(queue)
        goes_left = x[branch.rows, feature] <= threshold
        branch.split = (feature, threshold)
        branch.below = [Branch(branch.rows[goes_left]), Branch(branch.rows[~goes_left])]
        for below in branch.below:
            offer(below)
    return root


def fit(answers: Sequence[Answer], leaves: int) -> Tree:
    """A table for one cell. A large tensor's answer counts more: that is where a wrong form costs memory."""
    forms = [label(conv, workspace) for conv, workspace in answers]
    kinds = [(form.pieces, form.pad, form.step is not None) for form in forms]
    names = [kind for kind, _ in Counter(kinds).most_common()]
    x = np.array([features(conv) for conv, _ in answers], dtype=np.int64)
    classes = np.array([names.index(kind) for kind in kinds])
    weights = np.array([1 + math.log2(1 + sum(piece_bytes(conv).values()) / 2**20) for conv, _ in answers])
    tree = Tree([], [], [], [])
    _write(tree, grow(x, classes, weights, leaves), forms, weights)
    return tree


def _write(tree: Tree, branch: Branch, forms: Sequence[Form], weights: NDArray[np.float64]) -> None:
    index = len(tree.feature)
    feature, threshold = branch.split or (-1, 0)
    tree.feature.append(feature)
    tree.threshold.append(threshold)
    tree.right.append(0)
    tree.leaf.append(() if branch.split else _leaf(branch.rows, forms, weights))
    for number, below in enumerate(branch.below):
        if number:
            tree.right[index] = len(tree.feature)
        _write(tree, below, forms, weights)


def _leaf(rows: NDArray[np.int64], forms: Sequence[Form], weights: NDArray[np.float64]) -> tuple[Form, ...]:
    """Forms of a leaf by weight; the number of partial sums is the median of those that have the same copies."""
    share: dict[tuple[str, int, bool], float] = defaultdict(float)
    steps: dict[tuple[str, int, bool], list[int]] = defaultdict(list)
    for row in rows:
        form = forms[row]
        kind = (form.pieces, form.pad, form.step is not None)
        share[kind] += float(weights[row])
        if form.step is not None:
            steps[kind].append(form.step)
    order = sorted(share, key=lambda kind: (-share[kind], kind))
    total = sum(share.values())
    kept = [kind for n, kind in enumerate(order) if n == 0 or share[kind] >= LEAST_SHARE * total]
    return tuple(Form(k[0], k[1], int(np.median(steps[k])) if k[2] else None) for k in kept)


@dataclass(frozen=True)
class Agreement:
    """How a table's answers compare with cuDNN's: shares, and errors in MiB."""

    count: int
    exact: float  # within 1 MiB or 2 %
    in_band: float
    median: float
    mean: float


def agreement(tree: Tree, answers: Sequence[Answer]) -> Agreement:
    exact = in_band = 0
    errors = []
    for conv, workspace in answers:
        sizes = [form_bytes(conv, form) for form in tree.find(features(conv))]
        tolerance = max(2**20, 0.02 * workspace)
        exact += abs(sizes[0] - workspace) <= tolerance
        in_band += min(sizes) - tolerance <= workspace <= max(sizes) + tolerance
        errors.append(abs(sizes[0] - workspace) / 2**20)
    n = max(len(answers), 1)
    return Agreement(len(answers), exact / n, in_band / n, float(np.median(errors)), float(np.mean(errors)))
