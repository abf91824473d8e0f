"""Flags that say what is analysed: sizes, the step, the device. One flag means one thing in every verb.

A flag that is not given is None, so that a config file can fill it and `Request` has the last word on defaults.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from staticmem.cli.values import ERRORS, read_by
from staticmem.errors import UsageError
from staticmem.scenario.options import OUTPUT, Option
from staticmem.scenario.request import OPTIONS, Request, request_of

if TYPE_CHECKING:
    from staticmem.config.config import Config


def add_model(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """The model; `optional` where a config may name it (`model_of` resolves that)."""
    text = "an .onnx or .pt2 file, or - for stdin"
    if optional:
        parser.add_argument(
            "model", metavar="MODEL", nargs="?", help=f"{text}; may be left out where a config names it"
        )
    else:
        parser.add_argument("model", metavar="MODEL", help=text)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Flags of the config file, which flags override."""
    config = parser.add_argument_group("settings")
    config.add_argument(
        "--config", metavar="FILE", help="a config (default: staticmem.yaml from here up to the repository's root)"
    )
    config.add_argument("--no-config", action="store_true", help="no config file but that of --config")


def add_scenario(parser: argparse.ArgumentParser, many_gpus: bool = False) -> None:
    """The groups "settings", "sizes", "the step", its levers, and "the device"."""
    add_config(parser)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for one in OPTIONS.values():
        if one.group == OUTPUT:  # `--top` is of the verbs that list tensors
            continue
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group(one.group)
        add_flag(groups[one.group], one, repeatable=many_gpus and one.name == "gpu")


def add_flag(group: argparse._ActionsContainer, one: Option, repeatable: bool = False) -> None:
    """The flag of an option."""
    names = (one.letter, one.flag) if one.letter else (one.flag,)
    about = one.about if repeatable else one.about + one.choices_text
    action: Any = "store_true"
    if one.kind == "switch":
        if one.default is True:
            action, about = argparse.BooleanOptionalAction, f"{one.about} (default)"
        group.add_argument(*names, action=action, dest=one.name, default=None, help=about)
        return
    action = "append" if repeatable or one.kind in ("dims", "names") else "store"
    if action == "append":
        about += "; repeatable"
    group.add_argument(
        *names, action=action, dest=one.name, type=value_of(one), default=None, metavar=one.metavar, help=about
    )


def value_of(one: Option) -> Callable[[str], Any]:
    """What makes the value of an option from the text of its flag; `Request` checks choices and texts."""
    if one.kind in ("fraction", "factor"):
        return float
    return read_by(one) if one.kind in ERRORS else str


def request(args: argparse.Namespace, **more: Any) -> Request:
    """The request of parsed flags over the config's settings; `more` has what other flags of the verb decide.

    Raises:
        UsageError: flags that contradict each other.
        DocumentError: the config has what is not known.
    """
    words = {**flags(args), **{name: value for name, value in more.items() if value is not None}}
    config = settings(args)
    if config is not None:
        from staticmem.config.discover import combined

        below = dict(config.words)
        if getattr(args, "model", None) not in (None, config.model):
            below.pop("dims", None)  # dimensions have the names of a model
        words = combined(below, words)
        if config.gpus:
            words.setdefault("gpu", config.gpus[0])
    return request_of(words)


def flags(args: argparse.Namespace) -> dict[str, Any]:
    """The words that flags give, by the names of `Request`; those that are not given are not in it."""
    words = {name: getattr(args, name, None) for name in OPTIONS}
    if words["dims"]:
        words["dims"] = _joined(words["dims"])
    if words["checkpoint"]:
        words["checkpoint"] = tuple(words["checkpoint"])
    return {name: value for name, value in words.items() if value is not None}


def _joined(dims: list[dict[str, int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, size in (pair for one in dims for pair in one.items()):
        if sizes.setdefault(name, size) != size:
            why = f"Once as {sizes[name]} and once as {size}."
            raise UsageError(f"--dim {name} is given twice", why, "Give one size for it.", "SM113")
    return sizes


def settings(args: argparse.Namespace) -> Config | None:
    """The config that holds, and variables of the environment over it; None where there is neither."""
    if not hasattr(args, "settings"):
        args.settings = _settings(args)
    found: Config | None = args.settings
    return found


def config_of(args: argparse.Namespace) -> Config:
    """The config of a verb that takes CONFIG|MODEL; `args.model` is None afterwards where it is a config.

    Raises:
        UsageError: a config is given twice.
    """
    from staticmem.config.config import Config
    from staticmem.studies.sweep import is_config

    if args.model is not None and is_config(args.model):
        if args.config is not None:
            raise UsageError(
                "two configs are given", f"{args.model} and --config {args.config}.", "Give one of them.", "SM197"
            )
        args.config, args.model = args.model, None
    return settings(args) or Config()


def _settings(args: argparse.Namespace) -> Config | None:
    from staticmem.config import locate

    if args.config is None and not locate.anything(search=not args.no_config):
        return None
    from staticmem.config.discover import settings as read

    found = read(args.config, not args.no_config)
    if found.file is not None and args.config is None and not getattr(args, "quiet", False):
        sys.stderr.write(f"Using {found.file}\n")
    return found


def model_of(args: argparse.Namespace) -> str:
    """The model of the command line, else that of the config.

    Raises:
        UsageError: neither names one.
    """
    config = settings(args)
    if args.model is not None:
        return str(args.model)
    if config is not None and config.model is not None:
        return config.model
    raise UsageError(
        "no model to analyse",
        "Neither the command line nor a config names one.",
        "Example: staticmem analyze model.pt2; 'staticmem init' writes a config.",
        code="SM198",
    )
