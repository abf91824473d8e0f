"""Where results go and how they look: flags of output, files that are written whole or not at all, a progress bar."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from staticmem.cli.flags import one_of
from staticmem.errors import UsageError
from staticmem.report.formats import Format, Formats
from staticmem.report.text import Style, View, style_for

if TYPE_CHECKING:
    from staticmem.report.model import NoteInfo

UNITS = ("binary", "decimal", "bytes")
COLOURS = ("auto", "always", "never")


def add_output(parser: argparse.ArgumentParser, formats: Formats) -> argparse._ArgumentGroup:
    """The group "output", to which the verb may add."""
    output = parser.add_argument_group("output")
    about, kind = "%(choices)s; the first is the default", one_of("--format", formats)
    output.add_argument("-f", "--format", type=kind, choices=formats, metavar="FORMAT", help=about)
    output.add_argument("-o", "--output", metavar="FILE", help="write to a file; its suffix gives the format")
    output.add_argument("--force", action="store_true", help="overwrite the output file")
    about, units = "binary (default, GiB), decimal (GB), bytes", one_of("--units", UNITS)
    output.add_argument("--units", type=units, default="binary", metavar="UNITS", help=about)
    about, colours = "auto (default), always, never", one_of("--color", COLOURS)
    output.add_argument("--color", type=colours, default="auto", metavar="WHEN", help=about)
    output.add_argument("-q", "--quiet", action="store_true", help="only the most important line")
    output.add_argument("-v", "--verbose", action="store_true", help="show more of the decisions")
    add_debug(output)
    return output


def add_debug(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def chosen_format(args: argparse.Namespace, formats: Formats) -> Format:
    """The format of --format, else that of the output file's suffix, else the default.

    Raises:
        UsageError: the result has no such format, the suffix names none, or the file could not be written.
    """
    to_file = args.output not in (None, "-")
    if to_file:
        check_target(args.output, args.force)
    if args.format is not None and args.format not in formats:  # the flag has those of all that the verb may show
        why, hint = f"This result is shown as {_either(list(formats))}.", f"Example: -f {formats.default.name}"
        raise UsageError(f"no format '{args.format}' for this", why, hint, "SM141")
    if args.format is not None:
        return formats[args.format]
    chosen = formats.of_file(args.output) if to_file else formats.default
    if chosen is None:
        why = f"The suffix of the output file gives the format: {_either([f'.{s}' for s in formats.suffixes])}."
        hint = f"Name the file so, or add {_either([f'--format {name}' for name in formats])}."
        raise UsageError(f"no format for '{args.output}'", why, hint, "SM141")
    return chosen


def _either(choices: Sequence[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def check_target(path: str, force: bool) -> None:
    """Refuses, before any work, what could not be written after it."""
    if _is_stream(path):
        return
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory", "The output is one file.", "Give a file name in it.", "SM142")
    if os.path.exists(path) and not force:
        raise UsageError(f"{path} exists", "It would be overwritten.", "Add --force, or choose another name.", "SM142")
    if not os.path.isdir(folder):
        raise UsageError(f"{folder} is not a directory", f"{path} would be in it.", "Make it first.", "SM142")


def emit(result: object, chosen: Format, args: argparse.Namespace) -> None:
    """Writes a result in a format to where the flags say."""
    put(chosen.render(result, view_of(args)), args)


def warn(notes: Iterable[NoteInfo]) -> None:
    """Warnings of a report, on stderr."""
    style = style_for(sys.stderr, "never")
    for note in notes:
        sys.stderr.write(f"warning: {style.plain(note.text)} [{note.code}]\n")


def say(text: str) -> None:
    """A line on stderr, in which names of files do nothing to the terminal."""
    sys.stderr.write(style_for(sys.stderr, "never").plain(text) + "\n")


def put(data: str | bytes, args: argparse.Namespace) -> None:
    """Text or bytes to stdout, or whole into the output file."""
    if args.output not in (None, "-"):
        write_atomically(args.output, data)
        say(f"Wrote {args.output}")
    elif isinstance(data, str):
        sys.stdout.write(encodable(data, sys.stdout.encoding))
    elif sys.stdout.isatty():
        hint = "Give a file: -o FILE."
        raise UsageError("this format is not text", "A terminal cannot show it.", hint, "SM143")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)


def encodable(text: str, encoding: str | None) -> str:
    """The text with what the encoding lacks as escapes: half a surrogate pair, or a name in another encoding."""
    encoding = encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def view_of(args: argparse.Namespace) -> View:
    """How a result is shown, by the flags. A file has no colour, unless --color always is given."""
    to_file = args.output not in (None, "-")
    style = Style(colour=args.color == "always") if to_file else style_for(sys.stdout, args.color)
    explain, top = getattr(args, "explain_peak", False), getattr(args, "top", None)
    return View(style, args.units, args.quiet, args.verbose, explain, top)


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
        UsageError: it cannot be written. The old file is kept.
    """
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        if _is_stream(path):
            _stream(path, content)
        else:
            _replace(os.path.realpath(path), content)
    except OSError as error:
        why = f"{error.strerror or error}."
        raise UsageError(f"{path} cannot be written", why, "Choose another place.", "SM142") from error


