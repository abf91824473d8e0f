"""`staticmem explain CODE`: what a code of an error or a note means, and what to do."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from staticmem.cli.flags import add_verb
from staticmem.cli.output import add_debug
from staticmem.documents import read_yaml
from staticmem.errors import UsageError, closest

DESCRIPTION = "What the code of an error, warning or assumption means. Without a code, the list of all."

KINDS = {
    "SM1": "input",
    "SM2": "coverage, and what a file contains",
    "SM3": "assumptions and levers",
    "SM4": "hardware",
    "SM5": "the ONNX Runtime",
    "SM6": "serving engines",
}


def add_explain(verbs: Any) -> None:
    parser = add_verb(verbs, "explain", run, "what a code such as SM301 means", DESCRIPTION)
    parser.add_argument("code", metavar="CODE", nargs="?", help="for example SM301")
    add_debug(parser)


def entries() -> dict[str, tuple[str, str]]:
    """Title and text of every code."""
    texts = read_yaml(str(Path(__file__).with_name("codes.yaml"))).plain()  # a code that is there twice is an error
    return {code: (entry["title"], entry["text"]) for code, entry in texts.items()}


def entry_of(given: str) -> tuple[str, str, str]:
    """A code as it is written, with its title and text.

    Raises:
        UsageError: there is no such code.
    """
    codes = entries()
    code = given.strip().strip("[]").upper()
    code = f"SM{code}" if code.isdigit() else code
    if code not in codes:
        why = "Codes are SM and three digits; 'staticmem explain' lists them."
        raise UsageError(f"unknown code '{given}'", why, closest(code, codes), "SM134")
    return code, *codes[code]


def run(args: argparse.Namespace) -> int:
    if args.code is None:
        lines = [f"{code}  {title}" for code, (title, _) in entries().items()]
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    code, title, text = entry_of(args.code)
    sys.stdout.write(f"{code}: {title} ({KINDS[code[:3]]})\n\n{textwrap.fill(text, 100)}\n")
    return 0
