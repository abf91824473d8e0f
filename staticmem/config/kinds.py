"""Tables of a config: mappings with known keys, which read a node and describe themselves in JSON Schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem.documents import DocumentError, Node
from staticmem.errors import did_you_mean
from staticmem.scenario.kinds import UNKNOWN_KEY, Kind, wrong


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

    def read(self, node: Node) -> dict[str, Any]:
        keys = self.keys()
        if node.value is None and not self.required:
            return {}
        if not isinstance(node.value, dict):
            raise wrong(node, f"It is a mapping with keys of {', '.join(keys)}.", "Write `key: value` below it.")
        for name, (key, _) in node.value.items():
            if name not in keys:
                where = f"in '{node.path}'" if node.path else "at the top"
                raise DocumentError(
                    f"{key.place}: unknown key '{name[:60]}' {where}", f"Known: {', '.join(keys)}.",
                    self.hints.get(name) or _closest(name, keys), UNKNOWN_KEY,
                )  # fmt: skip
        for name in self.required:
            if name not in node.value:
                raise DocumentError(
                    f"{node.place}: '{name}' is missing", f"Needed: {', '.join(self.required)}.",
                    f"Add `{name}: {keys[name].example}`.", UNKNOWN_KEY,
                )  # fmt: skip
        return {name: keys[name].kind.read(value) for name, (_, value) in node.value.items()}

    def schema(self) -> dict[str, Any]:
        properties = {name: {"description": e.about, **e.kind.schema()} for name, e in self.keys().items()}
        table: dict[str, Any] = {"additionalProperties": False, "properties": properties}
        if self.required:
            return {"type": "object", **table, "required": list(self.required)}
        return {"type": ["object", "null"], **table}  # a key without a value is an empty table


def _closest(name: str, keys: Mapping[str, Entry]) -> str:
    hint = did_you_mean(name.lower().replace("-", "_"), keys)
    return hint if hint.startswith("Did") else "See docs/config.md, or 'staticmem init' for an example."


@dataclass(frozen=True)
class Either:
    """One of two kinds: a value of the second is written as a mapping or list, the first as plain text."""

    plain: Kind
    other: Kind

    def read(self, node: Node) -> Any:
        return self.other.read(node) if isinstance(node.value, dict) else self.plain.read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.plain.schema(), self.other.schema()]}
