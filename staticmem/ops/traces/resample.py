"""Interpolation: composites of indexing and arithmetic that autograd sees.

Source: torch/_decomp/decompositions.py (`_upsample_nearest`, `_upsample_linear`, `upsample_bicubic2d_default`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from staticmem.eager import strides as layout
from staticmem.ir import dtypes
from staticmem.ops.traces.arithmetic import add, clamped, mul, sub
from staticmem.ops.traces.casts import to_copy
from staticmem.ops.traces.indexing import unsafe_index
from staticmem.ops.traces.registry import traced
from staticmem.ops.traces.views import clone
from staticmem.tracing.nodes import Node
from staticmem.tracing.tracer import Tracer

Scales = Sequence["float | None"]


def _sizes(input: Node, output_size: Sequence[int] | None, scale_factors: Scales | None) -> tuple[list[int], Scales]:
    """The sizes, and the scales that were given."""
    if output_size is not None:
        return list(output_size), [None] * len(output_size)
    assert scale_factors is not None
    sizes = [int(size * (scale or 1)) for size, scale in zip(input.shape[2:], scale_factors, strict=True)]
    return sizes, scale_factors


def _in_layout(t: Tracer, result: Node, input: Node, fewest_channels: int) -> Node:
    """Channels last as the input, but not where there are few channels."""
    last = layout.prefers_channels_last(input.shape, input.strides) and input.shape[1] >= fewest_channels
    if not last or layout.prefers_channels_last(result.shape, result.strides):
        return result
    return clone(t, result, "channels_last")


def _in_float32(t: Tracer, input: Node, run: Callable[[Node], Node]) -> Node:
    """Halves are cast and cast back, which autograd sees."""
    if input.dtype not in dtypes.HALVES:
        return run(input)
    return to_copy(t, run(to_copy(t, input, dtypes.float32)), input.dtype)


def _nearest(t: Tracer, input: Node, sizes: Sequence[int], scales: Scales, exact: bool) -> Node:
    indices: list[Node | None] = [None, None]
    for k, (size, scale) in enumerate(zip(sizes, scales, strict=True)):
        given = input.shape[2 + k]
        ratio = given / (given * scale) if scale is not None and scale > 0 else given / size
        places = t.add(t.mul(t.iota(size), 1), 0)
        places = t.mul(t.add(t.cast(places, dtypes.float32), 0.5 if exact else 0.0), ratio)
        index = t.cast(places, dtypes.int64)
        for _ in range(len(sizes) - 1 - k):
            index = t.unsqueeze(index, -1)
        indices.append(index)
    result = unsafe_index(t, input, indices)
    return _in_layout(t, result, input, 4 if input.ndim == 4 else 0) if input.ndim > 3 else result


def _register_nearest(dims: int) -> None:
    def run(exact: bool) -> Callable[..., Node]:
        def vec(t: Tracer, input: Node, output_size: Any = None, scale_factors: Any = None) -> Node:
            sizes, scales = _sizes(input, output_size, scale_factors)
            return _in_float32(t, input, lambda wide: _nearest(t, wide, sizes, scales, exact))

        return vec

    def plain(exact: bool) -> Callable[..., Node]:
        def default(t: Tracer, input: Node, output_size: Any, *given: Any, **named: Any) -> Node:
            scales = [*given, *named.values()]
            scales += [None] * (dims - len(scales))
            return _in_float32(t, input, lambda wide: _nearest(t, wide, output_size, scales, exact))

        return default

    for name, exact in ((f"upsample_nearest{dims}d", False), (f"_upsample_nearest_exact{dims}d", True)):
        traced(f"{name}.vec")(run(exact))
        traced(name)(plain(exact))


for _dims in (1, 2, 3):
    _register_nearest(_dims)


def _scale(given: int, size: int, align_corners: bool, scale: float | None) -> float:
    if align_corners:
        return (given - 1.0) / (size - 1.0) if size > 1 else 0
    return 1.0 / scale if scale is not None and scale > 0 else given / size


def _source_index(t: Tracer, scale: float, places: Node, align_corners: bool) -> Node:
    if align_corners:
        return t.mul(places, scale)
    return t.sub(t.mul(t.add(places, 0.5), scale), 0.5)


def _linear(t: Tracer, input: Node, sizes: Sequence[int], align_corners: bool, scales: Scales) -> Node:
    rank = len(sizes)
    exact, low, high = [], [], []
    for k, (size, scale) in enumerate(zip(sizes, scales, strict=True)):
        given = input.shape[2 + k]
        places = t.cast(t.iota(size), input.dtype)
        places = _source_index(t, _scale(given, size, align_corners, scale), places, align_corners)
        places = t.pointwise("aten::clamp_min", places, 0.0)
        shape = (size, *[1] * (rank - 1 - k))
        places = t.new("aten::view", (places, shape), shape, places.dtype)
        below = t.cast(places, dtypes.int64)
        exact.append(places)
        low.append(below)
        high.append(t.pointwise("aten::clamp_max", t.add(below, 1), given - 1))
    values = [
        unsafe_index(t, input, [None, None, *[high[k] if up else low[k] for k, up in enumerate(chosen)]])
        for chosen in product((False, True), repeat=rank)
    ]
    for k in reversed(range(rank)):
        weight = clamped(t, t.sub(exact[k], low[k]), 0.0, 1.0)
        values = [
            add(t, first, mul(t, sub(t, second, first), weight))
            for first, second in zip(values[::2], values[1::2], strict=True)
        ]
    return _in_layout(t, values[0], input, 16)


def _register_linear(name: str, dims: int) -> None:
    def vec(
        t: Tracer, input: Node, output_size: Any = None, align_corners: bool = False, scale_factors: Any = None
    ) -> Node:
        sizes, scales = _sizes(input, output_size, scale_factors)
        return _in_float32(t, input, lambda wide: _linear(t, wide, sizes, align_corners, scales))

    def plain(t: Tracer, input: Node, output_size: Any, align_corners: bool, *given: Any, **named: Any) -> Node:
        scales = [*given, *named.values()]
        scales += [None] * (dims - len(scales))
        return _in_float32(t, input, lambda wide: _linear(t, wide, output_size, align_corners, scales))

    traced(f"{name}.vec")(vec)
    traced(name)(plain)


_register_linear("upsample_linear1d", 1)

_register_linear("upsample_bilinear2d", 2)

_register_linear("upsample_trilinear3d", 3)


@traced("upsample_bicubic2d.vec")
def bicubic_vec(
    t: Tracer, input: Node, output_size: Any = None, align_corners: bool = False, scale_factors: Any = None
) -> Node:
    sizes, scales = _sizes(input, output_size, scale_factors)
    return _in_float32(t, input, lambda wide: _bicubic(t, wide, sizes, align_corners, scales))


@traced("upsample_bicubic2d")
def bicubic(
    t: Tracer, input: Node, output_size: Any, align_corners: bool, scales_h: float | None = None,
    scales_w: float | None = None,
) -> Node:  # fmt: skip
    return _in_float32(t, input, lambda wide: _bicubic(t, wide, output_size, align_corners, (scales_h, scales_w)))


def _bicubic(t: Tracer, input: Node, sizes: Sequence[int], align_corners: bool, scales: Scales) -> Node:
    height, width = input.shape[2:]
    ratios = [
        _scale(given, size, align_corners, scale)
        for given, size, scale in zip((height, width), sizes, scales, strict=True)
    ]
    places = [t.cast(t.iota(size), input.dtype) for size in sizes]
    x_exact = _source_index(t, ratios[1], places[1], align_corners)
    y_exact = t.unsqueeze(_source_index(t, ratios[0], places[0], align_corners), -1)
    x, y = t.pointwise("aten::floor", x_exact), t.pointwise("aten::floor", y_exact)
    y_part = clamped(t, t.sub(y_exact, y), 0.0, 1.0)
    x_part = clamped(t, t.sub(x_exact, x), 0.0, 1.0)
    x, y = t.cast(x, dtypes.int64), t.cast(y, dtypes.int64)
    rows = (t.sub(y, 1), y, t.add(y, 1), t.add(y, 2))
    columns = (t.sub(x, 1), x, t.add(x, 1), t.add(x, 2))
    by_x, by_y = _cubic_weights(t, x_part), _cubic_weights(t, y_part)

    def bounded(row: Node, column: Node) -> Node:
        inside = (None, None, clamped(t, row, 0, height - 1), clamped(t, column, 0, width - 1))
        return unsafe_index(t, input, inside)

    def weighed(values: Sequence[Node], weights: Sequence[Node]) -> Node:
        result = None
        for value, weight in zip(values, weights, strict=True):
            part = mul(t, value, weight)
            result = part if result is None else add(t, result, part)
        assert result is not None
        return result

    interpolated = [weighed([bounded(row, column) for column in columns], by_x) for row in rows]
    return _in_layout(t, weighed(interpolated, by_y), input, 0)


def _cubic_weights(t: Tracer, part: Node) -> list[Node]:
    a = -0.75

    def near(x: Node) -> Node:
        return t.add(t.mul(t.mul(t.sub(t.mul(x, a + 2), a + 3), x), x), 1)

    def far(x: Node) -> Node:
        return t.sub(t.mul(t.add(t.mul(t.sub(t.mul(x, a), 5 * a), x), 8 * a), x), 4 * a)

    return [far(t.add(part, 1.0)), near(part), near(t.sub(1.0, part)), far(t.sub(2.0, part))]
