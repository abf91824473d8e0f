"""Parser of the FX node text that the dynamo exporter stores with each ONNX node.

    %relu : [num_users=1] = call_function[target=torch.ops.aten.relu.default](args = (%x,), kwargs = {})

The format is `torch.fx.Node.format_node` (torch/fx/node.py, `_format_arg`): nodes have a percent sign, lists,
tuples and dicts are bracketed, and everything else is `str(value)` without quotes. Nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Ref
from staticmem.ir.record import record

MAX_TEXT = 1 << 16
SHORT = 1 << 10  # characters of a text whose node is remembered; most have two hundred
MAX_DEPTH = 16

_HEAD = re.compile(r"%(?P<name>[A-Za-z_]\w*) : (?:\[[^\]]*\] )?= (?P<kind>\w+)\[target=(?P<target>[^\]]+)\]\(args = ")
_ATOM = re.compile(r"[^,()\[\]{}]+")
_KEY = re.compile(r"\w+")
_INT = re.compile(r"-?\d{1,19}\Z")
_FLOAT = re.compile(r"-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|inf|nan)\Z")
_WORDS: dict[str, Arg] = {"None": None, "True": True, "False": False}


class FxTextError(ValueError):
    """The text is not a node in FX's format."""


@record(frozen=True, slots=True)
class FxNode:
    """A parsed node. `target` is `aten::conv2d` (overload `default` left out), `prims::...` or `operator::mul`."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]


def parse(text: str) -> FxNode:
    """The node of a text.

    Raises:
        FxTextError: the text has another form, or is too long or too deeply nested.
    """
    return _remembered(text) if len(text) <= SHORT else _parsed(text)


@lru_cache(2048)
def _remembered(text: str) -> FxNode:
    """Texts are read again for every binding of a model."""
    return _parsed(text)


def _parsed(text: str) -> FxNode:
    if len(text) > MAX_TEXT:
        raise FxTextError("too long")
    head = _HEAD.match(text)
    if head is None:
        raise FxTextError("no node")
    reader = _Reader(text, head.end())
    args = reader.value(0)
    reader.expect(", kwargs = ")
    kwargs = reader.value(0)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise FxTextError("no arguments")
    target = target_of(head["target"])
    return FxNode(head["name"], target, _join_equation(target, args), kwargs)


def target_of(text: str) -> str:
    """`torch.ops.aten.add.Tensor` as `aten::add.Tensor`; `torch.ops.aten.relu.default` as `aten::relu`."""
    text = text.strip().removeprefix("torch.ops.").removeprefix("_operator.").removeprefix("<built-in function ")
    if text.startswith("operator."):
        return "operator::" + text[9:]
    namespace, dot, rest = text.partition(".")
    if not dot:
        return "operator::" + namespace.rstrip(">")
    return f"{namespace}::{rest.removesuffix('.default')}"


def _join_equation(target: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """The equation of einsum has commas and no quotes: it comes out as several words."""
    if target != "aten::einsum":
        return args
    parts = [a for a in args if isinstance(a, str)]
    return (",".join(parts), *(a for a in args if not isinstance(a, str)))


class _Reader:
    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position

    def expect(self, word: str) -> None:
        if not self.text.startswith(word, self.position):
            raise FxTextError(f"{word!r} expected at {self.position}")
        self.position += len(word)

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH or self.position >= len(self.text):
            raise FxTextError("too deep or cut")
        start = self.text[self.position]
        if start == "(":
            return self._items(")", depth)
        if start == "[":
            return self._items("]", depth)
        if start == "{":
            return self._dict(depth)
        match = _ATOM.match(self.text, self.position)
        if match is None:  # an empty string prints as nothing
            return ""
        self.position = end = match.end()
        word = match[0]
        if self.text[end : end + 1] == "(":  # slice(0, 1, None), device(type='cpu')
            return (word, *self._items(")", depth))
        return _atom(word.strip())

    def _items(self, close: str, depth: int) -> tuple[Any, ...]:
        self.position += 1
        items: list[Any] = []
        text = self.text
        while text[self.position : self.position + 1] != close:
            items.append(self.value(depth + 1))
            after = text[self.position : self.position + 1]
            if after == ",":
                self.position += 2 if text[self.position + 1 : self.position + 2] == " " else 1
                while text[self.position : self.position + 1] == " ":
                    self.position += 1
            elif after != close:
                raise FxTextError(f"{close!r} expected at {self.position}")
        self.position += 1
        return tuple(items)

    def _dict(self, depth: int) -> dict[str, Any]:
        self.position += 1
        items: dict[str, Any] = {}
        while not self.text.startswith("}", self.position):
            match = _KEY.match(self.text, self.position)
            if match is None:
                raise FxTextError(f"key expected at {self.position}")
            self.position = match.end()
            self.expect(": ")
            items[match.group()] = self.value(depth + 1)
            self._comma("}")
        self.position += 1
        return items

    def _comma(self, close: str) -> None:
        if self.text.startswith(",", self.position):
            self.position += 1
            while self.text.startswith(" ", self.position):
                self.position += 1
        elif not self.text.startswith(close, self.position):
            raise FxTextError(f"{close!r} expected at {self.position}")


@lru_cache(4096)
def _atom(word: str) -> Arg:
    if word.startswith("%"):
        return Ref(word[1:])
    if word in _WORDS:
        return _WORDS[word]
    if _INT.match(word):
        return int(word)
    if _FLOAT.match(word):
        return float(word)
    if word.startswith("torch."):
        dtype = dtypes.ALL.get(word[6:])
        return dtype if dtype is not None else word
    return word
