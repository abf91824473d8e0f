"""Draws the live memory of one step, eager and compiled, as docs/images/compile.svg.

    python scripts/pictures/compile_picture.py [MODEL] [BATCH] > docs/images/compile.svg

Each phase has the same width in both, as compiled code has fewer kernels.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from staticmem.scenario.request import Request
from staticmem.studies.study import Study
from staticmem.units import format_bytes

PHASES = ("forward", "backward", "optimizer")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 340, 70, 40, 48
POINTS = 240  # of a curve in each phase
COLOURS = {"eager": "#8a8f98", "compiled": "#0a7d5c"}


def curve(study: Study) -> list[tuple[float, int]]:
    """(place from 0 to 3, bytes): the most that is alive in each stretch of ticks."""
    lifetimes = study.lifetimes
    starts = [tick for name, tick in lifetimes.trace.phases if name in PHASES]
    points: list[tuple[float, int]] = []
    for phase, (start, end) in enumerate(zip(starts, [*starts[1:], lifetimes.ticks], strict=True)):
        for k in range(POINTS):
            first, last = start + (end - start) * k // POINTS, start + (end - start) * (k + 1) // POINTS
            points.append((phase + k / POINTS, max(lifetimes.live[first : max(last, first + 1)])))
    return points


def main() -> None:
    model = Path(sys.argv[1] if len(sys.argv) > 1 else "models/mobilenet_v2.pt2")
    batch = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    eager = Request(batch=batch, optimizer="adam", loss="cross-entropy")
    curves = {
        "eager": curve(Study.open(str(model), eager)),
        "compiled": curve(Study.open(str(model), replace(eager, compile=True))),
    }
    top = max(nbytes for points in curves.values() for _, nbytes in points) * 1.08

    def x(place: float) -> float:
        return LEFT + place / 3 * (WIDTH - LEFT - 20)

    def y(nbytes: float) -> float:
        return TOP + (1 - nbytes / top) * (HEIGHT - TOP - BOTTOM)

    text = 'font-family="system-ui, sans-serif" fill="#57606a"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Live memory of a training step of {model.stem}, batch {batch}, eager and compiled</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    step = 2**20
    while top / step > 6:
        step *= 2
    for nbytes in range(0, int(top), step):
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(nbytes):.1f}" y2="{y(nbytes):.1f}" stroke="#e4e7eb"/>'
        )
        lines.append(
            f'<text x="{LEFT - 8}" y="{y(nbytes) + 4:.1f}" text-anchor="end" font-size="11" {text}>'
            f"{format_bytes(nbytes, digits=1)}</text>"
        )
    for phase, name in enumerate(PHASES):
        lines.append(
            f'<line x1="{x(phase):.1f}" x2="{x(phase):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#c9ced6"/>'
        )
        lines.append(
            f'<text x="{x(phase + 0.5):.1f}" y="{HEIGHT - 22}" text-anchor="middle" font-size="12" {text}>{name}</text>'
        )
    for name, points in curves.items():
        path = " ".join(f"{x(place):.1f},{y(nbytes):.1f}" for place, nbytes in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        place, nbytes = max(points, key=lambda point: point[1])
        left = x(place) > WIDTH / 2
        lines.append(
            f'<text x="{x(place) + (-6 if left else 6):.1f}" y="{y(nbytes) - 8:.1f}" font-size="12" '
            f'text-anchor="{"end" if left else "start"}" font-family="system-ui, sans-serif" fill="{COLOURS[name]}">'
            f"{name}: {format_bytes(nbytes)}</text>"
        )
    lines.append("</svg>")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
