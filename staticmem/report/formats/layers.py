"""The layer table as text and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from staticmem.report.formats.trace import cell
from staticmem.report.layers import NAMES, Layer, LayerTable
from staticmem.report.style import Style
from staticmem.units import format_bytes, format_count

HEADS = (
    "layer", "input", "output", "parameters", "activations", "saved", "MACs", "read + write", "at the peak", "share",
)  # fmt: skip
_LEFT = 3  # columns of text; the others are numbers
_WIDEST = (44, 26, 26)


def render(table: LayerTable, layers: Sequence[Layer], style: Style | None = None, units: str = "binary") -> str:
    """Text with a final newline. Figures of a row include the modules in it; the last row is the whole model."""
    style = style or Style()
    root, rows = layers[0], [_row(table, layer, style, units) for layer in layers[1:]]
    total = ("total", *_row(table, root, style, units)[1:])
    heads = tuple(name.upper() if style.colour else name for name in HEADS)
    wide = [max(len(row[i]) for row in (HEADS, *rows, total)) for i in range(len(HEADS))]
    wide[:_LEFT] = [min(width, most) for width, most in zip(wide[:_LEFT], _WIDEST, strict=True)]
    lines = [style.paint(style.plain(f"{table.model}: {_step(table)}"), "bold"), ""]
    lines.append(style.paint(_line(heads, wide, style), "bold"))
    lines += [_line(row, wide, style) for row in rows]
    lines += [_line(tuple("-" * width for width in wide), wide, style), style.paint(_line(total, wide, style), "bold")]
    own = root.own
    if own.peak_bytes and rows:
        outside = format_bytes(own.peak_bytes, units)
        lines += ["", f"{outside} at the peak belong to no layer: inputs, the loss, gradients on their way."]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _step(table: LayerTable) -> str:
    what = "training step" if table.mode == "train" else "inference"
    return f"layers of one {what}" if table.by == "module" else f"ops of one {what} (the file has no modules)"


def _row(table: LayerTable, layer: Layer, style: Style, units: str) -> tuple[str, ...]:
    f = layer.total
    name = layer.path.rpartition(".")[2] if layer.depth > 1 else layer.path
    calls = f" x{layer.calls}" if layer.calls > 1 else ""
    kind = f" ({layer.cls})" if layer.cls else ""
    share = f.peak_bytes / table.peak_bytes if table.peak_bytes else 0.0
    return (
        style.plain(f"{'  ' * (layer.depth - 1)}{name}{kind}{calls}"), _shapes(layer.inputs), _shapes(layer.outputs),
        f"{f.parameters:,}" if f.parameters else "", _size(f.activation_bytes, units), _size(f.saved_bytes, units),
        format_count(f.macs) if f.macs else "", _size(f.read_bytes + f.write_bytes, units),
        _size(f.peak_bytes, units), f"{share:.1%}" if f.peak_bytes else "",
    )  # fmt: skip


def _size(n: int, units: str) -> str:
    return format_bytes(n, units) if n else ""


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    """The first shape; how many more."""
    if not shapes:
        return ""
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return f"[{', '.join(map(str, shapes[0]))}]{more}"


def _line(row: Sequence[str], wide: Sequence[int], style: Style) -> str:
    cells = [
        f"{style.cut(text, width):<{width}}" if i < _LEFT else f"{text:>{width}}"
        for i, (text, width) in enumerate(zip(row, wide, strict=True))
    ]
    return "  ".join(cells)


def render_csv(layers: Sequence[Layer]) -> str:
    """A header and a row for each layer: own figures and, with `total_` before the name, those with its modules."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("path", "class", "depth", "calls", "inputs", "outputs", *NAMES, *(f"total_{name}" for name in NAMES))
    )
    for layer in layers:
        shapes = (" ".join("x".join(map(str, s)) for s in some) for some in (layer.inputs, layer.outputs))
        figures = [getattr(f, name) for f in (layer.own, layer.total) for name in NAMES]
        writer.writerow((cell(layer.path), cell(layer.cls), layer.depth, layer.calls, *shapes, *figures))
    return text.getvalue()