def _replace(path: str, content: bytes) -> None:
    import tempfile  # late: its imports take milliseconds

    if os.path.exists(path) and not os.path.isfile(path):  # a disk, a socket: never replaced
        raise OSError(errno.EINVAL, "It is not an ordinary file", path)
    descriptor, temporary = tempfile.mkstemp(prefix=".staticmem-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, _mode(path))  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _mode(path: str) -> int:
    """The rights of the file that is replaced; those of any new file, where there is none."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _stream(path: str, content: bytes) -> None:
    # non-blocking: a pipe without a reader is an error, and the program does not hang
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


DELAY = 0.5  # seconds: work that ends before needs no bar
INTERVAL = 0.1  # seconds between two drawings
TICK = 1.0  # seconds after which a line is drawn again where nothing is heard of the work
WIDTH = 30


class Progress:
    """A line on stderr that says what is done, only on a terminal, and that the end of the `with` block takes away: a
    bar where `update` has counted pieces, else the words of `doing`. A thread draws it where nothing is heard for long.

    The time that is left is that of the pieces since the first `update`: what came before it was other work.
    """

    def __init__(
        self, what: str, quiet: bool = False, doing: str = "", stream: TextIO | None = None, model: str = ""
    ) -> None:
        """`what` is counted, and `doing` is the work before anything is: by default what is done with a model."""
        self.what, self.doing, self.model, self.stream = what, doing, model, stream or sys.stderr
        self.shows = self.stream.isatty() and not quiet
        self.start = time.monotonic()
        self.first: tuple[float, int] | None = None  # time and pieces of the first update
        self.pieces = (0, 0)  # that are done, and all
        self.drawn: float | None = None
        self.lines: list[str] = []  # that are not written yet
        self.lock, self.ended = threading.Lock(), threading.Event()

    def update(self, done: int, total: int, line: str = "") -> None:
        """Draws the bar; `line` is what is known since, and stays above it."""
        now = time.monotonic()
        self.first = self.first or (now, done)
        self.pieces = done, total
        if line:
            self.lines.append(style_for(self.stream, "never").plain(line))
        early = self.drawn is not None and now - self.drawn < INTERVAL and not self.lines
        if self.shows and now - self.start >= DELAY and not early:
            self._draw(now)

    def begin(self, doing: str, what: str = "") -> None:
        """What is done from now on, of which no pieces are counted until the next `update`, which counts `what`."""
        self.doing, self.what, self.first = doing, what or self.what, None

    def _draw(self, now: float) -> None:
        with self.lock:
            if self.ended.is_set():
                return
            self.drawn = now
            self.stream.write("".join(f"\r\x1b[2K{line}\n" for line in self.lines))
            self.lines.clear()
            self.stream.write(f"\r\x1b[2K{self._describe(now)}")
            self.stream.flush()

    def _describe(self, now: float) -> str:
        if self.first is None:
            doing = self.doing or _describe_reading(self.model)
            return f"{style_for(self.stream, 'never').plain(doing)}, {now - self.start:.0f} s"
        (begun, before), (done, total) = self.first, self.pieces
        filled = WIDTH * done // max(total, 1)
        bar = f"{self.what} [{'#' * filled}{'.' * (WIDTH - filled)}] {done:,} of {total:,}"
        if done > before:
            bar += f", about {math.ceil((now - begun) * (total - done) / (done - before)):,} s left"
        return bar

    def _tick(self) -> None:
        while not self.ended.wait(TICK):
            now = time.monotonic()
            if self.drawn is None or now - self.drawn >= TICK:
                self._draw(now)

    def __enter__(self) -> Progress:
        if self.shows:
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with self.lock:
            self.ended.set()
            if self.drawn is not None:
                self.stream.write("\r\x1b[2K")
                self.stream.flush()


def _describe_reading(model: str) -> str:
    """What is done with a file, with a model of the package, or with a config or a name that packages build."""
    if model.startswith("models:") or (os.path.isfile(model) and not model.lower().endswith(".json")):
        return f"reading {model} and running its step"
    return f"building and recording {model}, which is kept for the next time"


def check_folder(folder: str, names: Sequence[str], force: bool) -> None:
    """Refuses, before any work, what could not be written after it."""
    if os.path.isdir(folder):
        for name in names:
            check_target(os.path.join(folder, name), force)
    elif os.path.lexists(folder):
        raise UsageError(f"{folder} is not a directory", "Settings are several files.", "Name a folder.", "SM142")


def write_all(folder: str, texts: Mapping[str, str]) -> None:
    """Writes texts by the names of their files into a folder, which is made, and says where they are."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why, hint = f"{error.strerror or error}.", "Choose another place."
        raise UsageError(f"{folder} cannot be made", why, hint, "SM142") from error
    for name, text in texts.items():
        write_atomically(os.path.join(folder, name), text)
    say(f"Wrote {', '.join(os.path.join(folder, name) for name in texts)}")
