"""YAML files of this folder and of users, checked: an error says file, place and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from staticmem.errors import UsageError, did_you_mean

CODE = "SM401"  # a hardware file that cannot be used


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    import yaml

    try:
        # libyaml's parser is ten times as fast; both build plain data only
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - a safe one
    except OSError as error:
        raise UsageError(f"cannot read {path}", str(error.strerror or error), code=CODE) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML", " ".join(str(error).split()), code=CODE) from error
    return table(document, path, "the file")


def table(value: Any, path: Path, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {where} is not a mapping", f"It is {value!r:.60}.", code=CODE)
    return value


def keys_of(
    value: Mapping[str, Any], path: Path, required: Sequence[str], optional: Sequence[str] = (), where: str = "the file"
) -> None:
    """Checks that the required keys are there, and none that is not known."""
    known = (*required, *optional)
    for key in value:
        if key not in known:
            raise UsageError(f"{path}: {where} has an unknown key '{key}'", "", did_you_mean(str(key), known), CODE)
    for key in required:
        if key not in value:
            raise UsageError(f"{path}: {where} lacks '{key}'", f"Needed: {', '.join(required)}.", code=CODE)


def integer(value: Any, path: Path, where: str, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(
            f"{path}: {where} is {value!r:.40}", f"A whole number of at least {least} is needed.", code=CODE
        )
    return value


def text(value: Any, path: Path, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{path}: {where} is {value!r:.40}", "A text is needed.", code=CODE)
    return value
