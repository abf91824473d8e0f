"""Convolutions as vision networks have them, drawn at random: what the workspace tables are derived from.

Nothing here is taken from a particular network. Sizes follow what architectures use: windows of 1, 3, 5, 7 and the
patch sizes 2, 4, 14 and 16 with the stride of their size; channels mostly multiples of 8; any batch up to 512; any
resolution up to 512. Every draw is reproducible from its seed.
"""

from __future__ import annotations

import random
from math import prod

from staticmem.devices.conv import PASSES, Convolution

LARGEST = 2**31  # elements of a tensor: beyond, PyTorch's 32-bit indexing takes other paths
RESOLUTIONS = (7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 256, 5, 10, 13, 20, 27, 40, 55, 80, 160, 384, 512)


def _channels(r: random.Random) -> int:
    kind = r.random()
    if kind < 0.08:
        return r.choice((1, 3, 3, 3, 4))
    if kind < 0.55:
        return r.choice((16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048))
    if kind < 0.93:
        return 8 * r.randint(1, 16) if r.random() < 0.5 else 8 * r.randint(1, 192)
    return r.randint(2, 1024)


def _window(r: random.Random) -> tuple[int, int]:
    """Window and stride."""
    window = r.choice((1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 5, 7, 2, 4, 11, 14, 16))
    if window in (2, 4, 14, 16) and r.random() < 0.85:
        return window, window
    if window == 11 and r.random() < 0.7:
        return window, 4
    return window, 1 if r.random() < 0.72 else 2


def _groups(r: random.Random, channels: int, results: int) -> tuple[int, int, int]:
    if r.random() > 0.18:
        return channels, results, 1
    if r.random() < 0.5:  # depthwise
        return channels, channels, channels
    groups = r.choice((2, 4, 8, 16, 32, 32, 64))
    width = r.choice((1, 2, 4, 8, 8, 16, 24, 32, 40))
    return groups * width, groups * width * r.choice((1, 1, 1, 2)), groups


def draw(r: random.Random, precision: str, channels_last: bool, direction: str) -> Convolution:
    """One convolution."""
    while True:
        batch = 2 ** r.randint(0, 9) if r.random() < 0.6 else int(2 ** r.uniform(0, 9))
        window, stride = _window(r)
        dilation = r.choice((2, 4, 6, 12)) if window == 3 and r.random() < 0.1 else 1
        padding = dilation * (window - 1) // 2 if stride != window or window % 2 else 0
        if window == 11:
            padding = r.choice((2, 5))
        elif r.random() < 0.06:
            padding = 0
        height = r.choice(RESOLUTIONS) if r.random() < 0.7 else r.randint(4, 400)
        width = height if r.random() < 0.85 else max(4, int(height * r.uniform(0.5, 2)))
        if window == 1 and r.random() < 0.06:
            height = width = 1
        channels, results, groups = _groups(r, _channels(r), _channels(r))
        if min(height, width) + 2 * padding < dilation * (window - 1) + 1:
            continue
        conv = Convolution(
            direction, precision, channels_last, (batch, channels, height, width),
            (results, channels // groups, window, window), (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups,
        )  # fmt: skip
        if max(prod(conv.x), prod(conv.y)) < LARGEST // 2 and prod(conv.w) < 2**27:
            return conv


def sample(seed: int, precision: str, channels_last: bool, direction: str, count: int) -> list[Convolution]:
    r = random.Random(f"{seed}/{precision}/{channels_last}/{direction}")
    return [draw(r, precision, channels_last, direction) for _ in range(count)]


def cells(precisions: tuple[str, ...]) -> list[tuple[str, bool, str]]:
    return [(p, last, d) for p in precisions for last in (False, True) for d in PASSES]
