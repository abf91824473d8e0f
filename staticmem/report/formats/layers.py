"""The layer table as text and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from staticmem.report.formats import Format, csv_format
from staticmem.report.layers import NAMES, Layer, LayerTable
from staticmem.report.text import PLAIN, Text, View, columns
from staticmem.units import format_count

HEADS = "layer,input,output,parameters,activations,saved,MACs,read + write,at the peak,share".split(",")
_WIDEST = {0: 44, 1: 26, 2: 26}
_SPARE = (1, 7, 9, 4, 6, 2)  # columns that a narrow terminal can do without


def render(table: LayerTable, view: View = PLAIN) -> str:
    """Text with a final newline. Figures of a row include the modules in it; the last row is the whole model."""
    style, root, layers = view.style, table.layers[0], table.layers[:0] if view.quiet else table.layers[1:]
    step = "training step" if table.mode == "train" else "inference"
    title = f"layers of one {step}" if table.by == "module" else f"ops of one {step} (the file has no modules)"
    heads = [name.upper() if style.colour else name for name in HEADS]
    rows: list[Sequence[str]] = [heads, *[_row(table, layer, view) for layer in layers]]
    rows += [(), ("total", *_row(table, root, view)[1:])]
    lines = columns(rows, style, range(3, len(HEADS)), widest=_WIDEST, optional=_SPARE)
    lines[0], lines[-1] = style.paint(lines[0], "bold"), style.paint(lines[-1], "bold")
    text = Text(view)
    text.add(f"{table.model}: {title}", "bold")
    text.lines += ["", *lines]
    if root.own.peak_bytes and layers:
        outside = view.size(root.own.peak_bytes)
        text.lines.append("")
        text.wrap(f"{outside} at the peak belong to no layer: inputs, the loss, gradients on their way.")
    return text.end()


def _row(table: LayerTable, layer: Layer, view: View) -> Sequence[str]:
    f = layer.total
    name = layer.path.rpartition(".")[2] if layer.depth > 1 else layer.path
    calls = f" x{layer.calls}" if layer.calls > 1 else ""
    kind = f" ({layer.cls})" if layer.cls else ""
    share = f.peak_bytes / table.peak_bytes if table.peak_bytes else 0.0
    cells = [f"{'  ' * (layer.depth - 1)}{name}{kind}{calls}", _shapes(layer.inputs), _shapes(layer.outputs)]
    cells.append(f"{f.parameters:,}" if f.parameters else "")
    cells += [view.size(n) if n else "" for n in (f.activation_bytes, f.saved_bytes)]
    cells.append(format_count(f.macs) if f.macs else "")
    cells += [view.size(n) if n else "" for n in (f.read_bytes + f.write_bytes, f.peak_bytes)]
    return [*cells, f"{share:.1%}" if f.peak_bytes else ""]


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    """The first shape; how many more."""
    if not shapes:
        return ""
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return f"[{', '.join(map(str, shapes[0]))}]{more}"


def csv_rows(table: LayerTable) -> Iterator[Sequence[object]]:
    """A header and a row for each layer: own figures and, with `total_` before the name, those with its modules."""
    yield ("path", "class", "depth", "calls", "inputs", "outputs", *NAMES, *(f"total_{name}" for name in NAMES))
    for layer in table.layers:
        shapes = [" ".join("x".join(map(str, s)) for s in some) for some in (layer.inputs, layer.outputs)]
        figures = [getattr(f, name) for f in (layer.own, layer.total) for name in NAMES]
        yield layer.path, layer.cls, layer.depth, layer.calls, *shapes, *figures


FORMATS = (Format("table", "txt", render), csv_format(csv_rows))
