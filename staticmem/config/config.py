"""`Config`: the checked content of a config file, as options of `Request`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from staticmem.config.plan import ModelSource, Plan, plan_of
from staticmem.config.root import ROOT, VERSION
from staticmem.documents import DocumentError, Node, read_yaml
from staticmem.errors import UsageError
from staticmem.frontends import architectures
from staticmem.scenario.kinds import UNKNOWN_KEY, wrong

Options = Mapping[str, Any]
UNKNOWN_CARD = "SM402"


@dataclass(frozen=True)
class Budget:
    """`metric` may be at most `limit_bytes`. `level` is what exceeding it means: "error" or "warning"."""

    metric: str
    limit_bytes: int
    level: str = "error"


@dataclass(frozen=True)
class Config:
    """A config. `options` are fields of `Request`; `axes` are the lists of `what_if`; each of `scenarios` has
    the options and the `name` of one configuration. Paths of models are relative to the config's folder in the file.

    `model` is None where the file names none. `plan` has the run of several instants that it describes.
    """

    file: str | None = None
    model: str | None = None
    options: Options = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    scenarios: tuple[Options, ...] = ()
    budgets: tuple[Budget, ...] = ()
    plan: Plan | None = None


def load(path: str) -> Config:
    """The config in a YAML file.

    Raises:
        DocumentError: the file cannot be read, or has an unknown key or value; the message has file, line and column.
    """
    return of_node(read_yaml(path), os.path.dirname(path))


def of_node(root: Node, folder: str, versioned: bool = True) -> Config:
    """The config of a document. `versioned`: it has to say its version (a table of pyproject.toml may leave it out)."""
    values = ROOT.read(root)
    if versioned and "version" not in values and values:
        first = next(iter(root.value.values()))[0]
        raise DocumentError(
            f"{first.place}: 'version' is missing",
            "A config says which version of the format it is.",
            f"Write `version: {VERSION}` as its first key.",
            UNKNOWN_KEY,
        )
    modes = ("train", "infer", "generate", "serve")
    why = "A configuration trains, infers, generates or serves."
    for one, other in combinations(modes, 2) if "plan" not in values else ():
        _exclude(root, one, other, why, "Put the other into scenarios.")
    _exclude(root, "what_if", "scenarios", "A sweep is a cross product or a list.", "Keep one of them.")
    model, dims = values.get("model"), {}
    if isinstance(model, dict):
        model, dims = model["path"], model.get("dims", {})
    options: dict[str, Any] = {}
    for mode in reversed(modes):  # beside a plan there may be several, and verbs that analyse one step take the first
        if mode in values:
            options = {"mode": mode, **values[mode]}
    if dims:
        options["dims"] = {**dims, **options.get("dims", {})}
    options |= values.get("device", {}) | values.get("host", {})
    if "conf" in values.get("allocator", {}):
        options["alloc_conf"] = values["allocator"]["conf"]
    for name in ("profile", "gpus_file"):
        if name in options:
            options[name] = _from(folder, options[name])
    if "gpus" in values:
        _check_cards(root.value["gpus"][1], options.get("gpus_file"))
    axes = _axes(values.get("what_if", {}), folder)
    scenarios = tuple(
        {**s, "model": _from(folder, s["model"])} if "model" in s else s for s in values.get("scenarios", ())
    )
    budgets = tuple(Budget(b["metric"], b["limit"], b.get("level", "error")) for b in values.get("budgets", ()))
    path = _from(folder, model) if model is not None else None
    plan = None
    if "plan" in values:
        source = ModelSource(path, dims) if path is not None else None
        plan = plan_of(values["plan"], folder, source, {mode: values.get(mode, {}) for mode in modes})
    return Config(root.file, path, options, tuple(values.get("gpus", ())), axes, scenarios, budgets, plan)


def _check_cards(gpus: Node, file: str | None) -> None:
    from staticmem.devices.gpus import find

    for node in gpus.value if isinstance(gpus.value, list) else [gpus]:
        try:
            find(str(node.value), file=file)
        except UsageError as error:
            if error.code != UNKNOWN_CARD:  # the file of cards itself is wrong
                raise
            raise wrong(node, error.why, error.hint) from error


def _axes(values: Mapping[str, Any], folder: str) -> dict[str, tuple[Any, ...]]:
    """The axes in their order; each named dimension is an axis of its own, `dims.seq`."""
    axes: dict[str, tuple[Any, ...]] = {}
    for name, choices in values.items():
        if name == "dims":
            axes |= {f"dims.{dim}": sizes for dim, sizes in choices.items()}
        elif name == "model":
            axes[name] = tuple(_from(folder, path) for path in choices)
        else:
            axes[name] = choices
    return axes


def _from(folder: str, path: str) -> str:
    return architectures.below(folder, path)


def _exclude(root: Node, one: str, other: str, why: str, hint: str) -> None:
    if isinstance(root.value, dict) and one in root.value and other in root.value:
        place = max((root.value[name][0] for name in (one, other)), key=lambda n: (n.line or 0, n.column or 0))
        raise DocumentError(f"{place.place}: both '{one}' and '{other}' are given", why, hint, UNKNOWN_KEY)
