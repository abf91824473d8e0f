"""Kinds of values of options: each reads a node of a document, and describes itself in JSON Schema."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from staticmem.documents import DocumentError, Node
from staticmem.errors import UsageError, closest
from staticmem.scenario.adapters import EXAMPLE, lora_text
from staticmem.scenario.compiling import WHOLE
from staticmem.scenario.losses import has_terms, loss_text
from staticmem.scenario.options import Option
from staticmem.scenario.request import OPTIONS
from staticmem.units import parse_bytes, parse_limit

UNKNOWN_KEY, WRONG_VALUE = "SM194", "SM195"
SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
LARGEST = 2**40  # larger than any size or count
PRECISIONS = ("float32", "float16", "bfloat16")  # as PyTorch writes them, beside fp32, fp16 and bf16


class Kind(Protocol):
    """A kind of value."""

    def read(self, node: Node) -> Any:
        """The value of a node.

        Raises:
            DocumentError: it is of another kind; the message has its place and what is allowed.
        """
        ...

    def schema(self) -> dict[str, Any]:
        """The kind in JSON Schema draft-07."""
        ...


def wrong(node: Node, wanted: str, hint: str) -> DocumentError:
    """The error of a value that is not what is wanted. `wanted` is a sentence."""
    name = node.path.rpartition(".")[2] or "the file"
    where = node.place if node.place.endswith(name) else f"{node.place}: {name}"
    return DocumentError(f"{where} is {node.shown()}", wanted, hint, WRONG_VALUE)


def is_number(value: Any, kinds: Any = int) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


class Choice:
    """One of some choices; `shown` are those that a schema offers."""

    def __init__(self, choices: tuple[str, ...], shown: tuple[str, ...] = ()) -> None:
        self.choices, self.shown = choices, shown or choices

    def read(self, node: Node) -> str:
        value = node.value
        if value is None or value is False:  # `amp: none` is text; `amp:` and `amp: no` are not
            value = "none" if "none" in self.choices else value
        if isinstance(value, str) and value.lower() in self.choices:
            return value.lower()
        hint = closest(str(value).lower(), self.choices) or f"Example: {self.choices[0]}"
        raise wrong(node, f"It is one of {', '.join(self.shown)}.", hint)

    def schema(self) -> dict[str, Any]:
        unsaid = [None, False] if "none" in self.choices else []  # `amp:` and `amp: no`, as `read` has them
        return {"enum": [*self.shown, *unsaid]}


class Whole:
    """A whole number."""

    def __init__(self, example: str = "32", least: int = 1) -> None:
        self.example, self.least = example, least

    def read(self, node: Node) -> int:
        if is_number(node.value) and self.least <= node.value < LARGEST:
            return int(node.value)
        raise wrong(node, f"It is a whole number of at least {self.least}.", f"Example: {self.example}")

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least}


class Number:
    """A number from 0 to below `high`."""

    def __init__(self, high: float) -> None:
        self.high = high

    def read(self, node: Node) -> float:
        if is_number(node.value, (int, float)) and 0 <= node.value < self.high:
            return float(node.value)
        raise wrong(node, f"It is a number from 0 to below {self.high:g}.", "Example: 0.9")

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": 0.0, "exclusiveMaximum": self.high}


class Switch:
    """true or false."""

    def read(self, node: Node) -> bool:
        if isinstance(node.value, bool):
            return node.value
        raise wrong(node, "It is true or false.", "Example: true")

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Text:
    """Any text, a number written plainly included."""

    def __init__(self, example: str) -> None:
        self.example = example

    def read(self, node: Node) -> str:
        value = str(node.value) if is_number(node.value, (int, float)) else node.value
        if isinstance(value, str) and value.strip():
            return value.strip()
        raise wrong(node, "It is a text.", f"Example: {self.example}")

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "number"]}


class Resolution:
    """`224`, `480x640` or `[480, 640]`: height and width."""

    def read(self, node: Node) -> tuple[int, int]:
        value = node.value
        sizes: list[Any] = [value, value]
        if isinstance(value, str):
            sizes = [plain("whole", part) for part in value.split("x")]
        elif isinstance(value, list):
            sizes = [part.value for part in value]
        if len(sizes) == 2 and all(is_number(size) and 1 <= size < LARGEST for size in sizes):
            return int(sizes[0]), int(sizes[1])
        raise wrong(node, "It is one number, or height and width.", "Examples: 224, 480x640")

    def schema(self) -> dict[str, Any]:
        size = {"type": "integer", "minimum": 1}
        pair = {"type": "array", "items": size, "minItems": 2, "maxItems": 2}
        return {"anyOf": [size, {"type": "string", "pattern": "^[0-9]+x[0-9]+$"}, pair]}


class Segments:
    """A number of segments, or sqrt."""

    def read(self, node: Node) -> Any:
        return "sqrt" if node.value == "sqrt" else Whole("4", least=0).read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": "sqrt"}, {"type": "integer", "minimum": 0}]}


class Bytes:
    """`40 GiB`, `512MiB`, `16GB` (10^9 bytes), or a number of bytes. `limit`: `40` is refused, which lacks its unit."""

    def __init__(self, least: int = 1, limit: bool = False) -> None:
        self.least, self.limit = least, limit

    def read(self, node: Node) -> int:
        size = node.value if is_number(node.value) else None
        if isinstance(node.value, str):
            size = parse_bytes(node.value)
        if size is not None and self.limit:
            size = parse_limit(node.value)
        if size is not None and size >= self.least:
            return int(size)
        raise wrong(node, "It is a size with a unit: KiB, MiB, GiB, TiB, kB, MB, GB, TB.", "Example: 40 GiB")

    def schema(self) -> dict[str, Any]:
        pattern = r"^[0-9]+(\.[0-9]+)? *([KkMmGgTt][Ii]?)?[Bb]?$"
        return {"anyOf": [{"type": "string", "pattern": pattern}, {"type": "integer", "minimum": self.least}]}


class ListOf:
    """A list of a kind; one value alone is a list of one."""

    def __init__(self, kind: Kind, bare: bool = True) -> None:
        self.kind, self.bare = kind, bare

    def read(self, node: Node) -> tuple[Any, ...]:
        if isinstance(node.value, list) and node.value:
            return tuple(self.kind.read(child) for child in node.value)
        if isinstance(node.value, list) or not self.bare:
            raise wrong(node, "It is a list with at least one value.", "Write it as [a, b].")
        return (self.kind.read(node),)

    def schema(self) -> dict[str, Any]:
        listed = {"type": "array", "items": self.kind.schema(), "minItems": 1}
        return {"anyOf": [self.kind.schema(), listed]} if self.bare else listed


class Modules:
    """`true`: the whole model; else modules by class or path; `false` and `none`: nothing."""

    def __init__(self, example: str) -> None:
        self.names = ListOf(Text(example))

    def read(self, node: Node) -> tuple[str, ...]:
        if node.value in (None, "none") or isinstance(node.value, bool):
            return (WHOLE,) if node.value is True else ()
        return self.names.read(node)

    def schema(self) -> dict[str, Any]:
        listed = {"type": "array", "items": {"type": "string"}, "minItems": 1}
        return {"anyOf": [{"type": ["boolean", "null"]}, {"type": "string"}, listed]}


class Adapters:
    """Adapters as a text, `r=16,alpha=32,targets=q_proj+v_proj`, or as a mapping with these keys; `none`: nothing."""

    def read(self, node: Node) -> str:
        value = node.value
        if isinstance(value, dict):
            value = node.plain()
        elif value is None or value is False:
            value = "none"
        try:
            if isinstance(value, str | dict):
                return lora_text(value)
        except UsageError as error:
            raise DocumentError(f"{node.place}: {error.what}", error.why, error.hint, WRONG_VALUE) from error
        raise wrong(node, "It is a text of KEY=VALUE, or a mapping.", f"Example: {EXAMPLE}")

    def schema(self) -> dict[str, Any]:
        number, text = {"type": "number"}, {"type": "string"}
        names = {"anyOf": [text, {"type": "array", "items": text, "minItems": 1}]}
        kinds = {"r": {"type": "integer", "minimum": 1}, "alpha": number, "dropout": number, "targets": names}
        kinds |= {"dtype": text, "save": names, "input_grads": {"type": "boolean"}}
        table = {"type": "object", "properties": kinds, "additionalProperties": False, "required": ["targets"]}
        return {"anyOf": [{"type": ["string", "null"]}, {"const": False}, table]}


class Pairs:
    """`rank=64,scale=0.25`, or a mapping with these keys."""

    def read(self, node: Node) -> str:
        if isinstance(node.value, dict):
            return ",".join(f"{key}={Text('64').read(child)}" for key, (_, child) in node.value.items())
        return Text("rank=64").read(node)

    def schema(self) -> dict[str, Any]:
        scalar = {"type": ["string", "number"]}
        return {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": scalar, "minProperties": 1}]}


class Loss:
    """The name of a loss; or a text or a mapping with the loss of each output, `{out: mse, aux: 0.4*mse}`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.name = Choice(names)

    def read(self, node: Node) -> str:
        value = node.plain() if isinstance(node.value, dict) else node.value
        if not isinstance(value, dict) and not (isinstance(value, str) and has_terms(value)):
            return self.name.read(node)
        try:
            return loss_text(value)
        except UsageError as error:
            raise DocumentError(f"{node.place}: {error.what}", error.why, error.hint, WRONG_VALUE) from error

    def schema(self) -> dict[str, Any]:
        term = {"type": "string"}
        table = {"type": "object", "additionalProperties": term, "minProperties": 1}
        return {"anyOf": [self.name.schema(), {"type": "string", "pattern": "="}, table]}


