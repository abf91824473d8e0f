"""What selective checkpoints keep: names of calls, as options give them, and the policy that they make.

    context_fn = partial(create_selective_checkpoint_contexts, policy)

The policy is asked at each call that reaches the kernels: a composite op (`linear`) is seen as what it calls (`mm`,
`addmm`). It returns MUST_SAVE for the calls that it names, and PREFER_RECOMPUTE for others.

Source: torch/utils/checkpoint.py (`create_selective_checkpoint_contexts`, `CheckpointPolicy`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

ATTENTION = "sdpa"  # the name of all fused kernels of scaled_dot_product_attention
_FUSED = "_scaled_dot_product_"
NAME = re.compile(
    r"(?:torch\.ops\.)?(?:aten(?:::|\.))?(?P<call>_{0,2}[A-Za-z]\w{0,80}(?:\.\w{1,40})?)(?:/(?P<every>[1-9]\d{0,3}))?"
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
