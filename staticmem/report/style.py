"""What a terminal can show: colour, Unicode, width. Decided once for a stream, used by the table."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TextIO

from staticmem.ir.record import record

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_ASCII = {"—": "-", "·": "-", "…": "...", "\u00d7": "x", "█": "#", "░": ".", "│": "|", "─": "-", "≤": "<=", "→": "->"}
COLOURS = ("auto", "always", "never")


@record(frozen=True)
class Style:
    """`width` is in columns; None: lines are as long as they need to be."""

    colour: bool = False
    unicode: bool = True
    width: int | None = None

    def paint(self, text: str, *names: str) -> str:
        """`text` in colour, where there is colour."""
        if not self.colour or not names or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"

    def plain(self, text: str) -> str:
        """`text` in the characters that the stream can write, with what a file may have put in its names taken out:
        control characters would move the cursor or change the terminal."""
        text = "".join(c if c.isprintable() else "?" for c in text)
        if self.unicode:
            return text
        for character, replacement in _ASCII.items():
            text = text.replace(character, replacement)
        return text.encode("ascii", "replace").decode("ascii")

    def cut(self, text: str, room: int | None) -> str:
        """`text` in at most `room` columns."""
        if room is None or len(text) <= room:
            return text
        mark = "…" if self.unicode else "..."
        return text[: max(room - len(mark), 0)] + mark if room > len(mark) else text[: max(room, 0)]

    def bar(self, share: float, width: int) -> str:
        """A bar of `share` (0 to 1) of `width` columns; what is not nothing shows."""
        filled = round(share * width)
        if share > 0:
            filled = max(filled, 1)
        return ("█" if self.unicode else "#") * filled


def style_for(stream: TextIO, colour: str = "auto", environment: Mapping[str, str] | None = None) -> Style:
    """The style for a stream. NO_COLOR (any value but empty) and TERM=dumb turn `auto` off; `always` overrides them."""
    env = os.environ if environment is None else environment
    tty = stream.isatty()
    wanted = tty and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    painted = colour == "always" or (colour == "auto" and wanted)
    width = max(shutil.get_terminal_size((100, 24)).columns, 60) if tty else None
    return Style(painted, _can_write(stream), width)


def _can_write(stream: TextIO) -> bool:
    try:
        "█—…".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
