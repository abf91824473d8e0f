"""The process around a command: streams that may be closed or full, and the signal that asks it to end."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
TERMINATED = 128 + signal.SIGTERM  # what a shell gives for a program that the signal ended


class Terminated(BaseException):
    """SIGTERM. Not an Exception: nothing handles it but clean-up."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM unwinds the stack here, so that temporary files go, instead of ending the process at once."""

    def stop(_: int, __: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # a program that calls this has its own way
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def open_closed_streams() -> None:
    """Streams that the caller closed (`>&-`) lead nowhere, instead of to the next file that is opened."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def is_full(error: OSError) -> bool:
    """Whether this is a stream that takes no more; errors of named files have their name."""
    return error.filename is None and error.errno in FULL


def drop_stdout() -> None:
    """What is still in stdout's buffer goes nowhere: Python would complain at its own flush on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str, encoding: str | None) -> str:
    """The text with what the encoding cannot say as escapes: half a surrogate pair, or a name in another encoding."""
    encoding = encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)
