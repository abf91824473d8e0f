"""`staticmem init`, `schema` and `completion`: what a project, an editor and a shell are set up with."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from staticmem import files
from staticmem.cli.flags import add_verb, one_of
from staticmem.cli.output import add_debug, check_target, say, write_atomically
from staticmem.errors import UsageError

SCHEMA_NAME = "staticmem.schema.json"
SCHEMAS = (
    "report",
    "config",
    "sweep",
    "levers",
    "sizing",
    "fit",
    "run",
    "why",
    "snapshot-diff",
    "session",
    "serve",
    "serve-sizing",
    "serve-fit",
    "serve-sweep",
)
SHELLS = ("bash", "zsh", "tcsh")

INIT = """\
Writes a commented config, and beside it the JSON Schema with which editors check and complete it.
Neither file is overwritten without --force.
"""

SCHEMA = "Prints a JSON Schema (draft-07): of 'analyze -f json' (report), of configs, of 'sweep -f json'."
COMPLETION = "Prints a script that makes the shell complete verbs, flags and file names of staticmem."

TO_INSTALL = """\
to install:
  bash   staticmem completion bash > ~/.local/share/bash-completion/completions/staticmem
  zsh    staticmem completion zsh > "${fpath[1]}/_staticmem"
  tcsh   staticmem completion tcsh > ~/.staticmem.completion.csh && source ~/.staticmem.completion.csh
"""


def add_init(verbs: Any) -> None:
    parser = add_verb(verbs, "init", init, "write a commented config, staticmem.yaml", INIT)
    about = "the model that the config names (default: model.pt2)"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=about)
    parser.add_argument("-o", "--output", metavar="FILE", default="staticmem.yaml", help="default: staticmem.yaml")
    parser.add_argument("--plan", action="store_true", help="a run of several instants ('staticmem plan' reads it)")
    parser.add_argument("--force", action="store_true", help="overwrite")
    add_debug(parser)


def add_schema(verbs: Any) -> None:
    """Not listed: it is for tools."""
    parser = verbs.add_parser("schema", description=SCHEMA)
    parser.set_defaults(run=schema, parser=parser)
    kind = one_of("schema", SCHEMAS)
    parser.add_argument("kind", nargs="?", default="report", metavar="KIND", type=kind, help=", ".join(SCHEMAS))
    add_debug(parser)


def add_completion(verbs: Any) -> None:
    about = "a completion script for bash, zsh or tcsh"
    parser = add_verb(verbs, "completion", completion, about, COMPLETION, TO_INSTALL)
    parser.add_argument("shell", type=one_of("SHELL", SHELLS), metavar="SHELL", help=", ".join(SHELLS))
    add_debug(parser)


def init(args: argparse.Namespace) -> int:
    from staticmem.config.root import schema  # late: `staticmem --help` imports this module
    from staticmem.config.template import plan_template, template
    from staticmem.frontends.architectures import is_name
    from staticmem.report.schema import dumps

    text = plan_template if args.plan else template
    if args.output == "-":
        sys.stdout.write(text(args.model or "model.pt2", f"./{SCHEMA_NAME}"))
        return 0
    is_path = args.model is not None and not is_name(args.model)
    if is_path and not os.path.exists(args.model):
        hint = "Check the path. Without a model, init writes a config for model.pt2, which you replace."
        raise UsageError(
            f"{args.model} does not exist", "The config would name a model that is not there.", hint, "SM101"
        )
    folder = os.path.dirname(args.output)
    beside, described = os.path.join(folder, SCHEMA_NAME), dumps(schema())
    check_target(args.output, args.force)
    if not _same(beside, described):
        check_target(beside, args.force)
        write_atomically(beside, described)
    model = args.model or "model.pt2"
    if is_path and folder and not os.path.isabs(model):
        model = os.path.relpath(model, folder)
    write_atomically(args.output, text(model, f"./{SCHEMA_NAME}"))
    say(f"Wrote {args.output} and {beside}")
    return 0


def _same(path: str, text: str) -> bool:
    try:
        return files.read(path, 1 << 20).decode("utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def schema(args: argparse.Namespace) -> int:
    from staticmem.config import root  # late: `staticmem --help` imports this module
    from staticmem.report import schema

    described = root.schema() if args.kind == "config" else schema.schema(args.kind)
    sys.stdout.write(schema.dumps(described))
    return 0


def completion(args: argparse.Namespace) -> int:
    import shtab  # late: for this verb alone

    from staticmem.cli.main import make_parser

    parser = make_parser()
    _complete_files(parser, shtab.FILE)
    sys.stdout.write(shtab.complete(parser, args.shell).rstrip("\n") + "\n")
    return 0


FILES = frozenset("model before after output config profile report record records gpus_file prices write".split())


def _complete_files(parser: argparse.ArgumentParser, complete: Mapping[str, Any]) -> None:
    """Arguments that are paths complete to files; those with choices to a tuple of them, which every shtab reads."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _complete_files(verb, complete)
        elif action.choices:
            action.choices = tuple(action.choices)
        elif action.dest in FILES:
            action.complete = complete  # type: ignore[attr-defined]
