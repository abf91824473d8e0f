"""What `staticmem export` writes of open sizes: a member of a `.pt2`, an entry of an ONNX file's metadata.

The text is JSON, `{"example": {"batch": 2}, "least": {"batch": 1}, "conditions": ["Ne(batch, 1)"], "names": {"s77":
"batch"}}`, read as hostile input. `names` is of an archive: what its symbols are called in reports and by `--dim`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.frontends import fields
from staticmem.ir.model_file import TracedSizes

LEAST_FOUND = 1  # elements that an op finds in data of which nothing is known: with none, code may divide by zero

NAME = "staticmem_sizes.json"  # under `extra/` of a `.pt2`, in `metadata_props` of a ModelProto
MAX_CHARACTERS = 1 << 20
MAX_CONDITIONS = 10_000
_SYMBOL = re.compile("s[0-9]{1,9}", re.ASCII)  # as PyTorch names them
_NAME = re.compile("[a-z][a-z0-9_]{0,63}", re.ASCII)


def write(sizes: TracedSizes) -> str:
    """The text of the sizes."""
    names = {"names": dict(sizes.names)} if sizes.names else {}
    return json.dumps({**content_of(sizes), **names}, separators=(",", ":"), sort_keys=True)


def content_of(sizes: TracedSizes) -> dict[str, Any]:
    """The sizes as JSON has them."""
    return {"example": dict(sizes.example), "least": dict(sizes.least), "conditions": list(sizes.conditions)}


def read(text: str, path: str) -> TracedSizes:
    """The sizes of a text in the file `path`.

    Raises:
        ModelFileError: it is no such text.
    """
    try:
        return _parsed(text)
    except fields.MALFORMED as error:
        why = f"Its {NAME} is not what staticmem writes: {str(error)[:160] or type(error).__name__}."
        raise ModelFileError(f"{path} has damaged sizes", why, "Export the model again.", code="SM104") from error


def _parsed(text: str) -> TracedSizes:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"sizes of at most {MAX_CHARACTERS:,} characters")
    content = json.loads(text)
    sizes = of_content(content)
    names = {fields.text(k): fields.text(v) for k, v in fields.mapping(content.get("names", {})).items()}
    if not usable(names):
        raise ValueError("names of sizes that are none")
    return replace(sizes, names=names)


def usable(names: Mapping[str, str]) -> bool:
    """Whether symbols can be called so: each is one, and no name is that of two, or also a symbol."""
    if not all(_SYMBOL.fullmatch(symbol) and _NAME.fullmatch(name) for symbol, name in names.items()):
        return False
    return len({*names.values(), *names}) == 2 * len(names)


def of_content(value: Any) -> TracedSizes:
    """The sizes of decoded JSON; what breaks the format raises one of `fields.MALFORMED`."""
    content = fields.mapping(value)
    conditions = tuple(fields.text(c) for c in fields.items(content["conditions"]))
    if len(conditions) > MAX_CONDITIONS:
        raise ValueError(f"at most {MAX_CONDITIONS:,} conditions")
    if conditions:
        from staticmem.ir import expressions  # late: most files have none

        for condition in conditions:
            expressions.parse(condition)
    return TracedSizes(_sizes(content["example"]), _sizes(content["least"]), conditions)


def _sizes(value: Any) -> dict[str, int]:
    return {name: fields.size(size) for name, size in fields.mapping(value).items()}
