"""Where the report goes: stdout, or a file that is written whole or not at all."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import TYPE_CHECKING

from staticmem.errors import UsageError

if TYPE_CHECKING:
    from staticmem.report.model import Report
    from staticmem.report.style import Style


def check_target(path: str, force: bool) -> None:
    """Refuses, before any work, what could not be written after it."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory", "The output is one file.", "Give a file name in it.", code="SM142")
    if os.path.exists(path) and not force:
        raise UsageError(f"{path} exists", "It would be overwritten.", "Add --force, or choose another name.", "SM142")
    if not os.path.isdir(folder):
        raise UsageError(f"{folder} is not a directory", f"{path} would be in it.", "Make it first.", code="SM142")


def emit(report: Report, kind: str, args: argparse.Namespace) -> None:
    """Writes the report in a format to where the flags say."""
    if kind == "json":
        from staticmem.report.json import dumps

        text = dumps(report)
    elif kind == "html":
        from staticmem.report.html import render as render_page

        text = render_page(report, units=args.units)
    elif kind == "md":
        from staticmem.report.report_markdown import render

        text = render(report, args.units)
    else:
        text = _table(report, args)
    put(text, args)


def put(data: str | bytes, args: argparse.Namespace) -> None:
    """Text or bytes to stdout, or whole into the output file."""
    if args.output in (None, "-"):
        if isinstance(data, str):
            sys.stdout.write(data)
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
    from staticmem.report.style import Style, style_for

    if args.output not in (None, "-"):
        return Style(colour=args.color == "always")
    return style_for(sys.stdout, args.color)


def _table(report: Report, args: argparse.Namespace) -> str:
    from staticmem.report.style import style_for
    from staticmem.report.table import render
    from staticmem.report.words import verdict

    style = style_of(args)
    if args.quiet:
        for note in report.warnings:
            sys.stderr.write(f"warning: {style_for(sys.stderr, 'never').plain(note.text)} [{note.code}]\n")
        return style.plain(verdict(report, args.units)) + "\n"
    return render(report, style, args.units, args.verbose, args.explain_peak)


def write_atomically(path: str, data: str | bytes) -> None:
    """A reader of `path` sees the old file or the new one, never a part."""
    folder = os.path.dirname(path) or "."
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".staticmem-", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data.encode("utf-8") if isinstance(data, str) else data)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes it private; a report is an ordinary file
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written", f"{error.strerror or error}.", "Choose another place.", code="SM142"
        ) from error
