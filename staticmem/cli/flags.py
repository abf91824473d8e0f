"""Flags of the declared options, and readers of what other flags take. One flag means one thing in every verb.

A flag that is not given is None, so that a config can fill it and `Request` decides the defaults.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

from staticmem.errors import UsageError
from staticmem.scenario.combinations import LARGEST, check
from staticmem.scenario.compiling import WHOLE
from staticmem.scenario.options import HOST, OUTPUT, SERVING, SESSION, Option, unknown
from staticmem.scenario.request import OPTIONS

if TYPE_CHECKING:
    from staticmem.studies.sizing_search import GrownSize

# kinds of options whose flags are checked while they are parsed: the noun and the code of the error
ERRORS = {
    "whole": ("a size", "SM110"),
    "bytes": ("an amount of memory", "SM110"),
    "resolution": ("a resolution", "SM110"),
    "dims": ("NAME=N", "SM110"),
    "segments": ("a number of segments", "SM160"),
}
Convert = Callable[[str], Any]


EVERYDAY = "--batch --resolution --dim --mode --optimizer --amp --checkpoint --gpu --output --format".split()
# groups of flags that many verbs share: of the others `-h` has all
SHARED = ("settings", "sizes", "the step", "levers of the step", "the device", HOST, SERVING, SESSION, "output")


def print_short_help(parser: argparse.ArgumentParser) -> None:
    """`-h`: the help of a verb without the flags that few steps need, on a screen, and where those are."""
    flags = [action for action in parser._actions if action.option_strings]
    if len(flags) < 30:  # it has the same help for -h and --help
        parser.print_help()
        return
    own = [a for group in parser._action_groups[2:] if group.title not in SHARED for a in group._group_actions]
    everyday = [_shortened(a) for a in flags if a in own or set(a.option_strings) & set(EVERYDAY)]
    operands = " ".join(str(a.metavar) for a in parser._actions if not a.option_strings)
    formatter = parser._get_formatter()
    formatter.add_usage(f"{parser.prog} {operands} [flags]", [], [])
    formatter.add_text(parser.description)
    formatter.start_section("flags of every day")
    formatter.add_arguments(everyday)
    formatter.end_section()
    formatter.add_text("\n".join((parser.epilog or "").splitlines()[:9]))  # four examples
    formatter.add_text(f"'{parser.prog} --help' has all {len(flags)} flags and more examples.")
    sys.stdout.write(formatter.format_help())


def _shortened(action: argparse.Action) -> argparse.Action:
    """The same flag with the first five of a long list of names in its help."""
    short = copy(action)
    short.help = re.sub(r"((?:[\w-]+, ){5})[\w-]+(?:, [\w-]+){4,}", r"\1...", action.help or "")
    return short


def add_verb(verbs: Any, name: str, run: Callable[..., int], about: str, description: str, epilog: str = "") -> Any:
    """The parser of a verb. `run` gives the exit code."""
    parser = verbs.add_parser(
        name,
        help=about,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", action="help", help="the flags of every day")  # printed by main, which reads it first
    parser.add_argument("--help", action="help", help="all flags")
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_model(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """The model; `optional` where a config may name it (`settings.model_of` resolves that)."""
    about, several = "an .onnx or .pt2 file, - for stdin, or models:resnet50, an example", None
    if optional:
        about, several = f"{about}; may be left out where a config names it", "?"
    parser.add_argument("model", metavar="MODEL", nargs=several, help=about)


def add_scenario(parser: argparse.ArgumentParser, many_gpus: bool = False) -> None:
    """The groups "settings", "sizes", "the step", its levers, and "the device"."""
    config = parser.add_argument_group("settings")
    about = "a config (default: staticmem.yaml from here up to the repository's root)"
    config.add_argument("--config", metavar="FILE", help=about)
    config.add_argument("--no-config", action="store_true", help="no config file but that of --config")
    repeatable = ("gpu",) if many_gpus else ()
    add_options(parser, (one for one in OPTIONS.values() if one.group != OUTPUT), repeatable)


def add_max_dim(group: argparse._ActionsContainer, about: str) -> None:
    """The flag that asks for the largest size of a dimension."""
    group.add_argument("--max-dim", metavar="NAME", help=about)


def asked_largest(args: argparse.Namespace) -> GrownSize:
    """What --max-batch or --max-dim asks the largest size of.

    Raises:
        UsageError: both are given, or a meter that says nothing of a GPU.
    """
    from staticmem.studies.sizing_search import GrownSize  # late: --help needs no engine

    given = {name: getattr(args, name, None) for name in ("max_batch", "max_dim", "meter")}
    check(LARGEST, {name: value for name, value in given.items() if value not in (None, False)})
    return GrownSize(args.max_dim)


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option], repeatable: Iterable[str] = ()) -> None:
    """The flags of options, in the groups that they name."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for one in options:
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group(one.group)
        add_flag(groups[one.group], one, one.name in repeatable)


