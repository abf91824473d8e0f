"""Lines over one axis as SVG: what a step needs against its batch or resolution, and the memory of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from staticmem.report.html.page import esc
from staticmem.report.text import PLAIN, View
from staticmem.units import GIB

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 118, 14, 34


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes at each point of the axis, None where there are none; `cls` is the class that colours it. `dots`: its
    points are marked, each with its bytes."""

    cls: str
    name: str
    values: Sequence[int | None]
    dots: bool = True


def curve(
    title: str, xs: Sequence[float], labels: Sequence[str], lines: Sequence[Line],
    limits: Sequence[tuple[str, int]], view: View = PLAIN, marks: Sequence[str] = (),
) -> str:  # fmt: skip
    """Lines over one axis, and horizontal lines at limits that lie in the picture.

    Args:
        xs: positions of the points, rising; labels: their names under the axis.
        lines: at least one has bytes at a point.
        limits: name and bytes.
        marks: what each point is, where it has a mark on the axis, whether or not its name fits under it.
    """
    top = max(n for line in lines for n in line.values if n is not None)
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

    parts = [_grid(ceiling, y, view), _axis(xs, labels, x)]
    for at, mark in zip(xs, marks, strict=False):
        if mark:
            place = f"M{x(at):.1f} {HEIGHT - BOTTOM}v6"
            parts.append(f'<path class="grid mark" d="{place}"><title>{esc(mark)}</title></path>')
    for text, at in shown:
        parts.append(f'<path class="limit" d="M{LEFT} {y(at):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="limit-name" x="{WIDTH - RIGHT + 6}" y="{y(at) + 4:.1f}">{esc(text[:20])}</text>')
    for line in lines:
        dots = [(x(at), y(n), label, n) for at, label, n in zip(xs, labels, line.values, strict=True) if n is not None]
        points = " ".join(f"{across:.1f},{height:.1f}" for across, height, _, _ in dots)
        parts.append(f'<polyline class="curve {esc(line.cls)}" points="{points}"/>')
        for across, height, label, n in dots if line.dots else ():
            place = f'cx="{across:.1f}" cy="{height:.1f}" r="3"'
            sentence = esc(f"{line.name} at {label}: {view.size(n)}")
            parts.append(f'<circle class="dot {esc(line.cls)}" {place}><title>{sentence}</title></circle>')
    keys = "".join(f'<span class="key"><i class="k-{esc(line.cls)}"></i>{esc(line.name)}</span>' for line in lines)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{esc(title)}">{"".join(parts)}</svg>'
        f'<p class="keys">{keys}</p>'
    )


def _grid(ceiling: float, y: Callable[[float], float], view: View) -> str:
    step = _step(ceiling)
    parts: list[str] = []
    at = 0.0
    while at <= ceiling:
        height = y(at)
        text = esc(view.size(int(at), 0 if step >= GIB else 1))
        parts.append(f'<path class="grid" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{height + 4:.1f}">{text}</text>')
        at += step
    return "".join(parts)


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
    parts: list[str] = []
    free = -1e9
    for at, label in zip(xs, labels, strict=True):
        place = x(at)
        if label and place - free >= 26:  # names that would touch are left out
            parts.append(f'<text class="x" x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}">{esc(label)}</text>')
            free = place + 6 * max(len(label) - 4, 0)
    return "".join(parts)
