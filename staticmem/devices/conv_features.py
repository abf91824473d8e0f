"""What decides a plan's workspace: features of a convolution, and the closed forms of which a workspace is made.

The workspaces that cuDNN names are sums of a few terms: a copy of the input, the weight or the result in the layout and
channel padding that a tensor-core kernel wants, and partial sums of the weight gradient in float32, one for each slice
of a split reduction. A `Form` names such a sum; the tables say which form a convolution takes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from staticmem.devices.conv import BACKWARD_DATA, BACKWARD_FILTER, FORWARD, Convolution, product

FEATURES = (
    "batch", "channels", "results", "pixels", "result_pixels", "window", "stride", "dilated", "groups", "depthwise",
    "channel_alignment", "result_alignment", "rows", "depth", "columns", "work", "tiles", "padded",
)  # fmt: skip

PADS = (1, 4, 8, 16, 32)  # channels of a copy are rounded up to a multiple of these (16 bytes are 4 or 8 elements)


def _alignment(channels: int) -> int:
    """The largest power of two up to 64 that divides the number of channels."""
    return min(channels & -channels, 64)


def features(conv: Convolution) -> tuple[int, ...]:
    """Integers on which the tables branch, in the order of `FEATURES`. Channels are those of one group."""
    n, c, k, g = conv.x[0], conv.w[1], conv.w[0] // conv.groups, conv.groups
    pixels, result_pixels, window = product(conv.x[2:]), product(conv.y[2:]), product(conv.w[2:])
    # the matrix product that a pass amounts to: rows x columns, summed over depth
    rows, columns, depth = {
        FORWARD: (n * result_pixels, k, c * window),
        BACKWARD_DATA: (n * pixels, c, k * window),
        BACKWARD_FILTER: (c * window, k, n * result_pixels),
    }[conv.direction]
    return (
        n, c, k, pixels, result_pixels, window, max(conv.stride), max(conv.dilation), g, int(conv.depthwise),
        _alignment(c), _alignment(k), rows, depth, columns, rows * columns // 1024 * depth // 1024,
        -(-rows // 128) * -(-columns // 128) * g, max(conv.padding),
    )  # fmt: skip


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
        "x": conv.x[0] * c * g * product(conv.x[2:]) * size,
        "y": conv.y[0] * k * g * product(conv.y[2:]) * size,
        "w": k * g * c * product(conv.w[2:]) * size,
    }


def form_bytes(conv: Convolution, form: Form) -> int:
    """Bytes of a form for a convolution."""
    sizes = piece_bytes(conv, form.pad)
    total = sum(sizes[p] for p in form.pieces)
    if form.step is not None:
        total += round(2 ** (form.step / 2) * product(conv.w) * 4)
    return total
