"""`Config`: what a config file says, checked, in the words of `Request`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem.config.fields import ROOT, VERSION
from staticmem.documents import DocumentError, Node, read_yaml
from staticmem.errors import UsageError
from staticmem.scenario.kinds import UNKNOWN_KEY, wrong

Words = Mapping[str, Any]
UNKNOWN_CARD = "SM402"


@dataclass(frozen=True)
class Budget:
    """`metric` may be at most `limit_bytes`. `level`: what it is above that, "error" or "warning"."""

    metric: str
    limit_bytes: int
    level: str = "error"


@dataclass(frozen=True)
class Config:
    """A config. `words` are fields of `Request`; `axes` are the lists of `what_if`; `scenarios` are words of one
    configuration each, with its `name`. Paths of models are made from the config's folder.

    `model` is None where the file names none.
    """

    file: str | None = None
    model: str | None = None
    words: Words = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    scenarios: tuple[Words, ...] = ()
    budgets: tuple[Budget, ...] = ()


def load(path: str) -> Config:
    """The config in a YAML file.

    Raises:
        DocumentError: the file cannot be read, or says what is not known; the message has file, line and column.
    """
    return of_node(read_yaml(path), os.path.dirname(path))


def of_node(root: Node, folder: str, versioned: bool = True) -> Config:
    """The config of a document. `versioned`: it has to say its version (a table of pyproject.toml may leave it out)."""
    found = ROOT.read(root)
    if versioned and "version" not in found and found:
        first = next(iter(root.value.values()))[0]
        raise DocumentError(
            f"{first.place}: 'version' is missing", "A config says which version of the format it is.",
            f"Write `version: {VERSION}` as its first key.", UNKNOWN_KEY,
        )  # fmt: skip
    _exclude(root, "train", "infer", "A configuration either trains or infers.", "Put the other into scenarios.")
    _exclude(root, "what_if", "scenarios", "A sweep is a cross product or a list.", "Keep one of them.")
    model, dims = found.get("model"), {}
    if isinstance(model, dict):
        model, dims = model["path"], model.get("dims", {})
    words: dict[str, Any] = {}
    for mode in ("train", "infer"):
        if mode in found:
            words = {"mode": mode, **found[mode]}
    if dims:
        words["dims"] = {**dims, **words.get("dims", {})}
    words |= found.get("device", {})
    if "conf" in found.get("allocator", {}):
        words["alloc_conf"] = found["allocator"]["conf"]
    for name in ("profile", "gpus_file"):
        if name in words:
            words[name] = _from(folder, words[name])
    if "gpus" in found:
        _check_cards(root.value["gpus"][1], words.get("gpus_file"))
    axes = _axes(found.get("what_if", {}), folder)
    scenarios = tuple(
        {**s, "model": _from(folder, s["model"])} if "model" in s else s for s in found.get("scenarios", ())
    )
    budgets = tuple(Budget(b["metric"], b["limit"], b.get("level", "error")) for b in found.get("budgets", ()))
    path = _from(folder, model) if model is not None else None
    return Config(root.file, path, words, tuple(found.get("gpus", ())), axes, scenarios, budgets)


def _check_cards(gpus: Node, file: str | None) -> None:
    from staticmem.devices.gpus import find

    for node in gpus.value if isinstance(gpus.value, list) else [gpus]:
        try:
            find(str(node.value), file=file)
        except UsageError as error:
            if error.code != UNKNOWN_CARD:  # the file of cards itself is wrong
                raise
            raise wrong(node, error.why, error.hint) from error


def _axes(found: Mapping[str, Any], folder: str) -> dict[str, tuple[Any, ...]]:
    """The axes in their order; each named dimension is an axis of its own, `dims.seq`."""
    axes: dict[str, tuple[Any, ...]] = {}
    for name, values in found.items():
        if name == "dims":
            axes |= {f"dims.{dim}": sizes for dim, sizes in values.items()}
        elif name == "model":
            axes[name] = tuple(_from(folder, path) for path in values)
        else:
            axes[name] = values
    return axes


def _from(folder: str, path: str) -> str:
    return path if os.path.isabs(path) or not folder else os.path.join(folder, path)


def _exclude(root: Node, one: str, other: str, why: str, hint: str) -> None:
    if isinstance(root.value, dict) and one in root.value and other in root.value:
        place = max((root.value[name][0] for name in (one, other)), key=lambda n: (n.line or 0, n.column or 0))
        raise DocumentError(f"{place.place}: both '{one}' and '{other}' are given", why, hint, UNKNOWN_KEY)
