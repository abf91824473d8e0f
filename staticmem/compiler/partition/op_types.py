"""What the partitioner knows of an op: whether it may be computed again, whether it fuses, whether it is a view.

The lists are those of `get_default_op_list` (torch/_functorch/partitioners.py), which stand in `ops.tags`.
`tests/compiler/partition/test_partition_op_types.py` compares them with an installed PyTorch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from staticmem.ops import tags
from staticmem.tracing.nodes import GETITEM

VIEWS = tags.PARTITIONER_VIEWS
RECOMPUTABLE = tags.partitioner_pointwise() | VIEWS | tags.PARTITIONER_OTHERS | {GETITEM}
RANDOM = tags.PARTITIONER_RANDOM
FUSIBLE = RECOMPUTABLE | RANDOM
COMPUTE_INTENSIVE = tags.PARTITIONER_COMPUTE_INTENSIVE
LIFTED = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})

NEVER_MERGED = tags.never_merged()
WRITES = "aten::copy_"
CAT = "aten::cat"


class OpTypes(NamedTuple):
    """Answers of the lists for one target."""

    recomputable: bool
    fusible: bool
    view: bool
    random: bool
    compute_intensive: bool
    lifted: bool
    cat: bool


@lru_cache(4096)
def types_of(target: str) -> OpTypes:
    """The types of a target, whatever its overload: `get_aten_target` (torch/_functorch/compile_utils.py)."""
    base = target.split(".", 1)[0]
    return OpTypes(
        base in RECOMPUTABLE,
        base in FUSIBLE,
        base in VIEWS,
        base in RANDOM,
        base in COMPUTE_INTENSIVE,
        target in LIFTED,
        base == CAT,
    )
