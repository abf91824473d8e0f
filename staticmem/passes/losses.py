"""Losses that the dynamo exporter took apart into element-wise ops.

In PyTorch each is one kernel forward and one backward, which keep the input and the target; of the parts autograd
would keep every intermediate. Who writes such a formula by hand names its functions on that line, a call of a loss not.

Source: torch/_decomp/decompositions.py (`binary_cross_entropy`, `smooth_l1_loss`, `huber_loss`, `soft_margin_loss`,
`apply_loss_reduction`), aten/src/ATen/native/Loss.cpp (`binary_cross_entropy_with_logits`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.ir.graph import Arg, Op, Ref
from staticmem.ir.record import record
from staticmem.passes.edit import Ops
from staticmem.passes.templates import Finder, Match, Named, Template

if TYPE_CHECKING:
    import numpy as np

_MEAN, _SUM = 1, 2
_REDUCTIONS = {"aten::mean": _MEAN, "aten::sum": _SUM}
_IN_MODULE = "torch.nn.modules.loss."


@record(frozen=True)
class _Loss:
    target: str
    top: str  # the base of the last element-wise op
    templates: tuple[Template, ...]
    by_hand: re.Pattern[str]  # what a line says that computes this itself
    weighted: bool = False


_LOG_OF = ("max", ("log", "x"), -100)
_LOG_OF_REST = ("max", ("log1p", ("neg", "x")), -100)
_LOGITS: tuple[Template, ...] = tuple(
    ("sub", ("mul", rest, "x"), log)
    for rest in (("rsub", "y", 1), ("sub", 1, "y"))
    for log in (("log_sigmoid", "x"), ("mul", ("add", ("mul", ("sub", "pos", 1), "y"), 1), ("log_sigmoid", "x")))
)
_DISTANCE = Named("d", ("abs", ("sub", "x", "y")))
_LOSSES = (
    _Loss(
        "binary_cross_entropy", "aten::sub",
        (("sub", ("mul", ("sub", "y", 1), _LOG_OF_REST), ("mul", "y", _LOG_OF)),),
        re.compile(r"\blog1?p?\("), weighted=True,
    ),
    _Loss("binary_cross_entropy_with_logits", "aten::sub", _LOGITS, re.compile(r"log_?sigmoid\("), weighted=True),
    _Loss(
        "huber_loss", "aten::where",
        (("where", ("lt", _DISTANCE, "delta"), ("mul", ("mul", _DISTANCE, 0.5), _DISTANCE),
          ("mul", ("sub", _DISTANCE, "half"), "delta")),),
        re.compile(r"\bwhere\("),
    ),
    _Loss(
        "smooth_l1_loss", "aten::where",
        (("where", ("lt", _DISTANCE, "delta"), ("div", ("mul", ("pow", _DISTANCE, 2), 0.5), "delta"),
          ("sub", _DISTANCE, "half")),),
        re.compile(r"\bwhere\("),
    ),
    _Loss(
        "soft_margin_loss", "aten::log1p", (("log1p", ("exp", ("mul", ("neg", "x"), "y"))),), re.compile(r"\bexp\("),
    ),
)  # fmt: skip


def rewrite(ops: Ops, consts: Mapping[str, np.ndarray]) -> int:
    """Puts losses together again; how many."""
    finder, count = Finder(ops, consts), 0
    losses = [loss for loss in _LOSSES if finder.possible(loss.templates)]
    tops = {loss.top for loss in losses}
    for op in list(ops.ops) if losses else ():
        if op is None or op.base not in tops:
            continue
        for loss in losses:
            if op.base == loss.top and not (op.stack and loss.by_hand.search(op.stack[-1].text)):
                match = finder.find(op, loss.templates)
                if match is not None and _same_call(op, match.ops.values()):
                    _replace(finder, loss, op, match)
                    count += 1
                    break
    return count


def _same_call(op: Op, others: Iterable[Op]) -> bool:
    """Whether ops are of one call: of one module, and of one line where their lines are known."""
    return all(
        other.modules == op.modules and (other.stack == op.stack or not other.stack or not op.stack) for other in others
    )


def _replace(finder: Finder, loss: _Loss, op: Op, match: Match) -> None:
    root, weight, reduction = op, None, 0
    text = op.stack[-1].text if op.stack else ""
    within = bool(op.modules) and op.modules[-1].cls.startswith(_IN_MODULE)
    if not re.search(r"reduction\s*=\s*['\"]none", text):
        reader = finder.ops.only_reader(root.outputs[0])
        told = within or "weight" in text or text.endswith(("(", ","))
        if loss.weighted and told and reader is not None and reader.base == "aten::mul" and _same_call(op, [reader]):
            weight = next((a for a in reader.args if a != Ref(root.outputs[0])), None)
            root = _extended(finder, match, reader)
        reader = finder.ops.only_reader(root.outputs[0])
        if reader is not None and len(reader.args) == 1 and not reader.kwargs and _same_call(op, [reader]):
            reduction = _REDUCTIONS.get(reader.base, 0)
            root = _extended(finder, match, reader) if reduction else root
    args = _arguments(loss, match.values, weight, reduction)
    finder.replaced(root, match, replace(root, target=f"aten::{loss.target}", args=args, kwargs={}))


def _extended(finder: Finder, match: Match, reader: Op) -> Op:
    match.ops[finder.ops.producer[reader.outputs[0]]] = reader
    return reader


def _arguments(loss: _Loss, values: Mapping[str, Arg], weight: Arg, reduction: int) -> tuple[Arg, ...]:
    x, y = values["x"], values["y"]
    if loss.target == "binary_cross_entropy":
        return x, y, weight, reduction
    if loss.target == "binary_cross_entropy_with_logits":
        return x, y, weight, values.get("pos"), reduction
    if loss.target == "soft_margin_loss":
        return x, y, reduction
    return x, y, reduction, values["delta"]


__all__ = ["rewrite"]
