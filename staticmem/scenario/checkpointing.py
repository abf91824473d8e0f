"""Checkpoints, and what selective ones keep: names of calls, as options give them, and the policy that they make.

    context_fn = partial(create_selective_checkpoint_contexts, policy)

The policy is asked at each call that reaches the kernels: a composite op (`linear`) is seen as what it calls (`mm`,
`addmm`). It returns MUST_SAVE for the calls that it names, and PREFER_RECOMPUTE for others.

Source: torch/utils/checkpoint.py (`create_selective_checkpoint_contexts`, `CheckpointPolicy`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.scenario.options import LEVERS, at_least_one, option

SQRT = "sqrt"
NO_CHECKPOINTS = ("none",)  # for `checkpoint`: nothing runs in one, also where the file does not say it
ATTENTION = "sdpa"  # the name of all fused kernels of scaled_dot_product_attention
_FUSED = "_scaled_dot_product_"
NAME = re.compile(
    r"(?:torch\.ops\.)?(?:aten(?:::|\.))?(?P<call>_{0,2}[A-Za-z]\w{0,80}(?:\.\w{1,40})?)(?:/(?P<every>[1-9]\d{0,3}))?"
)


# fmt: off
@record(frozen=True, kw_only=True)
class Checkpointing:
    """What runs under `torch.utils.checkpoint`."""

    checkpoint: str | tuple[str, ...] = option(
        (), LEVERS, "names", "CLASS|PATH",
        "modules that run under torch.utils.checkpoint, by class (Bottleneck) or path (layer1.*); or none",
        example="[Bottleneck]",
        details="`use_reentrant=False`. `*` stands for a part of a path",
    )
    checkpoint_every: int = option(
        1, LEVERS, "whole", "K", "how many of those modules share a checkpoint",
        example="2", details="They follow each other in one parent",
    )
    checkpoint_save: str | tuple[str, ...] = option(
        (), LEVERS, "names", "OP", "calls whose results those checkpoints keep: mm, sdpa; mm/2 is every second one",
        example="[mm/2, sdpa]", details="`sdpa` is any fused attention ([levers](levers.md#activation-checkpointing))",
    )
    checkpoint_segments: int | str = option(
        0, LEVERS, "segments", "N|sqrt", "segments of checkpoint_sequential: a number, or sqrt",
        example="sqrt",
    )
    checkpoint_sequential: str | None = option(
        None, LEVERS, "text", "PATH", "path of the Sequential that is divided into segments",
        example="layers", unset="the one with the most modules",
    )
    # fmt: on

    def check(self) -> None:
        """Raises:
        UsageError: a number is out of range, or a name names no call.
        """
        if self.checkpoint_every < 1:
            raise at_least_one("checkpoint-every", self.checkpoint_every, "Modules that share a checkpoint")
        segments = self.checkpoint_segments
        if segments != SQRT and (not isinstance(segments, int) or segments < 0):
            raise UsageError(
                f"--checkpoint-segments {segments} is not a number of segments",
                f"It is a whole number from 1, or {SQRT}.",
                "Try --checkpoint-segments sqrt.",
                code="SM160",
            )
        for name in self.checkpoint_save:
            if NAME.fullmatch(name) is None:
                raise UsageError(
                    f"--checkpoint-save {name[:80]!r} names no call",
                    "It is the name of an ATen call, as mm or max.dim, or sdpa, and /2 for every second one.",
                    "Example: --checkpoint-save mm/2 --checkpoint-save sdpa",
                    code="SM160",
                )


class Policy:
    """Names of calls whose results are kept: `mm`, `max.dim`, `sdpa`; of `mm/2` the first, the third, and so on.

    `used` are the names that a call had.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.every: dict[str, int] = {}
        self.used: set[str] = set()
        for name in names:
            match = NAME.fullmatch(name)
            assert match is not None, f"{name} names no call"  # options are checked where they are given
            self.every[match["call"]] = int(match["every"] or 1)

    def keeps(self, call: str, counts: Counter[str]) -> bool:
        """Whether the results of this call are kept. `call` is its name without a namespace, "mm" or "max.dim";
        `counts` has the calls before it in the same checkpoint, and counts it."""
        base, _, overload = call.partition(".")
        for name in (f"{base}.{overload or 'default'}", base, ATTENTION if base.startswith(_FUSED) else ""):
            if name in self.every:
                self.used.add(name)
                counts[name] += 1
                return (counts[name] - 1) % self.every[name] == 0
        return False


def never_seen(names: Collection[str], policies: Iterable[Policy]) -> list[str]:
    """The names that no call had in a step whose checkpoints have these policies."""
    seen = {name for policy in policies for name in policy.used}
    return sorted(Policy(names).every.keys() - seen)
