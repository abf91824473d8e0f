"""Files that users, configs and archives name: opening one never waits, reading one is bounded.

A path may be a pipe that nobody writes to, or a device without an end. What goes wrong is an `OSError` with a
`strerror` that says it, as for files that are not there.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def opened(path: str | os.PathLike[str], seekable: bool = False) -> BinaryIO:
    """The file, open for reading bytes. `seekable`: only an ordinary file will do, because it is not read in order.

    A pipe without a writer reads as empty; of a shell's `<(command)` everything is read.

    Raises:
        OSError: it cannot be opened, or is not an ordinary file where it has to be.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            if seekable:
                raise OSError(errno.EINVAL, f"It is {_kind(mode)}, not an ordinary file", path)
            os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: str | os.PathLike[str], most: int) -> bytes:
    """The contents of a file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, or is larger.
    """
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"It has more than {most >> 20} MiB", path)
    return data


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "a socket"
