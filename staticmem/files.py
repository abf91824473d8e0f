"""Files that users, configs and archives name: opening one never waits, reading one is bounded.

A path may be a pipe that nobody writes to, or a device without an end. What goes wrong is an `OSError` with a
`strerror` that says it, as for files that are not there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from staticmem.errors import UsageError

# Two writes within a clock tick of the file system leave one time: FAT's ticks are the longest, 2 seconds
SETTLED = 2 * 10**9  # nanoseconds
STDIN = "stdin"  # the file, in a temporary folder, that a model from stdin is kept in
_PREFIX = "staticmem-"  # of temporary folders
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def opened(path: str | os.PathLike[str], seekable: bool = False, own: bool = False) -> BinaryIO:
    """The file, open for reading bytes. `seekable`: only an ordinary file will do, because it is not read in order.
    `own`: only one that this user alone can have written (`not_own`), and no link to it.

    A pipe without a writer reads as empty; of a shell's `<(command)` everything is read.

    Raises:
        OSError: it cannot be opened, or is not an ordinary file where it has to be.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | (getattr(os, "O_NOFOLLOW", 0) if own else 0))
    try:
        status = os.fstat(descriptor)
        mode = status.st_mode
        if own and (why := not_own(status)):
            raise PermissionError(errno.EPERM, why, path)
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


def not_own(status: os.stat_result, folder: bool = False) -> str:
    """Why others than this user may have written a file or a folder; empty where they cannot. Windows does not say."""
    if not (stat.S_ISDIR(status.st_mode) if folder else stat.S_ISREG(status.st_mode)):
        return "it is no folder" if folder else "it is no ordinary file"
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others may write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def unreadable(path: str | os.PathLike[str], error: OSError, code: str) -> UsageError:
    """The error that a user sees where a file of their own cannot be opened or read."""
    why = str(error.strerror or error).rstrip(".")
    return UsageError(f"cannot read {path}", f"{why}.", "Give the path of a file that exists and may be read.", code)


class Stamp(NamedTuple):
    """What the file system says of a file. Whoever writes to it, or puts another in its place, changes some of it."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds
    changed: int


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """The stamp of a file to be read now, which later tells whether that is still what is there.

    None where it would not tell: the file was written so recently that the next write may leave the same time (git
    takes the same care, `racy git`), or there is none.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not 0 <= max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - SETTLED:
        return None
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


_PART = 1 << 22  # bytes: Python allocates what a read may return before it reads


def read(path: str | os.PathLike[str], most: int, own: bool = False) -> bytes:
    """The contents of a file of at most `most` bytes. `own`: as `opened` has it.

    Raises:
        OSError: it cannot be read, or is larger.
    """
    parts: list[bytes] = []
    left = most
    with opened(path, own=own) as file:
        while part := file.read(min(left + 1, _PART)):
            left -= len(part)
            if left < 0:
                raise OSError(errno.EFBIG, f"It has more than {most >> 20} MiB", path)
            parts.append(part)
    return b"".join(parts)


def is_of_stdin(path: str) -> bool:
    """Whether a file is what a verb has read from stdin, as `cli.settings.model_path` names it."""
    folder, name = os.path.split(path)
    return name == STDIN and os.path.basename(folder).startswith(_PREFIX)


@contextlib.contextmanager
def temporary_folder(work: bool = True) -> Iterator[str]:
    """A folder that is gone afterwards. `work`: all that is written within goes there, so a full disk is its own.

    Raises:
        UsageError: there is no place for one, or none left (SM142).
    """
    import tempfile  # only where there is one: its imports take milliseconds

    try:
        holder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    except OSError as error:
        raise _no_room(tempfile.tempdir or "any of the usual places", error) from error
    with holder as folder:
        try:
            yield folder
        except OSError as error:
            if not work or error.errno not in _FULL:
                raise
            raise _no_room(os.path.dirname(folder), error) from error


def _no_room(place: str, error: OSError) -> UsageError:
    return UsageError(
        "no room for temporary files", f"They go to {place}: {error.strerror or error}.",
        "Name a folder where there is room: TMPDIR=FOLDER staticmem ...", "SM142",
    )  # fmt: skip


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "a socket"
