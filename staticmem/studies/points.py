"""The configurations of a sweep: the cross product of lists, or one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from staticmem.config.config import Config, Options
from staticmem.config.discover import combined
from staticmem.config.fields import axes as axes_of_config
from staticmem.documents import of_plain
from staticmem.errors import StaticmemError, UsageError, closest
from staticmem.report.sweep import Setting
from staticmem.scenario.kinds import plain as plain_value
from staticmem.scenario.request import OPTIONS, Request, request_of

LIMIT = 200_000  # configurations: more is a mistake in the lists


@dataclass(frozen=True)
class Point:
    """A configuration: `request` names no card. `error` in its place where its options exclude each other."""

    index: int
    name: str | None
    model: str
    request: Request
    error: StaticmemError | None = None


def points(config: Config, model: str | None, flags: Options, axes: Mapping[str, tuple[Any, ...]]) -> list[Point]:
    """The configurations of a config under flags, which override it. `axes` override lists of the same name.

    Raises:
        UsageError: there is no model, nothing to vary, or more than 200,000 configurations.
    """
    lists = {name: values for name, values in config.axes.items() if not _overridden(name, flags)} | dict(axes)
    chosen = model or config.model
    if chosen is None and "model" not in lists and not all("model" in s for s in config.scenarios or ({},)):
        hint = "Write `model: file.pt2` into the config, or name the file."
        raise UsageError("no model to analyse", "Neither the command line nor the config names one.", hint, "SM198")
    options = dict(config.options)
    if model is not None and config.model is not None and model != config.model:
        options.pop("dims", None)  # dimensions have the names of a model
    named = config.scenarios or ({},)
    count = len(named) * prod(len(values) for values in lists.values())
    if count > LIMIT:
        raise UsageError(
            f"{count:,} configurations", f"A sweep has at most {LIMIT:,}.", "Shorten the lists.", code="SM197"
        )
    base = combined(options, flags)
    combinations = enumerate(product(named, product(*lists.values())))
    return [
        _point(index, chosen or "", base, {**scenario, **dict(zip(lists, values, strict=True))}, flags)
        for index, (scenario, values) in combinations
    ]


def _overridden(name: str, flags: Options) -> bool:
    if name.startswith("dims."):
        return name[5:] in flags.get("dims", {})
    return flags.get(name) is not None


def _point(index: int, model: str, base: Options, own: Mapping[str, Any], flags: Options) -> Point:
    name, options = own.get("name"), dict[str, Any]()
    for key, value in own.items():
        if key.startswith("dims."):
            options.setdefault("dims", {})[key[5:]] = value
        elif key == "model":
            model = value
        elif key not in ("name", *flags):
            options[key] = value
    options = combined(base, options)
    options.pop("gpu", None)
    try:
        request = request_of(options)
        request.scenario()
    except StaticmemError as error:
        # the options are kept, to be shown beside the error
        names = set(OPTIONS) - {"method", "inplace_activations", "cudnn"}
        return Point(index, name, model, request_of({k: v for k, v in options.items() if k in names}), error)
    return Point(index, name, model, request)


def settings_of(request: Request) -> dict[str, Setting]:
    """What a request says beside the defaults, as plain values: dimensions by name, a resolution as `224x224`."""
    blank, settings = Request(), {}
    for name in OPTIONS:
        value = getattr(request, name)
        if name in ("top", "gpu", "method") or value == getattr(blank, name):
            continue
        if name == "dims":
            settings.update({f"dims.{k}": v for k, v in value.items()})
        else:
            settings[name] = plain(name, value)
    return settings


def plain(name: str, value: Any) -> Setting:
    """A value of a list as text or number."""
    if name == "resolution":
        return f"{value[0]}x{value[1]}" if value[0] != value[1] else int(value[0])
    if isinstance(value, tuple):
        return ",".join(str(v) for v in value) or "none"
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def parse_axes(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """The lists of `--what-if NAME=A,B`; `dims.seq=512,1024` or `seq=512` for a dimension of the model.

    Raises:
        UsageError: it is not of that form, or a name is given twice.
    """
    axes = axes_of_config()
    lists: dict[str, tuple[Any, ...]] = {}
    for setting in texts:
        name, equals, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        values = [part.strip() for part in text.split(",")]
        if not equals or not name or not all(values):
            what = f"--what-if '{setting}' is not NAME=A,B"
            raise UsageError(what, "It lists what to try.", "Example: --what-if batch=16,32", "SM197")
        if name not in axes and not name.startswith("dims."):
            if not all(v.isascii() and v.isdigit() for v in values):
                why = f"Known: {', '.join(axes)}, and dims.NAME."
                raise UsageError(f"--what-if '{name}' is not known", why, closest(name, axes), "SM197")
            name = f"dims.{setting.partition('=')[0].strip()}"
        if name in lists:
            raise UsageError(f"--what-if {name} is given twice", "", f"Write {name}=A,B.", "SM197")
        entry = axes["batch" if name.startswith("dims.") else name]
        kind = OPTIONS[name].kind if name in OPTIONS else "text"
        if name.startswith("dims."):
            kind = "whole"
        listed = values if kind == "names" else [plain_value(kind, text) for text in values]
        lists[name] = entry.kind.read(of_plain(listed, "--what-if", name))
    return lists


def varying(configurations: Sequence[Point]) -> tuple[str, ...]:
    """The names in `settings_of` that are not the same in all configurations, in order of appearance."""
    rows = [{"model": p.model, **settings_of(p.request)} for p in configurations]
    names = dict.fromkeys(name for row in rows for name in row)
    return tuple(name for name in names if len({str(row.get(name)) for row in rows}) > 1)
