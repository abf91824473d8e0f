"""Stack traces that exporters keep with a node, as frames."""

from __future__ import annotations

import re
from functools import lru_cache

from staticmem.ir.graph import SourceLine

MAX_TRACE = 50_000  # characters; a trace of a hundred frames is about 10,000
_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+), in (\S+)\s*$')


@lru_cache(maxsize=65536)
def source_lines(text: str) -> tuple[SourceLine, ...]:
    """Frames of a traceback as text, outermost first; () where there is none or it is not a traceback."""
    if not text or len(text) > MAX_TRACE:
        return ()
    frames: list[SourceLine] = []
    head: re.Match[str] | None = None
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match:
            if head is not None:
                frames.append(SourceLine(head[1], int(head[2]), head[3], ""))
            head = match
        elif head is not None:
            frames.append(SourceLine(head[1], int(head[2]), head[3], line.strip()))
            head = None
    if head is not None:
        frames.append(SourceLine(head[1], int(head[2]), head[3], ""))
    return tuple(frames)
