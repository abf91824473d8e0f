"""YAML files of this folder and of users, checked: an error says file, place and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from staticmem import files
from staticmem.errors import UsageError, did_you_mean

CODE = "SM401"  # a hardware file that cannot be used
MAX_BYTES = 4 << 20  # the largest of the package has 60 KiB
_HERE = Path(__file__).parent


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        data = files.read(path, MAX_BYTES)
        document = _built_json(path, data)
        if document is None:
            document = _parse(data, path)
    except OSError as error:
        raise files.unreadable(path, error, CODE) from error
    except ValueError as error:
        raise UsageError(f"{path} is not YAML", " ".join(str(error).split()), code=CODE) from error
    return table(document, path, "the file")


def _parse(data: bytes, path: Path) -> Any:
    """The plain data of a YAML text.

    Raises:
        ValueError: it is none, or too much.
    """
    from staticmem.documents import DocumentError, parse_yaml  # late: most starts read JSON

    try:
        return parse_yaml(data.decode("utf-8"), str(path)).plain()
    except DocumentError as error:
        raise ValueError(f"{error.what.removeprefix(f'{path}:')}. {error.why}") from error


# Reading JSON takes a twentieth of the time, and a start without PyYAML. A build writes the package's YAML files as
# JSON beside them (setup.py; in a checkout: python -m staticmem.devices.documents). It counts only while it is of the
# very same YAML; without it the YAML is read.


def _built_json(path: Path, data: bytes) -> Any:
    """What the JSON beside a file of the package says it holds; None if there is none, or one of another text."""
    if path.parent not in (_HERE, _HERE / "profiles"):
        return None
    try:
        built = json.loads(path.with_suffix(".json").read_bytes())
    except FileNotFoundError:
        return None
    return built["document"] if built["crc32"] == crc32(data) else None


def write_json(folder: Path = _HERE) -> None:
    """Writes the YAML files of a copy of this folder as JSON too."""
    for path in sorted(folder.rglob("*.yaml")):
        data = path.read_bytes()
        text = json.dumps({"crc32": crc32(data), "document": _parse(data, path)}, separators=(",", ":"))
        path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


def table(value: Any, path: Path, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {where} is not a mapping", f"It is {value!r:.60}.", code=CODE)
    return value


def keys_of(
    value: Mapping[str, Any], path: Path, required: Sequence[str], optional: Sequence[str] = (), where: str = "the file"
) -> None:
    """Checks that all required keys are there, and no unknown ones."""
    allowed = (*required, *optional)
    for key in value:
        if key not in allowed:
            raise UsageError(f"{path}: {where} has an unknown key '{key}'", "", did_you_mean(str(key), allowed), CODE)
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


if __name__ == "__main__":
    write_json()
