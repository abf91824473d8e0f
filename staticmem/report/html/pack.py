"""Columns of integers and lists of strings, small enough to lie in a page.

A column is unsigned LEB128 varints (7 bits a byte, low bits first, the high bit says that more follow). "plain"
columns are the values; "delta" columns are differences of neighbours in zigzag (0, -1, 1, -2 -> 0, 1, 2, 3), which are
small where values rise slowly. All columns and strings of a block are one raw DEFLATE stream (RFC 1951) in base64: the
page reads it with `DecompressionStream`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence


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
