"""Where the report goes: stdout, or a file that is written whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import stat
import sys
import tempfile
from typing import TYPE_CHECKING

from staticmem.cli.streams import printable
from staticmem.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from staticmem.report.formats import Format
    from staticmem.report.model import NoteInfo
    from staticmem.report.text import Style, View


def check_target(path: str, force: bool) -> None:
    """Refuses, before any work, what could not be written after it."""
    if _is_stream(path):
        return
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory", "The output is one file.", "Give a file name in it.", code="SM142")
    if os.path.exists(path) and not force:
        raise UsageError(f"{path} exists", "It would be overwritten.", "Add --force, or choose another name.", "SM142")
    if not os.path.isdir(folder):
        raise UsageError(f"{folder} is not a directory", f"{path} would be in it.", "Make it first.", code="SM142")


def emit(result: object, chosen: Format, args: argparse.Namespace) -> None:
    """Writes a result in a format to where the flags say."""
    put(chosen.render(result, view_of(args)), args)


def warn(notes: Iterable[NoteInfo]) -> None:
    """Warnings of a report, on stderr."""
    from staticmem.report.text import style_for

    style = style_for(sys.stderr, "never")
    for note in notes:
        sys.stderr.write(f"warning: {style.plain(note.text)} [{note.code}]\n")


def put(data: str | bytes, args: argparse.Namespace) -> None:
    """Text or bytes to stdout, or whole into the output file."""
    if args.output in (None, "-"):
        if isinstance(data, str):
            sys.stdout.write(printable(data, sys.stdout.encoding))
        else:
            _put_bytes(data)
        return
    write_atomically(args.output, data)
    sys.stderr.write(f"Wrote {args.output}\n")


def _put_bytes(data: bytes) -> None:
    if sys.stdout.isatty():
        raise UsageError(
            "this format is not text", "It would make a mess of the terminal.", "Give a file: -o FILE.", code="SM143"
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def style_of(args: argparse.Namespace) -> Style:
    """The style of what the flags write to: a file has no colour unless it is asked for."""
    from staticmem.report.text import Style, style_for

    if args.output not in (None, "-"):
        return Style(colour=args.color == "always")
    return style_for(sys.stdout, args.color)


def view_of(args: argparse.Namespace) -> View:
    """How the flags want a result to be shown."""
    from staticmem.report.text import View

    explain, top = getattr(args, "explain_peak", False), getattr(args, "top", None)
    return View(style_of(args), args.units, args.quiet, args.verbose, explain, top)


def _is_stream(path: str) -> bool:
    """Whether it is a pipe or a character device (`/dev/stdout`, `/dev/null`, `>(gzip)`): nothing to overwrite."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def write_atomically(path: str, data: str | bytes) -> None:
    """A reader of `path` sees the old file or the new one, never a part. Links are followed; streams are written to.

    Raises:
        UsageError: it cannot be written. What was there is there still.
    """
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        if _is_stream(path):
            _stream(path, content)
        else:
            _replace(os.path.realpath(path), content)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written", f"{error.strerror or error}.", "Choose another place.", code="SM142"
        ) from error


def _replace(path: str, content: bytes) -> None:
    if os.path.exists(path) and not os.path.isfile(path):  # a disk, a socket: never replaced
        raise OSError(errno.EINVAL, "It is not an ordinary file", path)
    descriptor, temporary = tempfile.mkstemp(prefix=".staticmem-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes it private; a report is an ordinary file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _stream(path: str, content: bytes) -> None:
    # without waiting: a pipe that nobody reads is an error, not a program that hangs
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
