"""Variables of functions of torch.nn.functional that are written in Python: no stack trace has their lines.

Only what lives longer than its last use is listed. Source: torch/nn/functional.py, `gumbel_softmax` (every intermediate
has a name until the function returns), `local_response_norm` (`div = div.mul(alpha).add(k).pow(beta)`: the name lets
go of the pooled tensor when the line is done) and `multilabel_soft_margin_loss` (a target that the call's line converts
has no other name than the parameter, which holds it until the loss is divided by the number of classes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from staticmem.ir.graph import Graph, Op

END = ""  # held until the function returns
# function -> op whose result has a name -> the op that runs last while it has
_KEPT: Mapping[str, Mapping[str, str]] = {
    "gumbel_softmax": {"aten::div": END, "aten::softmax": END, "aten::max": END, "aten::scatter_": END},
    "multilabel_soft_margin_loss": {"aten::to": "aten::div"},
    "local_response_norm": {"aten::avg_pool2d": "aten::pow", "aten::avg_pool3d": "aten::pow"},
}
_CALLED = re.compile(rf"\b({'|'.join(_KEPT)})\(")


def held_within(graph: Graph) -> dict[str, int]:
    """For results that such a function names: the index of the last op during which it holds them."""
    found: dict[str, int] = {}
    ops = graph.ops
    start = 0
    while start < len(ops):
        stop = start + 1
        while stop < len(ops) and ops[stop].stack in (ops[start].stack, ()):  # an optimiser may have lost some
            stop += 1
        called = _CALLED.search(ops[start].stack[-1].text) if ops[start].stack else None
        if called is not None:
            _within(ops[start:stop], start, _KEPT[called[1]], found)
        start = stop
    return found


def _within(ops: tuple[Op, ...], start: int, kept: Mapping[str, str], found: dict[str, int]) -> None:
    """Ops of one line: what they keep, and until which of them."""
    names = {op.outputs[-1]: kept[op.base] for op in ops if op.base in kept and op.outputs}  # of a maximum the index
    last = {name: start + index for index, op in enumerate(ops) for name in op.refs()}
    end = max((last[name] for name in names if name in last), default=start)
    for name, until in names.items():
        bases = [start + index for index, op in enumerate(ops) if op.base == until]
        found[name] = end if until == END else max(bases, default=end)


__all__ = ["held_within"]
