"""Why a buffer is held: one member for each kind of owner, with the sentence that reports say of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Reason(str, Enum):
    """Why an owner holds a buffer: a name for traces, a sentence, and sentences of owners that have one of their own.

    Words of a sentence: `who` is the owner's name, `short` that of a kernel, `node` the op whose backward waits, or the
    loss, `op` the op that computes, and `use` what uses it.
    """

    text: str
    special: Mapping[str, str]  # by the owner's name; those of the model by what the buffer is
    part: str  # of the program, which has all such owners; empty: each stands for itself
    label: str  # such an owner, where it is named and not what it holds

    VALUE = "value", "value {who}, which is used later", {"loss": "the loss"}, "forward()", "variable {who}"
    FRAME = (
        "frame",
        "argument of {who}, which has not returned",
        {"": "held by the model's forward"},
        "forward()",
        "frame of {who}",
    )
    MODEL = (
        "model", "held by the model",
        {"parameter": "parameter", "buffer": "buffer of the model", "input": "given by the caller"},
        "", "parameters and buffers",
    )  # fmt: skip
    MODULE = "module", "module {who}", None, "attributes of modules", "attribute {who}"  # that code assigns
    OUTPUTS = "outputs", "{who}, which the loop holds"
    SAVED = "saved", "saved for the backward of {node}"
    RECOMPUTED = "recomputed", "run again for the backward of {node}", None, "", "{who}, which runs again"
    CHECKPOINT = (
        "checkpoint", "input of the checkpoint of {who}, which runs again from it",
        {"": "input of the checkpoint of the model, which runs again from it"}, "", "checkpoint of {who}",
    )  # fmt: skip
    GRADIENT = (
        "gradient", "gradient on its way to the backward of {node}",
        {"root gradient": "first gradient of backward()", "AccumulateGrad": "gradient on its way to its parameter"},
        "backward()",
    )  # fmt: skip
    GRAD = "grad", "gradient of {who}", None, "gradients of parameters", ".grad of {who}"
    OPTIMIZER = "optimizer", "optimizer state of {who}", None, "optimizer", "state of {who}"
    LOCAL = "local", "variable {who} of optimizer.step()", None, "optimizer.step()"
    AUTOCAST = "autocast", "autocast's cache of cast weights", None, "", "autocast's {who}"
    AUTOGRAD = "autograd", "autograd {who}"
    OFFLOAD = "offload", "offload {who}"
    COMPILED = "compiled", "used later by the compiled code: {short}{use}", None, "compiled code"
    COMPILED_AGAIN = "recomputed in backward", "recomputed in backward: {op}", None, "compiled code"
    RANK = "rank", "{who}"  # what a strategy of several GPUs does, in its own words
    OUTSIDE = "outside", "outside {who}"  # of ops that run by themselves: traced calls, recorded formulas

    def __new__(
        cls, name: str, text: str, special: Mapping[str, str] | None = None, part: str = "", label: str = "{who}"
    ) -> Reason:
        reason = str.__new__(cls, name)
        reason._value_, reason.text, reason.special = name, text, special or {}
        reason.part, reason.label = part, label
        return reason

    @property
    def lasts(self) -> bool:
        """Whether such an owner keeps a buffer for the whole step, so that no other explains it."""
        return self in (Reason.MODEL, Reason.OPTIMIZER, Reason.GRAD)

    def sentence(self, category: str, **told: str) -> str:
        """What reports say of such an owner of a buffer of `category`."""
        key = category if self is Reason.MODEL else told["who"]
        return self.special.get(key) or self.text.format(**told)
