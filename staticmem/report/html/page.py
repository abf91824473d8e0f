"""What every page of staticmem shares: the frame with its style, escaping, tables, bars. Long HTML is in `assets`.

A page is one file that asks for nothing else: its Content-Security-Policy allows the style and the script in it by
their hashes, and no request. So there are no `style` attributes: classes and SVG attributes carry what varies.

Columns of integers and lists of strings, small enough to lie in a page.

A column is unsigned LEB128 varints (7 bits a byte, low bits first, the high bit says that more follow). "plain"
columns are the values; "delta" columns are differences of neighbours in zigzag (0, -1, 1, -2 -> 0, 1, 2, 3), which are
small where values rise slowly. All columns and strings of a block are one raw DEFLATE stream (RFC 1951) in base64: the
page reads it with `DecompressionStream`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

CUT = 400  # characters of a name that a page shows; the embedded report has all of it


def visible(text: str) -> str:
    """The text with what has no shape of its own spelled out: control characters, and those that turn the direction of
    what follows, are in names only to deceive."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"⟨{ord(c):04X}⟩" for c in text)


def cut(text: str, room: int = CUT) -> str:
    """The text in at most `room` characters; both ends of a long name say what it is."""
    return text if len(text) <= room else f"{text[: room // 2]} … {text[-(room // 2 - 3) :]}"


def esc(text: str) -> str:
    """Text of a model or of ours, for an element or a quoted attribute."""
    return html.escape(visible(cut(text)))


def name(text: str, cls: str = "") -> str:
    """A name out of a model: in a font for code, and apart from the direction of the text around it."""
    return f'<bdi class="name{f" {cls}" if cls else ""}">{esc(text)}</bdi>'


def json_text(value: Any) -> str:
    """JSON for a script element: no character in it can end the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def data(id: str, kind: str, text: str) -> str:
    """A block of data for the page's script; `text` is of `json_text` or base64."""
    return f'<script type="{kind}" id="{id}">{text}</script>'


@cache
def asset(file: str) -> str:
    """The text of a file in `assets`."""
    return (files(__package__) / "assets" / file).read_text(encoding="utf-8")


def template(file: str, **parts: str) -> str:
    """A file in `assets` with HTML for each `$name` in it."""
    return Template(asset(file)).substitute(parts)


def page(title: str, body: str, *, styles: Sequence[str] = (), scripts: Sequence[str] = (), blocks: str = "") -> str:
    """A whole page.

    Args:
        title: of the window; escaped here.
        body: HTML of the body.
        styles, scripts: names of assets beside the shared ones (base.css, base.js).
        blocks: data elements (`data`), behind the body.
    """
    style = "\n".join(asset(file) for file in ("base.css", *styles))
    script = "\n".join(['"use strict";', *(asset(file) for file in ("base.js", *scripts))])
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "body": body, "blocks": blocks, "script": script}
    return template("page.html", title=esc(title), **parts)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"


