"""`staticmem completion SHELL`: the script that completes verbs, flags and file names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from staticmem.cli.values import one_of

SHELLS = ("bash", "zsh", "tcsh")

DESCRIPTION = "Prints a script that makes the shell complete verbs, flags and file names of staticmem."

EPILOG = """\
to install:
  bash   staticmem completion bash > ~/.local/share/bash-completion/completions/staticmem
  zsh    staticmem completion zsh > "${fpath[1]}/_staticmem"
  tcsh   staticmem completion tcsh > ~/.staticmem.completion.csh && source ~/.staticmem.completion.csh
"""


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser(
        "completion",
        help="a completion script for bash, zsh or tcsh",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("shell", type=one_of("SHELL", SHELLS), metavar="SHELL", help=", ".join(SHELLS))
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")


def run(args: argparse.Namespace) -> int:
    import shtab

    from staticmem.cli.main import make_parser

    parser = make_parser()
    _with_files(parser, shtab.FILE)
    sys.stdout.write(shtab.complete(parser, args.shell).rstrip("\n") + "\n")
    return 0


_FILES = (
    "model",
    "before",
    "after",
    "output",
    "config",
    "profile",
    "report",
    "record",
    "records",
    "gpus_file",
    "prices",
)


def _with_files(parser: argparse.ArgumentParser, complete: Mapping[str, Any]) -> None:
    """Arguments that are paths complete to files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _with_files(verb, complete)
        elif action.dest in _FILES and not action.choices:
            action.complete = complete  # type: ignore[attr-defined]
