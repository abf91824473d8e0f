"""What the outputs of a model are called in what its forward returns: `out`, `aux_logits`, `heads.0`.

A name has the keys and fields on the way to the output, with dots between them. One that would have numbers alone, as
in a plain tuple, is "": such an output goes by its number among all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from staticmem.frontends import fields

LONGEST = 200  # characters of a name
_DEEPEST = 20  # containers within each other
_MOST = 100_000  # parts of a specification


def name_of(path: Sequence[str]) -> str:
    """The name of the output at a path."""
    return "" if all(part.isdigit() for part in path) else usable(".".join(path))


def usable(name: str) -> str:
    """The name, or "" for one that no report could show."""
    return name if len(name) <= LONGEST and name.isprintable() else ""


def of_treespec(text: Any) -> list[str]:
    """The names of the leaves of a pytree, in order, from its specification as `torch.export.save` writes it
    (torch/utils/_pytree.py, `treespec_dumps`); empty where it is of another kind.

    Raises:
        TypeError, ValueError, KeyError: it is damaged.
    """
    protocol, spec = fields.items(json.loads(fields.text(text)))
    if protocol != 1:
        return []
    return [name_of(path) for path in _leaves(fields.mapping(spec), (), [0])]


def _leaves(spec: Any, path: tuple[str, ...], count: list[int]) -> Iterator[tuple[str, ...]]:
    count[0] += 1
    if len(path) > _DEEPEST or count[0] > _MOST:
        raise ValueError("what the model returns is a tree of too many parts")
    children = fields.items(spec["children_spec"])
    if spec["type"] is None:
        yield path
        return
    for number, (key, child) in enumerate(zip(_keys(spec, len(children)), children, strict=True)):
        yield from _leaves(fields.mapping(child), (*path, key or str(number)), count)


def _keys(spec: Any, count: int) -> Sequence[str]:
    """Dictionaries and ModelOutputs of transformers have their keys as the context; "" for what has none."""
    try:
        keys = json.loads(spec["context"])
    except (TypeError, ValueError):
        keys = None
    if isinstance(keys, list) and len(keys) == count:
        return [str(key) if isinstance(key, str | int) else "" for key in keys]
    return [""] * count
