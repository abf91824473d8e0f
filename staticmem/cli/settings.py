"""What parsed flags ask for: the request, with the config and the environment below it, and the model."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from staticmem.cli.output import say
from staticmem.config import locate
from staticmem.errors import StaticmemError, UsageError
from staticmem.files import STDIN, temporary_folder
from staticmem.scenario.compiling import WHOLE
from staticmem.scenario.request import OPTIONS, Request, request_of

if TYPE_CHECKING:
    from staticmem.config.config import Config

# why a verb takes no batch of a config
GLOBAL_BATCH = "--global-batch is shared out and its micro-batches are found"


def request(args: argparse.Namespace, **more: Any) -> Request:
    """The request of parsed flags over the config's settings; `more` has what other flags of the verb decide.

    Raises:
        UsageError: flags that contradict each other.
        DocumentError: the config has an unknown key or value.
    """
    options = {**given(args), **{name: value for name, value in more.items() if value is not None}}
    config = settings(args)
    if config is not None:
        from staticmem.config.discover import combined  # late: most starts have no config

        below = dict(config.options)
        if getattr(args, "model", None) not in (None, config.model):
            below.pop("dims", None)  # dimensions have the names of a model
        options = combined(below, options)
        if config.gpus:
            options.setdefault("gpu", config.gpus[0])
    return request_of(options)


def without(args: argparse.Namespace, asked: Request, cannot: Container[str], why: str) -> Request:
    """The request without those options of the config that a run cannot have, which it says; flags are left for the
    run to refuse. `cannot`: names of options."""
    config, flags, blank = settings(args), given(args), Request()
    below = config.options if config is not None else {}
    unused = sorted(name for name in below if name in cannot and name not in flags)
    if unused:
        say(f"Not used of the config, as {why}: {', '.join(unused)}")
    return replace(asked, **{name: getattr(blank, name) for name in unused})


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that flags give, by the names of `Request`."""
    options = {name: value for name in OPTIONS if (value := getattr(args, name, None)) is not None}
    if "dims" in options:
        options["dims"] = _joined(options["dims"])
    compiled = options.get("compile")
    if compiled and getattr(args, "model", "") is None and compiled[-1].endswith((".pt2", ".onnx")):
        args.model, compiled[-1] = compiled[-1], WHOLE  # `--compile model.pt2`
    for name in ("checkpoint", "compile"):
        if name in options:
            options[name] = tuple(options[name])
    return options


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
    config: Config | None = args.settings
    return config


def _settings(args: argparse.Namespace) -> Config | None:
    if args.config is None and not locate.anything(search=not args.no_config):
        return None
    from staticmem.config.discover import settings as read  # late: most starts have no config

    config = read(args.config, not args.no_config)
    if config.file is not None and args.config is None and not getattr(args, "quiet", False):
        say(f"Using {config.file}")
    return config


def take_config(args: argparse.Namespace) -> None:
    """Where the verb takes CONFIG|MODEL and it is a config: moves it to `args.config`, and `args.model` becomes None.

    Raises:
        UsageError: a config is given twice.
    """
    if args.model is None or not locate.is_config(args.model):
        return
    if args.config is not None:
        why = f"{args.model} and --config {args.config}."
        raise UsageError("two configs are given", why, "Give one of them.", "SM197")
    args.config, args.model = args.model, None


def config_of(args: argparse.Namespace) -> Config:
    """The config of a verb that takes CONFIG|MODEL."""
    from staticmem.config.config import Config

    take_config(args)
    return settings(args) or Config()


def model_of(args: argparse.Namespace) -> str:
    """The model of the command line, else that of the config.

    Raises:
        UsageError: neither names one.
    """
    if args.model is not None:
        return str(args.model)
    config = settings(args)
    if config is not None and config.model is not None:
        return config.model
    hint = "Example: staticmem analyze model.pt2; 'staticmem init' writes a config."
    raise UsageError("no model to analyse", "Neither the command line nor a config names one.", hint, "SM198")


@contextmanager
def model_path(name: str) -> Iterator[str]:
    """The path to read. Stdin becomes a file called `stdin`, because archives are read from their end."""
    if name != "-":
        yield name
        return
    if sys.stdin is None or sys.stdin.isatty():
        hint = "Example: staticmem analyze - < model.onnx"
        raise UsageError("nothing to read", "'-' reads the model from stdin.", hint, "SM101")
    with temporary_folder(work=False) as folder:
        path = os.path.join(folder, STDIN)
        try:
            with open(path, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        except OSError as error:
            why = f"It goes to a temporary file in {os.path.dirname(folder)}: {error.strerror or error}."
            hint = "Write it to a file where there is room (TMPDIR), and give its name."
            raise UsageError("the model from stdin cannot be kept", why, hint, "SM101") from error
        try:
            yield path
        except StaticmemError as error:
            error.what, error.why, error.hint = (s.replace(path, STDIN) for s in (error.what, error.why, error.hint))
            raise
