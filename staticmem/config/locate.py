"""Where settings come from: flags, then the environment, then one config file, then the defaults of `Request`.

The config file is that of --config or STATICMEM_CONFIG, else the first staticmem.yaml from the current folder up to the
root of the repository (the folder with .git; without one, the current folder alone), else [tool.staticmem] of a
pyproject.toml on the same way. This module finds it, and imports nothing: most starts have no config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

NAMES = ("staticmem.yaml", "staticmem.yml")
PREFIX = "STATICMEM_"
CONFIG_VARIABLE = "STATICMEM_CONFIG"


def is_config(path: str) -> bool:
    return path.lower().endswith((".yaml", ".yml", ".toml"))


def anything(environment: Mapping[str, str] | None = None, search: bool = True) -> bool:
    """Whether there is a variable or a file with settings."""
    environ = os.environ if environment is None else environment
    return any(name.startswith(PREFIX) for name in environ) or (search and find() is not None)


def find(start: str | None = None) -> str | None:
    """The config file that holds for a folder (default: the current one), as a path from it where that is shorter."""
    for folder in _upward(start):
        for name in NAMES:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return _short(path)
    for folder in _upward(start):
        path = os.path.join(folder, "pyproject.toml")
        if os.path.isfile(path) and "tool.staticmem" in _peek(path):
            return _short(path)
    return None


def _upward(start: str | None) -> Iterator[str]:
    try:
        folder = os.path.abspath(start or os.getcwd())
    except FileNotFoundError:  # the current folder was removed: it has no files
        return iter(())
    passed = [folder]
    while not os.path.exists(os.path.join(folder, ".git")):
        above = os.path.dirname(folder)
        if above == folder:  # no repository: a config of a folder above belongs to another project
            return iter(passed[:1])
        folder = above
        passed.append(folder)
    return iter(passed)


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(path) else path


def _peek(path: str) -> str:
    from staticmem import files

    try:
        with files.opened(path) as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""
