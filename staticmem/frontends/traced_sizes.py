"""What `staticmem export` writes of open sizes: a member of a `.pt2`, an entry of an ONNX file's metadata.

The text is JSON, `{"example": {"s77": 2}, "least": {"s77": 1}, "conditions": ["Ne(s77, 1)"]}`, read as hostile input.
"""

from __future__ import annotations

import json
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.frontends import fields
from staticmem.ir.model_file import TracedSizes

NAME = "staticmem_sizes.json"  # under `extra/` of a `.pt2`, in `metadata_props` of a ModelProto
MAX_CHARACTERS = 1 << 20
MAX_CONDITIONS = 10_000


def write(sizes: TracedSizes) -> str:
    """The text of the sizes."""
    return json.dumps(content_of(sizes), separators=(",", ":"), sort_keys=True)


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
    return of_content(json.loads(text))


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
