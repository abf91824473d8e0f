"""Kinds of values of a config: each reads a node, and describes itself in JSON Schema. One place for both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from staticmem.config.document import ConfigError, Node
from staticmem.errors import did_you_mean
from staticmem.units import parse_bytes

UNKNOWN_KEY, WRONG_VALUE = "SM194", "SM195"


class Kind(Protocol):
    """A kind of value."""

    def read(self, node: Node) -> Any:
        """The value of a node.

        Raises:
            ConfigError: it is of another kind; the message has its place and what is allowed.
        """
        ...

    def schema(self) -> dict[str, Any]:
        """The kind in JSON Schema draft-07."""
        ...


def wrong(node: Node, wanted: str, hint: str) -> ConfigError:
    """The error of a value that is not what is wanted. `wanted` is a sentence."""
    name = node.path.rpartition(".")[2] or "the file"
    where = node.place if node.place.endswith(name) else f"{node.place}: {name}"
    return ConfigError(f"{where} is {node.shown()}", wanted, hint, WRONG_VALUE)


@dataclass(frozen=True)
class Word:
    """One of some words."""

    words: Callable[[], Sequence[str]]
    shown: Sequence[str] = ()  # in the schema, where not all of `words` should be offered

    def read(self, node: Node) -> str:
        known = tuple(self.words())
        value = node.value
        if value is None or value is False:  # `amp: none` is text; `amp:` and `amp: no` are not
            value = "none" if "none" in known else value
        if isinstance(value, str) and value.lower() in known:
            return value.lower()
        hint = did_you_mean(str(value).lower(), known) if isinstance(value, str) else f"Example: {known[0]}"
        raise wrong(node, f"It is one of {', '.join(known)}.", hint)

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.shown or self.words())}


@dataclass(frozen=True)
class Whole:
    """A whole number."""

    least: int = 1
    example: int = 32

    def read(self, node: Node) -> int:
        value = node.value
        if isinstance(value, int) and not isinstance(value, bool) and self.least <= value < 2**40:
            return value
        raise wrong(node, f"It is a whole number of at least {self.least}.", f"Example: {self.example}")

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least}


@dataclass(frozen=True)
class Fraction:
    """A number in [low, high)."""

    low: float = 0.0
    high: float = 1.0

    def read(self, node: Node) -> float:
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value < self.high:
            return float(value)
        raise wrong(node, f"It is a number from {self.low:g} to below {self.high:g}.", "Example: 0.9")

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.low, "exclusiveMaximum": self.high}


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def read(self, node: Node) -> bool:
        if isinstance(node.value, bool):
            return node.value
        raise wrong(node, "It is true or false.", "Example: true")

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text:
    """Any text, a number written plainly included."""

    example: str
    pattern: str = ""

    def read(self, node: Node) -> str:
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value.strip() and (not self.pattern or re.fullmatch(self.pattern, value)):
            return value.strip()
        raise wrong(node, "It is a text.", f"Example: {self.example}")

    def schema(self) -> dict[str, Any]:
        return {"type": "string", **({"pattern": f"^(?:{self.pattern})$"} if self.pattern else {})}


@dataclass(frozen=True)
class Resolution:
    """`224`, `480x640` or `[480, 640]`: height and width."""

    def read(self, node: Node) -> tuple[int, int]:
        value = node.value
        sizes: list[Any] = [value, value]
        if isinstance(value, str):
            sizes = [
                int(part) if part.isascii() and part.isdigit() and len(part) < 10 else 0 for part in value.split("x")
            ]
        elif isinstance(value, list):
            sizes = [part.value for part in value]
        if len(sizes) == 2 and all(isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in sizes):
            return int(sizes[0]), int(sizes[1])
        raise wrong(node, "It is one number, or height and width.", "Examples: 224, 480x640")

    def schema(self) -> dict[str, Any]:
        size = {"type": "integer", "minimum": 1}
        pair = {"type": "array", "items": size, "minItems": 2, "maxItems": 2}
        return {"anyOf": [size, {"type": "string", "pattern": "^[0-9]+x[0-9]+$"}, pair]}


@dataclass(frozen=True)
class Bytes:
    """`40 GiB`, `512MiB`, `16GB` (10^9 bytes), or a number of bytes."""

    def read(self, node: Node) -> int:
        value = node.value
        found = value if isinstance(value, int) and not isinstance(value, bool) else None
        if isinstance(value, str):
            found = parse_bytes(value)
        if found is not None and found > 0:
            return found
        raise wrong(node, "It is a size with a unit: KiB, MiB, GiB, TiB, kB, MB, GB, TB.", "Example: 40 GiB")

    def schema(self) -> dict[str, Any]:
        pattern = r"^[0-9]+(\.[0-9]+)? *([KkMmGgTt][Ii]?)?[Bb]?$"
        return {"anyOf": [{"type": "string", "pattern": pattern}, {"type": "integer", "minimum": 1}]}


@dataclass(frozen=True)
class Several:
    """A list of a kind; one value alone is a list of one."""

    kind: Kind
    bare: bool = True

    def read(self, node: Node) -> tuple[Any, ...]:
        if isinstance(node.value, list) and node.value:
            return tuple(self.kind.read(child) for child in node.value)
        if isinstance(node.value, list) or not self.bare:
            raise wrong(node, "It is a list with at least one value.", "Write it as [a, b].")
        return (self.kind.read(node),)

    def schema(self) -> dict[str, Any]:
        listed = {"type": "array", "items": self.kind.schema(), "minItems": 1}
        return {"anyOf": [self.kind.schema(), listed]} if self.bare else listed


@dataclass(frozen=True)
class Named:
    """Values of a kind by names that the user chooses."""

    kind: Kind

    def read(self, node: Node) -> dict[str, Any]:
        if node.value is None:
            return {}
        if not isinstance(node.value, dict):
            raise wrong(node, "It is a mapping of names to values.", "Example: {seq: 512}")
        return {name: self.kind.read(value) for name, (_, value) in node.value.items()}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.kind.schema()}


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
    hints: Mapping[str, str] = field(default_factory=dict)  # what to do instead, by key that is often written here

    def read(self, node: Node) -> dict[str, Any]:
        known = self.keys()
        if node.value is None and not self.required:
            return {}
        if not isinstance(node.value, dict):
            raise wrong(node, f"It is a mapping with keys of {', '.join(known)}.", "Write `key: value` below it.")
        for name, (key, _) in node.value.items():
            if name not in known:
                where = f"in '{node.path}'" if node.path else "at the top"
                raise ConfigError(
                    f"{key.place}: unknown key '{name[:60]}' {where}", f"Known: {', '.join(known)}.",
                    self.hints.get(name) or _closest(name, known), UNKNOWN_KEY,
                )  # fmt: skip
        for name in self.required:
            if name not in node.value:
                raise ConfigError(
                    f"{node.place}: '{name}' is missing", f"Needed: {', '.join(self.required)}.",
                    f"Add `{name}: {known[name].example}`.", UNKNOWN_KEY,
                )  # fmt: skip
        return {name: known[name].kind.read(value) for name, (_, value) in node.value.items()}

    def schema(self) -> dict[str, Any]:
        properties = {name: {"description": e.about, **e.kind.schema()} for name, e in self.keys().items()}
        made: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
        return {**made, "required": list(self.required)} if self.required else made


def _closest(name: str, known: Mapping[str, Entry]) -> str:
    hint = did_you_mean(name.lower().replace("-", "_"), known)
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
