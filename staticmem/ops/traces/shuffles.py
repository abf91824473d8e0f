"""Shuffles of channels and pixels: views of more dimensions, and a copy (torch/_refs/nn/functional)."""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager import strides as layout
from staticmem.ops.traces.registry import traced
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Gradients, Tracer


def _shuffled(t: Tracer, self: Node, factor: int) -> Node:
    *batch, channels, height, width = self.shape
    n = len(batch)
    view = t.view(self, (*batch, channels // factor**2, factor, factor, height, width))
    turned = t.permute(view, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    result = t.view(turned, (*batch, channels // factor**2, height * factor, width * factor))
    return _copied(t, result, self)


def _unshuffled(t: Tracer, self: Node, factor: int) -> Node:
    *batch, channels, height, width = self.shape
    n = len(batch)
    view = t.view(self, (*batch, channels, height // factor, factor, width // factor, factor))
    turned = t.permute(view, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    result = t.view(turned, (*batch, channels * factor**2, height // factor, width // factor))
    return _copied(t, result, self)


def _copied(t: Tracer, result: Node, like: Node) -> Node:
    """In the layout that the input suggests."""
    last = layout.prefers_channels_last(like.shape, like.strides)
    return t.clone(result, layout.channels_last_strides(result.shape) if last else None)


@traced("pixel_shuffle")
def pixel_shuffle(t: Tracer, self: Node, upscale_factor: int) -> Node:
    out = _shuffled(t, self, upscale_factor)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [_unshuffled(t, grads[0], upscale_factor)]

    t.record(out, [self], gradient)
    return out


@traced("pixel_unshuffle")
def pixel_unshuffle(t: Tracer, self: Node, downscale_factor: int) -> Node:
    out = _unshuffled(t, self, downscale_factor)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [_shuffled(t, grads[0], downscale_factor)]

    t.record(out, [self], gradient)
    return out


@traced("channel_shuffle native_channel_shuffle")
def channel_shuffle(t: Tracer, self: Node, groups: int) -> Node:
    out = _swapped(t, self, groups)

    def gradient(grads: Gradients, need: Sequence[bool]) -> Gradients:
        assert grads[0] is not None
        return [_swapped(t, grads[0], self.shape[1] // groups)]

    t.record(out, [self], gradient)
    return out


def _swapped(t: Tracer, self: Node, groups: int) -> Node:
    batch, channels, *rest = self.shape
    view = t.view(self, (batch, groups, channels // groups, *rest))
    return t.view(t.permute(view, (0, 2, 1, *range(3, view.ndim))), self.shape)
