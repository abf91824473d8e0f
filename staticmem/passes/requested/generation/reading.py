"""What is read from single calls of a decoder, and the error where that is not what was looked for."""

from __future__ import annotations

from staticmem.errors import ModelFileError
from staticmem.ir.graph import Arg, Op, Ref

NOT_RECOGNISED = "SM126"
_END = 2**62  # a slice that ends behind it takes all that is left


def not_recognised(what: str, why: str) -> ModelFileError:
    """The error of a graph whose decode step cannot be derived."""
    return ModelFileError(
        f"generation cannot be predicted from this file: {what}",
        why,
        "Export the decoder with its prompt alone: one input of token ids, attn_implementation='sdpa' or 'eager', no "
        "padding (docs/generation.md).",
        code=NOT_RECOGNISED,
    )


def ref_name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Ref) else ""


def argument(op: Op, position: int, name: str) -> Arg:
    """An argument of a call, given by position or by name."""
    return op.args[position] if len(op.args) > position else op.kwargs.get(name)


def takes_all(op: Op) -> bool:
    """Whether a slice is the whole tensor: `x[:]`."""
    if op.base != "aten::slice":
        return False
    start, end = (argument(op, 2, "start"), argument(op, 3, "end"))
    return start in (None, 0) and (end is None or (isinstance(end, int) and end > _END))
