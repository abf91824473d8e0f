"""The keys of a config, each with its kind, a sentence, and an example. Loader, JSON Schema and template read this.

A table is a mapping with known keys: it reads a node, and describes itself in JSON Schema. Keys of a step and of the
device are the options that `Request` declares, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem.documents import DocumentError, Node
from staticmem.scenario.kinds import UNKNOWN_KEY, Kind, ListOf, Named, Text, Whole, kind_of, wrong
from staticmem.scenario.options import Option, hint_for
from staticmem.scenario.request import OPTIONS

MOST_LISTED = 14  # keys of a table that an error lists
ALL_KEYS = "See docs/config.md, or 'staticmem init' for an example."


@dataclass(frozen=True)
class Entry:
    """A key of a table: its kind, and a sentence on it."""

    kind: Kind
    about: str
    example: str = ""


@dataclass(frozen=True)
class Table:
    """A mapping with known keys."""

    keys: Callable[[], Mapping[str, Entry]]
    required: tuple[str, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)  # by misplaced key: where it belongs
    lists: bool = False  # people write lists of values here, which belong to `what_if`

    def read(self, node: Node) -> dict[str, Any]:
        keys = self.keys()
        if node.value is None and not self.required:
            return {}
        if not isinstance(node.value, dict):
            raise wrong(node, f"It is a mapping with keys such as {_few(keys)}.", "Write `key: value` below it.")
        for name, (key, _) in node.value.items():
            if name not in keys:
                where = f"in '{node.path}'" if node.path else "at the top"
                hint = self.hints.get(name) or hint_for(name, keys) or ALL_KEYS
                what = f"{key.place}: unknown key '{name[:60]}' {where}"
                raise DocumentError(what, f"Known: {_few(keys)}.", hint, UNKNOWN_KEY)
        for name in self.required:
            if name not in node.value:
                why, hint = f"Needed: {', '.join(self.required)}.", f"Add `{name}: {keys[name].example}`."
                raise DocumentError(f"{node.place}: '{name}' is missing", why, hint, UNKNOWN_KEY)
        return {name: self._read_value(name, keys[name].kind, value) for name, (_, value) in node.value.items()}

    def _read_value(self, name: str, kind: Kind, node: Node) -> Any:
        try:
            return kind.read(node)
        except DocumentError as error:
            if self.lists and isinstance(node.value, list):
                error.hint = f"Values to try are in what_if: `{name}: [...]`."
            raise

    def schema(self) -> dict[str, Any]:
        properties = {name: {"description": e.about, **e.kind.schema()} for name, e in self.keys().items()}
        table: dict[str, Any] = {"additionalProperties": False, "properties": properties}
        if self.required:
            return {"type": "object", **table, "required": list(self.required)}
        return {"type": ["object", "null"], **table}  # a key without a value is an empty table


@dataclass(frozen=True)
class Either:
    """One of two kinds: a value of the second is written as a mapping or list, the first as plain text."""

    plain: Kind
    other: Kind

    def read(self, node: Node) -> Any:
        return self.other.read(node) if isinstance(node.value, dict) else self.plain.read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.plain.schema(), self.other.schema()]}


def _few(keys: Mapping[str, Entry]) -> str:
    """The names of keys; of many the first, and how many there are."""
    names = list(keys)
    if len(names) <= MOST_LISTED:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_LISTED])} and {len(names) - MOST_LISTED} more (docs/config.md)"


def _entry(name: str) -> Entry:
    one = OPTIONS[name]
    return Entry(kind_of(one), sentence(one.about), one.example or str(one.default).lower())


def sentence(clause: str) -> str:
    """A clause with a capital and a period; names such as torch.compile stay as they are."""
    first = clause.split()[0]
    return f"{clause[:1].upper() if first.isalpha() else clause[:1]}{clause[1:]}."


def _entries(belongs: Callable[[Option], bool]) -> Mapping[str, Entry]:
    return {name: _entry(name) for name, one in OPTIONS.items() if belongs(one)}


INFERENCE = _entries(lambda one: one.table == "step" and not one.training)
TRAINING = _entries(lambda one: one.table == "step" and one.training)
STEP = {**INFERENCE, **TRAINING}
GENERATION = _entries(lambda one: one.table == "generate")
SERVING = _entries(lambda one: one.table == "serve")
SERVED = {**SERVING, **{name: _entry(name) for name in ("dtype", "parallel", "devices")}}
DECODING = {**GENERATION, **INFERENCE}
SOFTWARE = _entries(lambda one: one.table == "device")
HOST = _entries(lambda one: one.table == "host")
MODE, ALLOCATOR = _entry("mode"), _entry("alloc_conf")
# what variables of the environment can give
VARIABLES = tuple(one for one in OPTIONS.values() if one.setting)

_PATH = Entry(Text("model.pt2"), "An .onnx or .pt2 file, from the config's folder.", "model.pt2")
_MODEL_DIMS = Entry(Named(Whole("512")), "Sizes of open dimensions of this model, by name.", "{seq: 512}")
OF_MODEL = {"path": _PATH, "dims": _MODEL_DIMS}
MODEL = Either(Text("model.pt2"), Table(lambda: OF_MODEL, required=("path",)))
INFER_HINTS = dict.fromkeys(TRAINING, "It is an option of training: write it under train.")


def axes() -> Mapping[str, Entry]:
    """What a sweep can vary: lists of values of options, and of models."""
    kinds: dict[str, Kind] = {"checkpoint": _Checkpoints(), "optimizer": kind_of(OPTIONS["optimizer"], ("none",))}
    listed = {
        name: Entry(ListOf(kinds.get(name, entry.kind)), _to_try(entry.about), f"[{entry.example}]")
        for name, entry in {**STEP, **GENERATION, **SERVING, **SOFTWARE, "mode": MODE, "alloc_conf": ALLOCATOR}.items()
    }
    listed["dims"] = Entry(Named(ListOf(Whole("512"))), "Sizes to try, by name.", "{seq: [512, 1024]}")
    listed["model"] = Entry(ListOf(Text("model.pt2")), "Models to try, from the config's folder.", "[a.pt2, b.pt2]")
    return listed


def _to_try(about: str) -> str:
    return f"To try: {about[0].lower() if about.split()[0].istitle() else about[0]}{about[1:]}"


class _Checkpoints:
    """One setting of checkpointing in a list of them: `none`, a class or path, or a list of these."""

    def read(self, node: Node) -> Any:
        return () if node.value in (None, False, "none") else kind_of(OPTIONS["checkpoint"]).read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
