"""Draws predictions against published readings of GPUs, of docs/generated/hardware-readings.md, on logarithmic axes.

python scripts/pictures/readings_picture.py > docs/images/readings.svg
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "generated" / "hardware-readings.md"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 76, 24, 20, 56
LEAST, MOST = 1, 400_000  # MiB, ends of both axes
METERS = ("allocated", "reserved", "device", "context")
TICKS = {1: "1 MiB", 10: "10 MiB", 100: "100 MiB", 1024: "1 GiB", 10_240: "10 GiB", 102_400: "100 GiB"}
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #57606a }
.grid { stroke: #d8dee4 }
.equal { stroke: #57606a; stroke-dasharray: 5 4 }
.dot { fill: #0969da; fill-opacity: .45 }
.miss { fill: #cf222e; fill-opacity: .7 }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 }
  .grid { stroke: #3d444d }
  .equal { stroke: #9198a1 }
  .dot { fill: #58a6ff }
  .miss { fill: #ff7b72 }
}
"""


class Reading(NamedTuple):
    """MiB that were read, MiB that are predicted, and whether the band of the prediction holds the reading."""

    read: float
    predicted: float
    held: bool


def readings(page: str) -> list[Reading]:
    """Every reading of the page that has a place on the axes, in its order."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    found = []
    for cells in rows:
        if len(cells) != 9 or cells[3] not in METERS:
            continue
        read, predicted = (float(cell.replace(",", "")) for cell in cells[4:6])
        ends = [float(end.replace(",", "")) for end in cells[7].split(" to ")] if " to " in cells[7] else []
        if min(read, predicted) < LEAST:
            continue
        found.append(Reading(read, predicted, ends[0] <= read <= ends[1] if ends else cells[6] == "exact"))
    return found


def x(mib: float) -> float:
    return LEFT + math.log(mib / LEAST) / math.log(MOST / LEAST) * (WIDTH - LEFT - RIGHT)


def y(mib: float) -> float:
    return HEIGHT - BOTTOM - math.log(mib / LEAST) / math.log(MOST / LEAST) * (HEIGHT - TOP - BOTTOM)


def picture(found: list[Reading]) -> str:
    """The SVG; what lies outside of its band is drawn last, so that nothing hides it."""
    outside = sum(not one.held for one in found)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{len(found)} published readings of GPU memory beside what staticmem predicts</title>",
        f"<style>{STYLE}</style>",
    ]
    for mib, label in TICKS.items():
        lines.append(f'<line class="grid" x1="{x(mib):.1f}" x2="{x(mib):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mib):.1f}" y2="{y(mib):.1f}"/>')
        lines.append(f'<text x="{x(mib):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
        lines.append(f'<text x="{LEFT - 8}" y="{y(mib) + 4:.1f}" text-anchor="end">{label}</text>')
    lines.append(f'<line class="equal" x1="{x(LEAST):.1f}" y1="{y(LEAST):.1f}" x2="{x(MOST):.1f}" y2="{y(MOST):.1f}"/>')
    for one in sorted(found, key=lambda one: not one.held):
        kind = "dot" if one.held else "miss"
        lines.append(f'<circle class="{kind}" cx="{x(one.read):.1f}" cy="{y(one.predicted):.1f}" r="3.5"/>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">read on a GPU</text>')
    lines.append(f'<text x="{LEFT}" y="{TOP - 6}">predicted</text>')
    for place, (kind, said) in enumerate(
        (("dot", f"{len(found) - outside} within the predicted band"), ("miss", f"{outside} outside of it"))
    ):
        lines.append(f'<circle class="{kind}" cx="{LEFT + 18}" cy="{TOP + 20 + 20 * place}" r="3.5"/>')
        lines.append(f'<text x="{LEFT + 30}" y="{TOP + 24 + 20 * place}">{said}</text>')
    return "\n".join([*lines, "</svg>"])


def main() -> None:
    print(picture(readings(PAGE.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