def section(id: str, title: str, body: str, lead: str = "", tools: str = "") -> str:
    """A section with a heading, a sentence under it (`lead`) and what stands beside it. All but `title` is HTML."""
    head = f'<div class="head"><h2 id="{id}-title">{esc(title)}</h2>{tools}</div>'
    sentence = f'<p class="lead">{lead}</p>' if lead else ""
    return f'<section id="{id}" aria-labelledby="{id}-title">{head}{sentence}{body}</section>'


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, id: str = "", right: Sequence[int] = (),
    classes: Sequence[str] = (), caption: str = "", keys: Sequence[Sequence[float | str]] = (),
) -> str:  # fmt: skip
    """A table; cells are HTML, heads and caption are text.

    Args:
        right: columns of numbers.
        classes: a class for each row.
        keys: for each row what its cells are sorted by: the reader can sort such a table (`sort.js`).
    """
    sides = ['class="num"' if column in right else "" for column in range(len(heads))]
    head = "".join(f'<th scope="col" {side}>{esc(text)}</th>' for text, side in zip(heads, sides, strict=True))
    body = []
    for index, row in enumerate(rows):
        by = [f' data-key="{esc(str(key))}"' for key in keys[index]] if keys else [""] * len(sides)
        cells = "".join(f"<td {side}{key}>{cell}</td>" for cell, side, key in zip(row, sides, by, strict=True))
        body.append(f'<tr class="{classes[index]}">{cells}</tr>' if classes else f"<tr>{cells}</tr>")
    named = (f' id="{id}"' if id else "") + (' class="sortable"' if keys else "")
    above = f'<caption class="unseen">{esc(caption)}</caption>' if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(caption or "table")}">'
        f"<table{named}>{above}<thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def stacked_bar(parts: Iterable[tuple[str, float, str]], label: str, whisker: tuple[float, float] | None = None) -> str:
    """A bar of segments: (class that colours it, share of the whole width from 0 to 1, title). `whisker` is a band."""
    shapes, at = [], 0.0
    for cls, share, title in parts:
        if share > 0:
            shapes.append(
                f'<rect class="{cls}" x="{at * 1000:.2f}" y="4" width="{share * 1000:.2f}" height="16">'
                f"<title>{esc(title)}</title></rect>"
            )
            at += share
    if whisker is not None and whisker[1] > whisker[0]:
        low, high = (min(max(share, 0.0), 1.0) * 1000 for share in whisker)
        shapes.append(f'<path class="whisker" d="M{low:.2f} 1V23M{low:.2f} 12H{high:.2f}M{high:.2f} 1V23"/>')
    return (
        f'<svg class="bar" viewBox="0 0 1000 24" preserveAspectRatio="none" role="img" aria-label="{esc(label)}">'
        f"{''.join(shapes)}</svg>"
    )


def varints(values: Iterable[int]) -> bytes:
    """Unsigned varints, one after another.

    Raises:
        ValueError: a negative value.
    """
    out = bytearray()
    for value in values:
        if value < 0:
            raise ValueError(f"{value} in an unsigned column")
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


def deltas(values: Iterable[int]) -> Iterable[int]:
    """Differences of neighbours in zigzag; the first is that to 0."""
    last = 0
    for value in values:
        change = value - last
        yield change * 2 if change >= 0 else -change * 2 - 1
        last = value


def block(columns: Mapping[str, tuple[str, Sequence[int]]], strings: Mapping[str, Sequence[str]] | None = None) -> str:
    """A block as base64 of DEFLATE of a header line (JSON) and the bytes of the columns.

    Args:
        columns: by name, ("plain" or "delta", values).
        strings: lists of strings by name.
    """
    header: dict[str, object] = {"strings": {name: list(texts) for name, texts in (strings or {}).items()}}
    listed: list[tuple[str, str, int, int]] = []
    parts = []
    for name, (kind, values) in columns.items():
        data = varints(deltas(values) if kind == "delta" else values)
        listed.append((name, kind, len(values), len(data)))
        parts.append(data)
    header["columns"] = listed
    head = json.dumps(header, separators=(",", ":")).encode("ascii")
    return _deflated(head + b"\n" + b"".join(parts))


def packed_text(text: str) -> str:
    """Text as base64 of DEFLATE of its UTF-8."""
    return _deflated(text.encode("utf-8"))


def unpacked_text(packed: str) -> str:
    """The text of `packed_text`: what a page holds of a report, for programs."""
    return zlib.decompress(base64.b64decode(packed), -15).decode("utf-8")


def _deflated(raw: bytes) -> str:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return base64.b64encode(packer.compress(raw) + packer.flush()).decode("ascii")


class Strings:
    """Strings by number, each once, in order of first use."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._numbers = {text: index for index, text in enumerate(strings)}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def listed(self) -> list[str]:
        return list(self._numbers)