def add_flag(group: argparse._ActionsContainer, one: Option, repeatable: bool = False) -> None:
    """The flag of an option."""
    names = (one.letter, one.flag) if one.letter else (one.flag,)
    keywords: dict[str, Any] = {"dest": one.name, "default": None, "help": one.about + one.choices_text}
    if one.kind == "switch":
        keywords["action"] = argparse.BooleanOptionalAction if one.default else "store_true"
        keywords["help"] += " (on by default)" if one.default else ""
    else:
        keywords |= {"metavar": one.metavar, "type": _reader(one)}
        if one.kind in ("dims", "names", "modules") or repeatable:
            keywords |= {"action": "append", "help": f"{one.about}; repeatable"}
        if one.kind == "modules":
            keywords |= {"nargs": "?", "const": WHOLE}
    group.add_argument(*names, **keywords)


def _reader(one: Option) -> Convert:
    """`Request` checks choices and texts."""
    if one.kind in ("fraction", "factor"):
        return float
    return reads(one.flag, one.kind, one.example) if one.kind in ERRORS else str


def reads(flag: str, kind: str, example: str = "", noun: str = "", code: str = "") -> Convert:
    """Reads the text of a flag as the kind of an option is read anywhere."""

    def convert(text: str) -> Any:
        # late: kinds are loaded where there is a value to read
        from staticmem.documents import DocumentError, of_plain
        from staticmem.scenario.kinds import kind_of, plain

        try:
            value = plain(kind, text)
            if kind == "dims" and "" in value:
                raise DocumentError("", "It gives an open dimension of the model a size.", "Example: seq=128")
            return kind_of(Option(flag, None, "", kind=kind, example=example)).read(of_plain(value, flag, flag))
        except DocumentError as error:
            hint = error.hint.replace("Example: ", f"Example: {flag} ").replace("40 GiB", example or "64MiB")
            if kind == "whole" and "," in text:
                hint = f"Several are tried with 'staticmem sweep --what-if {flag.removeprefix('--')}={text}'."
            what = f"{flag} '{text}' is not {noun or ERRORS[kind][0]}"
            raise UsageError(what, error.why, hint, code or ERRORS[kind][1]) from None

    return convert


def positive(flag: str) -> Convert:
    """A whole number of at least 1."""
    return reads(flag, "whole")


def byte_size(flag: str) -> Convert:
    """An amount of memory: `64MiB`, `1.5GB`, `4096`."""
    return reads(flag, "bytes")


def increase(flag: str) -> Callable[[str], Callable[[int], int]]:
    """`512MiB`, or `5%` of the base: gives the bytes of growth that are allowed."""

    def convert(text: str) -> Callable[[int], int]:
        if text.endswith("%"):
            number = text[:-1].strip()
            if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", number, re.ASCII):
                return lambda base: int(base * float(number) / 100)
            why, hint = "It is a number of at least 0.", f"Example: {flag} 5%"
            raise UsageError(f"{flag} '{text}' is not a percentage", why, hint, "SM110")
        size = byte_size(flag)(text)
        return lambda _: int(size)

    return convert


def one_of(flag: str, choices: Iterable[str]) -> Callable[[str], str]:
    """One of some choices."""

    def convert(text: str) -> str:
        if text not in choices:
            raise unknown(flag.lstrip("-"), text, choices)
        return text

    return convert


def add_jobs(group: argparse._ActionsContainer) -> None:
    """How many processes work: by default one for each core that this one may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    about = "local processes (default: one a core)"
    group.add_argument("-j", "--jobs", type=positive("--jobs"), default=cores, metavar="N", help=about)
