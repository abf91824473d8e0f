"""`staticmem doctor`: what is installed, what it is used for, and what is wrong with it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from staticmem.cli.reporting import add_output, chosen_format

DESCRIPTION = """\
The versions of staticmem, Python and the packages that it uses or can use, what each is for, the age of the hardware
data, and what the terminal can show. Exit code 1 if something that is needed is missing or too old.
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "doctor",
        help="what is installed and what is missing",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    add_output(parser, ("table", "json"))


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 where a required package is missing or too old."""
    from staticmem.cli.environment import inspect, problems
    from staticmem.cli.output import check_target, put, style_of

    if args.output not in (None, "-"):
        check_target(args.output, args.force)
    kind = chosen_format(args, {"txt": "table", "json": "json"}, "table")
    found = inspect(encoding=sys.stdout.encoding or "ascii")
    wrong = problems(found)
    if kind == "json":
        from staticmem.report.json import plain_text

        put(plain_text(found), args)
        return 1 if wrong else 0
    style = style_of(args)
    lines = [style.paint(f"staticmem {found.staticmem}, Python {found.python}, {found.platform}", "bold"), ""]
    wide = max(len(p.name) for p in found.packages)
    for package in found.packages:
        state = package.version or ("missing" if package.required else "not installed")
        colour = "green" if package.version and not package.problem else "red" if package.required else "dim"
        line = f"  {package.name:<{wide}}  {style.paint(f'{state:<16}', colour)}  {package.use}"
        lines.append(line + (f" ({package.problem})" if package.problem else ""))
    lines += ["", f"  hardware data of {found.hardware_data}; output in {found.encoding}", ""]
    lines.append(style.paint(style.plain("; ".join(wrong) if wrong else "Everything that is needed is here."), "bold"))
    put("\n".join(lines[-1:] if args.quiet else lines) + "\n", args)
    return 1 if wrong else 0
