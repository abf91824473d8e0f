"""A progress bar on stderr: after half a second of work, and only where somebody looks."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

DELAY = 0.5  # seconds: what is over before that needs no bar
INTERVAL = 0.1  # seconds between two drawings
WIDTH = 30


class Progress:
    """A bar that `update` draws and the end of the `with` block takes away."""

    def __init__(self, what: str, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.what, self.stream = what, stream or sys.stderr
        self.shows = self.stream.isatty() and not quiet
        self.start = time.monotonic()
        self.drawn: float | None = None

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self.shows or now - self.start < DELAY or (self.drawn is not None and now - self.drawn < INTERVAL):
            return
        self.drawn = now
        filled = WIDTH * done // max(total, 1)
        self.stream.write(f"\r{self.what} [{'#' * filled}{'.' * (WIDTH - filled)}] {done:,} of {total:,}")
        self.stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.drawn is not None:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()
