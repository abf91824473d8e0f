"""Flags that say how a result is shown and where it goes; shared by all verbs that print one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from staticmem.cli.values import one_of
from staticmem.errors import UsageError
from staticmem.report.formats import Format, Formats

UNITS = ("binary", "decimal", "bytes")


def add_output(parser: argparse.ArgumentParser, formats: Formats) -> argparse._ArgumentGroup:
    """The group "output", to which the verb may add."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "-f", "--format", type=one_of("--format", formats), choices=formats, metavar="FORMAT",
        help="%(choices)s; the first is the default",
    )  # fmt: skip
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


def chosen_format(args: argparse.Namespace, formats: Formats) -> Format:
    """The format that was asked for, else that of the output file's suffix, else the default."""
    if args.format is not None:
        return formats[args.format]
    if args.output in (None, "-"):
        return formats.default
    chosen = formats.of_file(args.output)
    if chosen is None:
        raise UsageError(
            f"no format for '{args.output}'",
            f"The suffix of the output file gives the format: {_either([f'.{s}' for s in formats.suffixes])}.",
            f"Name the file so, or add {_either([f'--format {name}' for name in formats])}.",
            code="SM141",
        )
    return chosen


def _either(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
