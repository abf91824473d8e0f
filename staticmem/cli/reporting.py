"""Flags that say how a result is shown and where it goes; shared by all verbs that print one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from staticmem.cli.values import one_of
from staticmem.errors import UsageError

UNITS = ("binary", "decimal", "bytes")


def add_output(parser: argparse.ArgumentParser, formats: Sequence[str]) -> argparse._ArgumentGroup:
    """The group "output", to which the verb may add; the first of `formats` is the default."""
    output = parser.add_argument_group("output")
    listed = ", ".join((f"{formats[0]} (default)", *formats[1:]))
    output.add_argument("-f", "--format", type=one_of("--format", formats), metavar="FORMAT", help=listed)
    output.add_argument("-o", "--output", metavar="FILE", help="write to a file; its suffix gives the format")
    output.add_argument("--force", action="store_true", help="overwrite the output file")
    output.add_argument(
        "--units", type=one_of("--units", UNITS), default="binary", metavar="UNITS",
        help="binary (default, GiB), decimal (GB), bytes",
    )  # fmt: skip
    output.add_argument(
        "--color", type=one_of("--color", ("auto", "always", "never")), default="auto", metavar="WHEN",
        help="auto (default), always, never",
    )  # fmt: skip
    output.add_argument("-q", "--quiet", action="store_true", help="only the most important line")
    output.add_argument("-v", "--verbose", action="store_true", help="more of what was decided on the way")
    output.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return output


def chosen_format(args: argparse.Namespace, suffixes: Mapping[str, str], default: str) -> str:
    """The format that was asked for, else that of the output file's suffix, else `default`.

    Args:
        suffixes: formats by suffix without its first dot; of those that fit the longest counts.
    """
    if args.format is not None:
        return str(args.format)
    if args.output in (None, "-"):
        return default
    name = args.output.lower()
    suffix = max((known for known in suffixes if name.endswith(f".{known}")), key=len, default="")
    if not suffix:
        flags = [f"--format {kind}" for kind in dict.fromkeys(suffixes.values())]
        raise UsageError(
            f"no format for '{args.output}'",
            f"The suffix of the output file gives the format: {_either(suffixes)}.",
            f"Name the file so, or add {_either(flags, dot='')}.",
            code="SM141",
        )
    return suffixes[suffix]


def _either(words: Mapping[str, str] | Sequence[str], dot: str = ".") -> str:
    *first, last = [f"{dot}{word}" for word in words]
    return f"{', '.join(first)} or {last}" if first else last