class Named:
    """Values of a kind by names that the user chooses."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def read(self, node: Node) -> dict[str, Any]:
        if node.value is None:
            return {}
        if not isinstance(node.value, dict):
            raise wrong(node, "It is a mapping of names to values.", "Example: {seq: 512}")
        return {name: self.kind.read(value) for name, (_, value) in node.value.items()}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.kind.schema()}


def kind_of(one: Option, more: tuple[str, ...] = ()) -> Kind:
    """The kind of an option's values; `more` are choices besides its own."""
    kinds: dict[str, Callable[[], Kind]] = {
        "choice": lambda: Choice((*one.choices, *more, *one.aliases), shown=(*one.choices, *more)),
        "precision": lambda: Choice((*one.choices, *PRECISIONS), shown=one.choices),
        "whole": lambda: Whole(one.example or "32"),
        "bytes": lambda: Bytes(least=0),
        "fraction": lambda: Number(1.0),
        "factor": lambda: Number(1e6),
        "switch": Switch,
        "resolution": Resolution,
        "segments": Segments,
        "dims": lambda: Named(Whole("512")),
        "modules": lambda: Modules("Block"),
        "adapters": Adapters,
        "pairs": Pairs,
        "loss": lambda: Loss((*one.choices, *more)),
        "names": lambda: ListOf(Text(one.example.strip("[]"))),
        "text": lambda: Text(one.example),
    }
    return kinds[one.kind]()


