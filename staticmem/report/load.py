"""Saved reports back as values: JSON to the dataclass that wrote it, with every type checked.

A report of an earlier 0.x lacks fields that were added since: they get their defaults. Fields that this version does
not know are left out, because within a schema's major version fields are only added.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from staticmem import files
from staticmem.devices.sizing import Fit
from staticmem.errors import UsageError
from staticmem.report.model import BEYOND_LIVE, SCHEMA, Report

T = TypeVar("T")
CODE = "SM173"
# fields with words of staticmem's own, and mappings whose keys are; all other texts may be names from a model
WORDS = frozenset({"phase", "category", "code", "by_category", "device_by_category", "bands"})
_PLAIN = re.compile(r"[A-Za-z0-9_ -]{1,40}")
FITS = tuple(fit.value for fit in Fit)
LARGEST = 512 << 20  # bytes: a report with every tensor of a graph of a million ops is below it


def load_report(path: str) -> Report:
    """The report of a file that `analyze -f json` wrote. `alive` is what its `top_tensors` has.

    Raises:
        UsageError: it cannot be read, or is no report of a version that this one knows.
    """
    data = read_json(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        why = f"Its schema is {schema!r:.60}" if schema is not None else "It has no 'schema'"
        hint = "staticmem analyze MODEL -o FILE.json"
        raise UsageError(f"{path} is not a report", f"{why}; a report has {SCHEMA!r}.", hint, CODE)
    report = build(Report, data, path)
    _check_names(report.peak.bands, ("live",), path, "peak.bands")
    if report.device is not None:
        _check_names(report.peak.bands, ("allocated", "reserved", "device"), path, "peak.bands")
        _check_names(report.peak.device_by_category, BEYOND_LIVE, path, "peak.device_by_category")
    if report.gpu is not None and report.gpu.fit not in FITS:
        raise _wrong(path, "gpu.fit", f"one of {', '.join(FITS)}", report.gpu.fit)
    return dataclasses.replace(report, alive=report.top_tensors)


def _check_names(data: Mapping[str, Any], names: Iterable[str], path: str, where: str) -> None:
    for name in names:
        if name not in data:
            raise UsageError(f"{path} is not a whole report", f"{where} lacks '{name}'.", "Write it again.", CODE)


def read_json(path: str) -> Any:
    """The contents of a JSON file of bounded size.

    Raises:
        UsageError: no file, too large, or no JSON.
    """
    try:
        text = files.read(path, LARGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path} cannot be read", f"{reason}.", "Check the path.", CODE) from error
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise UsageError(f"{path} is not JSON", f"{reason}.", "Write it again.", CODE) from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def build(cls: type[T], data: Any, path: str, where: str = "") -> T:
    """A dataclass from plain data. `where` names the place in errors.

    Raises:
        UsageError: a field is missing or of another type.
    """
    if not isinstance(data, dict):
        raise _wrong(path, where, "an object", data)
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        place = f"{where}.{field.name}" if where else field.name
        if field.name in data and field.metadata.get("json", True):
            values[field.name] = _value(hints[field.name], data[field.name], path, place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UsageError(
                f"{path} is not complete", f"It has no '{place}'.", "Write it again with this version.", CODE
            )
    return cls(**values)


_HINTS: dict[type, Mapping[str, Any]] = {}


def _hints(cls: type) -> Mapping[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _value(hint: Any, data: Any, path: str, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        choices = [arg for arg in args if arg is not type(None)]
        return _read_first_type(choices, data, path, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise _wrong(path, where, "a list", data)
        return tuple(_value(args[0], item, path, f"{where}[{i}]") for i, item in enumerate(data))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise _wrong(path, where, "an object", data)
        if where.rpartition(".")[2] in WORDS:
            for key in data:
                _word(key, path, f"a key of {where}")
        return {key: _value(args[1], item, path, f"{where}.{key}") for key, item in data.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, data, path, where)
    return _plain(hint, data, path, where)


def _read_first_type(choices: list[Any], data: Any, path: str, where: str) -> Any:
    """The first type that the data has: shapes are `int | str`."""
    for choice in choices[:-1]:
        try:
            return _value(choice, data, path, where)
        except UsageError:
            continue
    return _value(choices[-1], data, path, where)


def _plain(hint: Any, data: Any, path: str, where: str) -> Any:
    whole = isinstance(data, int) and not isinstance(data, bool)
    if hint is float:
        # beyond 64 bits nothing is counted here, and a whole number of any size is no float
        if not (whole and abs(data) < 1 << 64) and not (isinstance(data, float) and math.isfinite(data)):
            raise _wrong(path, where, "a number", data)
        return float(data)
    # a report counts bytes, elements and tensors: nothing of it is below zero
    fits = whole and 0 <= data < 1 << 63 if hint is int else isinstance(data, hint)
    if not fits:
        kind = {int: "a whole number, not negative", str: "text", bool: "true or false"}[hint]
        raise _wrong(path, where, kind, data)
    if hint is str and where.rpartition(".")[2] in WORDS:
        _word(data, path, where)
    return data


def _word(text: str, path: str, where: str) -> None:
    """What staticmem itself says is a few plain letters, in whatever version: it is shown as it is."""
    if not _PLAIN.fullmatch(text):
        raise _wrong(path, where, "a word", text)


def _wrong(path: str, where: str, wanted: str, data: Any) -> UsageError:
    hint = "Write it again with staticmem analyze MODEL -o FILE.json."
    return UsageError(f"{path} is not a report", f"'{where or 'it'}' is {data!r:.40}; it must be {wanted}.", hint, CODE)
