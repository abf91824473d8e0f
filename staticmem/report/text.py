"""Results as plain text: what a terminal can show, aligned columns, CSV, and texts from files made harmless."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TextIO

from staticmem.ir.record import record
from staticmem.units import format_bytes

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_NARROWEST = 12  # columns that a text keeps, however narrow the terminal
_BETWEEN_WORDS = (" ", ".", "/", ":")
_ASCII = {"—": "-", "·": "-", "…": "...", "\u00d7": "x", "█": "#", "░": ".", "│": "|", "─": "-", "≤": "<=", "→": "->"}


def printable(text: str, instead: str = " ") -> str:
    """Text that a file may have put there, with every character replaced that has no shape of its own.

    Control characters would move a cursor or begin another line; those that turn the direction of what follows are in
    names only to deceive. `instead` may have the code point in it: `<{:04X}>`.
    """
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else instead.format(ord(c)) for c in text])


@record(frozen=True)
class Style:
    """What a stream can show. `width` is in columns; None: lines are as long as they need to be."""

    colour: bool = False
    unicode: bool = True
    width: int | None = None

    def paint(self, text: str, *names: str) -> str:
        """`text` in colour, where there is colour."""
        if not self.colour or not text or not any(names):
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names if name)}m{text}\x1b[0m"

    def plain(self, text: str) -> str:
        """`text` in the characters that the stream can write, without what would change the terminal."""
        text = printable(text, "?")
        if self.unicode:
            return text
        for character, replacement in _ASCII.items():
            text = text.replace(character, replacement)
        return text.encode("ascii", "replace").decode("ascii")

    def cut(self, text: str, room: int | None) -> str:
        """`text` in at most `room` columns, cut between words where one ends in the second half of the room."""
        if room is None or len(text) <= room:
            return text
        mark = "…" if self.unicode else "..."
        if room <= len(mark):
            return text[: max(room, 0)]
        text = text[: room - len(mark)]
        end = max(map(text.rfind, _BETWEEN_WORDS))
        return (text[:end].rstrip(" ,;:(") if end > len(text) // 2 else text) + mark


def style_for(stream: TextIO, colour: str = "auto", environment: Mapping[str, str] | None = None) -> Style:
    """The style for a stream. NO_COLOR (any value but empty) and TERM=dumb turn `auto` off; `always` overrides them."""
    env = os.environ if environment is None else environment
    tty = stream.isatty()
    wanted = tty and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    painted = colour == "always" or (colour == "auto" and wanted)
    width = max(shutil.get_terminal_size((100, 24)).columns, 60) if tty else None
    try:
        "█—…".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return Style(painted, False, width)
    return Style(painted, True, width)


@record(frozen=True)
class View:
    """How a result is shown. `units` is as in `units.format_bytes`; `quiet` asks for the most important line alone.

    `explain` lists everything alive at the peak; `top` is how many rows of a kind are listed, where not all are.
    """

    style: Style = Style()
    units: str = "binary"
    quiet: bool = False
    verbose: bool = False
    explain: bool = False
    top: int | None = None

    def size(self, nbytes: int, digits: int | None = None) -> str:
        """Bytes as text."""
        return format_bytes(nbytes, self.units, digits)

    def line(self, text: str) -> str:
        """One line of text, harmless and with its line break."""
        return f"{self.style.plain(text)}\n"


PLAIN = View()


class Text:
    """The lines of a result for a terminal, section by section."""

    def __init__(self, view: View) -> None:
        self.view, self.style, self.lines = view, view.style, list[str]()

    def add(self, text: str, colour: str = "") -> None:
        """A line as it is."""
        self.lines.append(self.style.paint(self.style.plain(text), colour))

    def heading(self, text: str, colour: str = "bold") -> None:
        """The first line of a section, with an empty one above it."""
        if self.lines:
            self.lines.append("")
        self.add(text, colour)

    def columns(
        self,
        rows: Sequence[Sequence[str]],
        right: Container[int] = (),
        *,
        whole: Container[int] = (),
        optional: Iterable[int] = (),
    ) -> None:
        """Aligned rows without heads, indented; the arguments are those of `columns`."""
        self.lines += columns(rows, self.style, right, indent="  ", whole=whole, optional=optional, heads=False)

    def wrap(self, text: str, indent: str = "", first: str | None = None, colour: str = "") -> None:
        """Lines of at most the terminal's width (100 where there is none), with a hanging indent."""
        import textwrap  # late: half a millisecond, and not every result has sentences

        width = min(self.style.width or 100, 120)
        lines = textwrap.wrap(
            self.style.plain(text), width, initial_indent=indent if first is None else first, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        self.lines += [self.style.paint(line, colour) for line in lines] if colour else lines

    def answer(self, text: str, *reasons: str, next_step: str = "") -> None:
        """The first lines: what the user came for, why it is so, and what to do next."""
        self.wrap(text, colour="bold")
        for reason in filter(None, reasons):
            self.wrap(reason)
        if next_step:
            self.wrap(next_step, colour="dim")

    def add_assumptions(self, assumed: Sequence[str]) -> None:
        """What the figures assume because nobody said it, a line each below an empty one."""
        self.lines += [""] * bool(assumed)
        for text in assumed:
            self.wrap(f"assumed: {text}", "    ", "  ")

    def end(self) -> str:
        """The text, with its line break."""
        return "\n".join(self.lines) + "\n"


def columns(
    rows: Sequence[Sequence[str]],
    style: Style,
    right: Container[int] = (),
    *,
    indent: str = "",
    widest: Mapping[int, int] | None = None,
    optional: Iterable[int] = (),
    colour: Callable[[int, int, str], str] | None = None,
    whole: Container[int] = (),
    heads: bool = True,
) -> list[str]:
    """Rows of the same length as aligned lines; an empty row is a rule.

    Where the terminal is narrower than the table, columns of `optional` are left out, and then the widest texts are
    cut. Below the table a line names what was left out, by the heads in its first row.

    Args:
        right: columns of numbers, which are aligned to the right, and never cut.
        whole: other columns that are never cut.
        heads: the first row has the heads of the columns.
        widest: the most that a column may take; longer texts are cut.
        optional: columns that may be left out, from the least important on.
        colour: the name of a colour, or nothing, by the numbers of row and column, and the text.
    """
    table = [[style.plain(cell) for cell in row] for row in rows]
    widths = dict(enumerate(max(map(len, column)) for column in zip(*filter(None, table), strict=True)))
    for column, most in (widest or {}).items():
        widths[column] = min(widths[column], most)
    missing: list[str] = []
    if style.width is not None:
        dropped = _fit(widths, style.width - len(indent), optional, lambda column: column in right or column in whole)
        missing = [table[0][column] for column in dropped if heads and table[0][column]]
    lines = []
    for number, row in enumerate(table):
        cells = []
        for column, width in widths.items():
            text = style.cut(row[column], width) if row else "-" * width
            padding = " " * (width - len(text))
            if colour is not None:
                text = style.paint(text, colour(number, column, text))
            cells.append(padding + text if column in right else text + padding)
        lines.append((indent + "  ".join(cells)).rstrip())
    if missing:
        assert style.width is not None
        lines += _wrapped(f"not shown at this width: {', '.join(missing)}", style.width, indent)
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    import textwrap  # late: half a millisecond, and not every result has sentences

    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _fit(widths: dict[int, int], room: int, optional: Iterable[int], uncut: Callable[[int], bool]) -> list[int]:
    """Takes columns and widths away until the table fits; the columns that are gone. What is `uncut` is never cut."""

    def excess() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - room

    gone: list[int] = []
    for column in optional:
        if excess() <= 0:
            break
        if widths.pop(column, None) is not None:
            gone.append(column)
    texts = [column for column in widths if not uncut(column)]
    while texts and excess() > 0:
        widest = max(texts, key=lambda column: widths[column])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    return sorted(gone)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """CSV. Text that a spreadsheet would run as a formula is quoted: names are from files."""
    import csv  # late: few results are written as CSV
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows([[_not_a_formula(cell) for cell in row] for row in rows])
    return stream.getvalue()


def _not_a_formula(cell: object) -> object:
    """A lone sign is none."""
    formula = isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") and cell not in ("+", "-")
    return f"'{cell}" if formula else cell
