"""Settings of a config file and of the environment, and which of them remain under flags."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from staticmem.config.config import Config, Options, load, of_node
from staticmem.config.locate import CONFIG_VARIABLE, PREFIX, find
from staticmem.documents import DocumentError, malformed, of_plain, read_text
from staticmem.errors import closest
from staticmem.scenario.request import OPTIONS

# a.b.c = 1: tomllib takes time and memory by the square of the parts, gigabytes for one line
_DOTTED = re.compile(r"""(?:(?:(?<![\w-])[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")


def read(path: str) -> Config:
    """The config in a file: YAML, or the table [tool.staticmem] of a .toml file."""
    return _read_toml(path) if path.endswith(".toml") else load(path)


def _read_toml(path: str) -> Config:
    try:
        import tomllib
    except ImportError as error:  # Python 3.10
        what = f"{path} cannot be read with this Python"
        raise malformed(what, "tomllib came with Python 3.11.", "Use a staticmem.yaml.") from error
    text = read_text(path)
    if _DOTTED.search(text):
        raise malformed(f"{path} is nested too deeply", "A key of it has more than 64 parts.")
    try:
        document: Any = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError is one; a number of thousands of digits another
        why = "A number has too many digits" if "int_max_str_digits" in str(error) else str(error)
        raise malformed(f"{path} is not TOML", f"{why}.", "Correct it there.") from error
    except RecursionError as error:
        raise malformed(f"{path} is nested too deeply", "A config has a few levels.") from error
    for part in ("tool", "staticmem"):
        document = document.get(part, {}) if isinstance(document, dict) else {}
    return of_node(of_plain(document, path, "tool.staticmem"), os.path.dirname(path), versioned=False)


def settings(path: str | None, search: bool, environment: Mapping[str, str] | None = None) -> Config:
    """The config that holds, with the environment over it.

    Args:
        path: the file of --config, before any other.
        search: whether a file is looked for where `path` is None.
    """
    environ = os.environ if environment is None else environment
    path = path or environ.get(CONFIG_VARIABLE) or None
    if path is None and search:
        path = find()
    config = read(path) if path is not None else Config()
    options = from_environment(environ)
    if not options:
        return config
    gpus = (options.pop("gpu"),) if "gpu" in options else config.gpus
    return replace(config, options=combined(config.options, options), gpus=gpus)


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Options from variables such as STATICMEM_BATCH=8, STATICMEM_DIMS=seq=512,layers=4 or STATICMEM_OPTIMIZER=adam.

    Raises:
        DocumentError: a value is not understood, or a variable looks like a misspelt one.
    """
    from staticmem.config.fields import VARIABLES
    from staticmem.scenario.kinds import kind_of, plain

    variables = {f"{PREFIX}{one.name.upper()}": one for one in VARIABLES}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or not text or variable == CONFIG_VARIABLE:
            continue
        if variable not in variables:
            # one letter more, less or different: other variables with the prefix may belong to other tools
            if difflib.get_close_matches(variable, variables, n=1, cutoff=0.93):
                hint = closest(variable, variables)
                raise DocumentError(f"unknown variable {variable}", f"It begins with {PREFIX}.", hint, "SM196")
            continue
        one = variables[variable]
        values[one.name] = kind_of(one).read(of_plain(plain(one.kind, text), "environment", variable))
    return values


def combined(below: Options, above: Options) -> dict[str, Any]:
    """Options with others over them. Dimensions are joined; options of a replaced optimizer or mode are dropped."""
    options = {**below, **above}
    if "dims" in below and "dims" in above:
        options["dims"] = {**below["dims"], **above["dims"]}
    inherited = [OPTIONS[name] for name in below if name not in above and name in OPTIONS]
    if above.get("mode") in ("infer", "generate"):
        for one in inherited:
            if one.training:
                options.pop(one.name, None)
    if "mode" in above:
        for one in inherited:
            if one.table in ("generate", "serve") and one.table != above["mode"]:
                options.pop(one.name, None)
    if options.get("optimizer") == "none":
        options["optimizer"] = None
    optimizer = options.get("optimizer")
    if above.get("optimizer") is not None and "mode" not in above:
        options["mode"] = "train"  # with an optimizer or with "none", the question is training
    for one in inherited:
        belongs = not one.owners or optimizer in one.owners or "optimizer" not in above
        if _NEEDS.get(one.name) in above:
            belongs = bool(options.get(_NEEDS[one.name]))
        if not belongs:
            options.pop(one.name, None)
    return options


_NEEDS = {
    "checkpoint_every": "checkpoint",
    "checkpoint_save": "checkpoint",
    "checkpoint_sequential": "checkpoint_segments",
}
