"""What the forward of a model of transformers takes, as its documentation says it: the type and the sizes of each
tensor by name. The library writes it in one form, and completes it for the inputs that many models have.

Source: transformers/utils/auto_docstring.py, `ModelArgs`, `auto_method_docstring`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ENTRY = re.compile(r"^ *(\w+) \((.+)\) *:? *$", re.MULTILINE)
_KIND = re.compile(r"(Long|Int|Bool|Float)Tensor|Tensor|list|List|bool\b")
_END = re.compile(r"\*optional\*|, defaults| or [({t]|\*required\*")
_TOKENS_OF_PAIRS = "{0}"  # what a text has for the sizes of its tokens that are filled in elsewhere


@dataclass(frozen=True)
class Documented:
    """An input: `kind` is "Long", "Int", "Bool", "Float", "" (of any type), "list" or "bool"; `sizes` are words for
    those of its axes, None where they are not said."""

    kind: str
    sizes: tuple[str, ...] | None
    optional: bool


def documented(forward: Callable[..., Any]) -> dict[str, Documented]:
    """The inputs of a forward by name; those alone whose type is said."""
    text = (getattr(forward, "__doc__", None) or "").split("Returns:")[0]
    inputs = {}
    for name, said in _ENTRY.findall(text):
        kind = _KIND.search(said)
        if kind is not None:
            word = kind[1] or {"Tensor": "", "List": "list"}.get(kind[0], kind[0])
            inputs[name] = Documented(word, _sizes(said), "optional" in said)
    return inputs


def _sizes(said: str) -> tuple[str, ...] | None:
    """Of `LongTensor of shape ((batch_size, sequence_length), 4), *optional*` the words between the brackets."""
    said = said.replace("`", "").replace("'", "").replace(_TOKENS_OF_PAIRS, "batch_size, sequence_length")
    of_shape = re.search(r"of shape(.*)", said)
    if of_shape is None:
        return None
    listed = re.sub(r"[()\[\]]", "", _END.split(of_shape[1])[0])
    return tuple(word.strip() for word in listed.split(",") if word.strip())