def plain(kind: str, text: str) -> Any:
    """A text of the command line or of a variable as the value in a config; a text that does not fit stays text."""
    text = text.strip()
    if kind == "switch":
        return SWITCHES.get(text.lower(), text)
    if kind == "modules" and text.lower() in SWITCHES:
        return SWITCHES[text.lower()]
    if kind in ("names", "modules"):
        return [part.strip() for part in text.split(",")]
    if kind == "dims":
        pairs = (part.rpartition("=") for part in text.split(","))
        return {name.strip(): plain("whole", size) for name, _, size in pairs}
    if kind in ("whole", "resolution", "segments"):
        # `int` takes underscores, other alphabets and any length
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else text.lower()
    if kind in ("fraction", "factor"):
        with suppress(ValueError):
            return float(text) if len(text) <= 15 else text
    return text


def read_keywords(function: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call in Python, each read as a config reads it; None is "not given".

    Args:
        function: the name of the function that was called, for errors.
        options: its keywords, as the caller wrote them.

    Raises:
        UsageError: an option is unknown, or its value is of a wrong type.
    """
    read: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTIONS:
            hint = closest(name.lower(), OPTIONS) or "See docs/api.md, or 'help(staticmem.analyze)'."
            why = "It takes the options that 'staticmem analyze --help' lists, with underscores in their names."
            raise UsageError(f"{function}() has no option '{name[:60]}'", why, hint, UNKNOWN_KEY)
        if value is not None:
            read[name] = read_keyword(function, OPTIONS[name], value)
    return read


def read_keyword(function: str, one: Option, value: Any) -> Any:
    """The value of an option as a call in Python gives it: classes of optimizers, types of
    PyTorch and numbers of numpy stand for plain values.

    Raises:
        UsageError: it is of a wrong type.
    """
    if isinstance(value, type(one.default)) and value == one.default:
        return value
    node = _make_node(value, function, one.name)
    if one.kind in ("choice", "precision") and isinstance(node.value, str):
        return node.value  # `Request` checks the word, and knows why some words are refused
    return kind_of(one).read(node)


def read_texts(function: str, name: str, value: Any) -> tuple[str, ...]:
    """An argument of a function that is a text or several of them.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(value, str) and isinstance(value, Iterable):
        value = list(value)
    return ListOf(Text("")).read(_make_node(value, function, name)) if value else ()


def _make_node(value: Any, function: str, path: str) -> Node:
    """A Python value as the node of a document."""
    if isinstance(value, Mapping):
        pairs = {str(key): (Node(str(key), function), _make_node(part, function, path)) for key, part in value.items()}
        return Node(pairs, function, path=path)
    if isinstance(value, list | tuple | set | frozenset):
        return Node([_make_node(part, function, path) for part in value], function, path=path)
    return Node(_plain_value(value), function, path=path)


def _plain_value(value: Any) -> Any:
    """A number, a text, or the value itself."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type):
        return value.__name__  # torch.optim.AdamW
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if hasattr(value, "__index__") and not hasattr(value, "shape"):
        return operator.index(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()  # a scalar of numpy
    return value
