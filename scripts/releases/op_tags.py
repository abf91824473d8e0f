"""What PyTorch says of its own ops: staticmem/ops/tags.json.

    python scripts/releases/op_tags.py > staticmem/ops/tags.json    # with torch

Tags are those of `torch.Tag` (aten/src/ATen/native/tags.yaml) that stages ask for. "view" is no tag: by the schema of
such an op a result aliases an argument that is not written to. An op has what any of its overloads has.
"""

from __future__ import annotations

import json
from typing import Any

TAGS = (
    "pointwise",
    "reduction",
    "core",
    "nondeterministic_seeded",
    "data_dependent_output",
    "dynamic_output_shape",
    "inplace_view",
    "view_copy",
)


def collect_tags() -> dict[str, str]:
    """Tag -> names of the ATen ops that have it, in the order of the alphabet; and the release they are of."""
    import torch

    found: dict[str, set[str]] = {tag: set() for tag in (*TAGS, "view")}
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        op: Any = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        if op is None:  # declared, and without an implementation
            continue
        for tag in op.tags:
            if tag.name in TAGS:
                found[tag.name].add(base)
        if any(result.alias_info and not result.alias_info.is_write for result in op._schema.returns):
            found["view"].add(base)
    release = ".".join(torch.__version__.split(".")[:2])
    return {"torch": release, **{tag: " ".join(sorted(names)) for tag, names in sorted(found.items())}}


if __name__ == "__main__":
    print(json.dumps(collect_tags(), indent=1))
