"""Line plots as inline SVG: no script, no style attributes, text escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from staticmem.report.html.base import esc
from staticmem.units import GIB, format_bytes

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 118, 14, 34


def curve(
    title: str, xs: Sequence[float], labels: Sequence[str], lines: Sequence[tuple[str, Sequence[int]]],
    limits: Sequence[tuple[str, int]], units: str = "binary",
) -> str:  # fmt: skip
    """Lines over one axis, and horizontal lines at limits that lie in the picture.

    Args:
        xs: positions of the points, rising; labels: their names under the axis.
        lines: name and bytes at each point; the name is its class too.
        limits: name and bytes.
    """
    top = max(max(values) for _, values in lines)
    shown = [(text, at) for text, at in limits if at <= 1.15 * top]
    beyond = next(((text, at) for text, at in limits if at > 1.15 * top), None)
    if beyond is not None and beyond[1] <= 1.6 * top:
        shown.append(beyond)
    ceiling = max([top, *(at for _, at in shown)]) * 1.04
    span = max(xs[-1] - xs[0], 1e-9)

    def x(value: float) -> float:
        return LEFT + (value - xs[0]) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / ceiling * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(ceiling, y, units), _axis(xs, labels, x)]
    for text, at in shown:
        parts.append(f'<path class="limit" d="M{LEFT} {y(at):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="limit-name" x="{WIDTH - RIGHT + 6}" y="{y(at) + 4:.1f}">{esc(text[:20])}</text>')
    for text, values in lines:
        points = " ".join(f"{x(value):.1f},{y(n):.1f}" for value, n in zip(xs, values, strict=True))
        parts.append(f'<polyline class="curve {esc(text)}" points="{points}"/>')
        for value, label, n in zip(xs, labels, values, strict=True):
            place = f'cx="{x(value):.1f}" cy="{y(n):.1f}" r="3"'
            said = esc(f"{text} at {label}: {format_bytes(n, units)}")
            parts.append(f'<circle class="dot {esc(text)}" {place}><title>{said}</title></circle>')
    keys = "".join(f'<span class="key"><i class="k-{esc(text)}"></i>{esc(text)}</span>' for text, _ in lines)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{esc(title)}">{"".join(parts)}</svg>'
        f'<p class="keys">{keys}</p>'
    )


def _grid(ceiling: float, y: Callable[[float], float], units: str) -> str:
    step = _step(ceiling)
    found: list[str] = []
    at = 0.0
    while at <= ceiling:
        height = y(at)
        text = esc(format_bytes(int(at), units, 0 if step >= GIB else 1))
        found.append(f'<path class="grid" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>')
        found.append(f'<text class="y" x="{LEFT - 8}" y="{height + 4:.1f}">{text}</text>')
        at += step
    return "".join(found)


def _step(ceiling: float) -> float:
    """A round distance of lines: 1, 2 or 5 times a power of ten GiB (or of two below it), four to eight of them."""
    unit = float(GIB)
    while unit * 4 > ceiling:
        unit /= 2
    for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        if ceiling / (unit * factor) <= 8:
            return unit * factor
    return ceiling / 5


def _axis(xs: Sequence[float], labels: Sequence[str], x: Callable[[float], float]) -> str:
    found: list[str] = []
    free = -1e9
    for at, label in zip(xs, labels, strict=True):
        place = x(at)
        if place - free >= 26:  # names that would touch are left out
            found.append(f'<text class="x" x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}">{esc(label)}</text>')
            free = place
    return "".join(found)
