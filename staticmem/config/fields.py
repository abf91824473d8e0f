"""The keys of a config, each with its kind, a sentence, and an example. Loader, JSON Schema and template read this.

Keys of a step and of the device are the options that `Request` declares, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from staticmem.config.kinds import Either, Entry, Table
from staticmem.documents import Node
from staticmem.scenario.kinds import Bytes, Choice, Kind, Named, Several, Text, Whole, kind_of, wrong
from staticmem.scenario.options import SIZES, Option
from staticmem.scenario.request import OPTIONS

VERSION = 1
METRICS = ("live", "allocated", "reserved", "device")
LEVELS = ("error", "warning")


def _entry(name: str) -> Entry:
    one = OPTIONS[name]
    return Entry(kind_of(one), sentence(one.about), one.example or str(one.default).lower())


def sentence(clause: str) -> str:
    """A clause with a capital and a period; names such as torch.compile stay as they are."""
    first = clause.split()[0]
    return f"{clause[:1].upper() if first.isalpha() else clause[:1]}{clause[1:]}."


def _entries(belongs: Callable[[Option], bool]) -> Mapping[str, Entry]:
    return {name: _entry(name) for name, one in OPTIONS.items() if belongs(one)}


SIZE_KEYS = _entries(lambda one: one.group == SIZES)
INFERENCE = _entries(lambda one: one.table == "step" and not one.training)
TRAINING = _entries(lambda one: one.table == "step" and one.training)
STEP = {**INFERENCE, **TRAINING}
SOFTWARE = _entries(lambda one: one.table == "device")
MODE, ALLOCATOR = _entry("mode"), _entry("alloc_conf")
# what variables of the environment can give
VARIABLES = tuple(one for one in OPTIONS.values() if one.setting)

_PATH = Entry(Text("model.pt2"), "An .onnx or .pt2 file, from the config's folder.", "model.pt2")
_MODEL_DIMS = Entry(Named(Whole("512")), "Sizes of open dimensions of this model, by name.", "{seq: 512}")
MODEL = Either(Text("model.pt2"), Table(lambda: {"path": _PATH, "dims": _MODEL_DIMS}, required=("path",)))
_INFER_HINTS = dict.fromkeys(TRAINING, "It is an option of training: write it under train.")


def axes() -> Mapping[str, Entry]:
    """What a sweep can vary: lists of values of options, and of models."""
    kinds: dict[str, Kind] = {"checkpoint": _Checkpoints(), "optimizer": kind_of(OPTIONS["optimizer"], ("none",))}
    listed = {
        name: Entry(Several(kinds.get(name, entry.kind)), _to_try(entry.about), f"[{entry.example}]")
        for name, entry in {**STEP, **SOFTWARE, "mode": MODE, "alloc_conf": ALLOCATOR}.items()
    }
    listed["dims"] = Entry(Named(Several(Whole("512"))), "Sizes to try, by name.", "{seq: [512, 1024]}")
    listed["model"] = Entry(Several(Text("model.pt2")), "Models to try, from the config's folder.", "[a.pt2, b.pt2]")
    return listed


def _to_try(about: str) -> str:
    return f"To try: {about[0].lower() if about.split()[0].istitle() else about[0]}{about[1:]}"


class _Checkpoints:
    """One setting of checkpointing in a list of them: `none`, a class or path, or a list of these."""

    def read(self, node: Node) -> Any:
        return () if node.value in (None, False, "none") else kind_of(OPTIONS["checkpoint"]).read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _scenario() -> Mapping[str, Entry]:
    return {
        "name": Entry(Text("large batch"), "What it is called in the table.", "large batch"),
        **STEP,
        **SOFTWARE,
        "mode": MODE,
        "model": Entry(Text("model.pt2"), "Another model, from the config's folder.", "other.pt2"),
        "alloc_conf": ALLOCATOR,
    }


def _budget() -> Mapping[str, Entry]:
    return {
        "metric": Entry(Choice(METRICS), "The meter that is limited (docs/meters.md).", "device"),
        "limit": Entry(Bytes(), "The most that it may be: a size with a unit.", "40 GiB"),
        "level": Entry(Choice(LEVELS), "What happens above it: an error, or a warning.", "error"),
    }


def _root() -> Mapping[str, Entry]:
    scenarios = Several(Table(_scenario), bare=False)
    budgets = Several(Table(_budget, required=("metric", "limit")), bare=False)
    return {
        "version": Entry(_Version(), f"Version of this format: {VERSION}.", str(VERSION)),
        "model": Entry(MODEL, "The model: a path, or path and dims.", "model.pt2"),
        "train": Entry(Table(lambda: STEP), "A training step."),
        "infer": Entry(Table(lambda: INFERENCE, hints=_INFER_HINTS), "An inference, in place of train."),
        "gpus": Entry(Several(Text("h100-sxm-80gb")), "Cards by name or size.", "[h100-sxm-80gb, 24GB]"),
        "device": Entry(Table(lambda: SOFTWARE), "Software and settings of the card."),
        "allocator": Entry(Table(lambda: {"conf": ALLOCATOR}), "Settings of PyTorch's caching allocator."),
        "what_if": Entry(Table(axes), "Lists of values: a sweep takes their cross product."),
        "scenarios": Entry(scenarios, "Configurations one by one, in place of what_if."),
        "budgets": Entry(budgets, "Limits of memory, for gates."),
    }


class _Version:
    def read(self, node: Node) -> int:
        if node.value == VERSION and not isinstance(node.value, bool):
            return VERSION
        raise wrong(node, f"This staticmem reads version {VERSION}.", f"Write `version: {VERSION}`.")

    def schema(self) -> dict[str, Any]:
        return {"const": VERSION}


ROOT = Table(_root)


def schema() -> dict[str, Any]:
    """The JSON Schema (draft-07) of a config. A table of pyproject.toml is the same without `version`."""
    title = f"staticmem config {VERSION}"
    draft = "http://json-schema.org/draft-07/schema#"
    return {"$schema": draft, "title": title, **ROOT.schema(), "required": ["version"]}
