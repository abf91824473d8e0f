"""The loss of a step, also over several outputs: `out=cross-entropy,aux=0.4*cross-entropy`.

The value of `--loss` is kept as one text, which flags, configs, sweeps and reports show alike; `terms_of` reads it. An
output goes by its name in what the model returns (the key of a dictionary, the field of a tuple or of a ModelOutput,
with dots where one is within another; in an ONNX file the name of the output), or by its number among the outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from staticmem.errors import UsageError, closest
from staticmem.ir.record import record
from staticmem.scenario.options import STEP, option

AUTO, ITSELF = "auto", "none"  # chosen by the output's shape; the output is a loss already
KINDS = (AUTO, "cross-entropy", "mse", "l1", "smooth-l1", "bce", "mean", "sum", ITSELF)  # of one output
WITHOUT_TARGET = ("mean", "sum", ITSELF)
EVERY = "all"  # in place of an output: each that no other term names
EXAMPLE = "out=cross-entropy,aux=0.4*cross-entropy"
MAX_TEXT = 4000  # characters: longer ones are a mistake
MAX_WEIGHT = 1e9
# losses that are the last op of the graph, which may have the last linear layer in it: the model computes it, or the
# training loop with what the model has returned
CAUSAL_LM = "causal-lm"
OF_THE_MODEL = (CAUSAL_LM, "fused-linear-cross-entropy")
AFTER_THE_MODEL = ("chunked-cross-entropy", "linear-cross-entropy", "ctc")
HEAD_LOSSES = (*OF_THE_MODEL, *AFTER_THE_MODEL)
OF_TRANSFORMERS = "transformers"  # a study resolves it: CAUSAL_LM for scores of tokens, else what `auto` chooses
LOSSES = (*KINDS, "outputs", OF_TRANSFORMERS, *HEAD_LOSSES)
MAX_LABELS = 1 << 20  # of a target: far more than any transcript has, and no size of a tensor overflows
_NEXT_TERM = re.compile(r"[,+](?=[^,+=]*=)")  # `+` too: lists of a sweep have commas of their own


# fmt: off
@record(frozen=True, kw_only=True)
class LossOptions:
    """The loss of a step."""

    loss: str | Mapping[Any, str] = option(
        "auto", STEP, "loss", "LOSS", "the loss, or that of each output; auto chooses by the output's shape",
        choices=LOSSES, training=True, example="auto",
        details="`out=cross-entropy,aux=0.4*cross-entropy` sums several. [Losses](levers.md#losses)",
    )
    target_length: int | None = option(
        None, STEP, "whole", "N", "length of the longest target, with --loss ctc", training=True, example="50",
        unset="the number of output frames, the most that CTC allows",
    )
    # fmt: on

    def check(self) -> None:
        """Raises:
        UsageError: the number of labels is out of range.
        """
        if self.target_length is not None and not 1 <= self.target_length <= MAX_LABELS:
            why = f"It is the labels of the longest target, from 1 to {MAX_LABELS:,}."
            what = f"--target-length {self.target_length} is out of range"
            raise UsageError(what, why, "Try --target-length 50.", "SM130")


@record(frozen=True)
class Term:
    """One summand.

    Attributes:
        output: the output that it reads: a name, a number, or `EVERY`.
        kind: one of `KINDS`.
        weight: the factor as it was written, "" for none: a product makes a scalar of its own.
        target: the name of the target: terms that give the same name have one; that of an input is the input itself.
    """

    output: str
    kind: str
    weight: str = ""
    target: str = ""

    def __str__(self) -> str:
        factor = f"{self.weight}*" if self.weight else ""
        return f"{self.output}={factor}{self.kind}" + (f"@{self.target}" if self.target else "")


def has_terms(loss: str) -> bool:
    """Whether the text of a loss names outputs."""
    return "=" in loss


def loss_text(value: str | Mapping[Any, Any]) -> str:
    """The name of a loss as it is; a text or a mapping of several as the text that `terms_of` reads, checked.

    Raises:
        UsageError: a term that is not one, or an output twice.
    """
    if isinstance(value, str):
        return ",".join(map(str, terms_of(value))) if has_terms(value) else value
    if not isinstance(value, Mapping):
        raise _wrong("--loss is neither a text nor a mapping", f"It is of type {type(value).__name__}.")
    if not value:
        raise _wrong("--loss names no output", "A mapping has the loss of each output that has one.")
    for output, term in value.items():
        if any(mark in str(output) for mark in ",+="):
            why = "Its name has a comma, a plus or an equals sign, which divide terms."
            raise _wrong(f"--loss cannot name the output '{str(output)[:60]}'", f"{why} Its number does as well.")
        if not isinstance(term, str):
            raise _wrong(f"--loss of output '{str(output)[:60]}' is no text", f"It is of type {type(term).__name__}.")
    return ",".join(str(_term(str(output), term)) for output, term in value.items())


def terms_of(text: str) -> tuple[Term, ...]:
    """The terms of a loss in the order in which they are computed; none where the text is the name of a loss.

    Raises:
        UsageError: a term that is not one, or an output twice.
    """
    if not has_terms(text):
        return ()
    if len(text) > MAX_TEXT:
        raise _wrong(f"--loss is {len(text)} characters long", f"It has at most {MAX_TEXT}.")
    terms: dict[str, Term] = {}
    for part in _NEXT_TERM.split(text):
        output, equals, rest = part.partition("=")
        if not equals:
            raise _wrong(f"--loss '{part[:60]}' is not OUTPUT=LOSS", "Each term names the output that it is of.")
        term = _term(output, rest)
        if term.output in terms:
            raise _wrong(f"--loss has two terms of the output '{term.output}'", "Each output has one.")
        terms[term.output] = term
    return tuple(terms.values())


def _term(output: str, text: str) -> Term:
    output = output.strip()
    rest, at, target = (word.strip() for word in text.partition("@"))
    before, star, after = (word.strip() for word in rest.rpartition("*"))
    kind = after.lower()
    if not output:
        raise _wrong(f"--loss '={text[:60]}' names no output", "A name, or a number from 0, stands before the '='.")
    if at and (not target or re.search(r"[,+=*@]", target)):
        raise _wrong(f"--loss {output[:60]}: no target is named '{target[:60]}'", "A name stands after the '@'.")
    if kind not in KINDS:
        what = f"--loss {output[:60]}={text[:60]}: '{kind[:60]}' is no loss of a single output"
        raise _wrong(what, f"Those are {', '.join(KINDS)}.", closest(kind, KINDS))
    if at and kind in WITHOUT_TARGET:
        raise _wrong(f"--loss {output[:60]}={text[:60]}: {kind} has no target", "It reads the output alone.")
    if star:
        try:
            number = float(before) if len(before) <= 20 else math.nan
        except ValueError:
            number = math.nan
        if not abs(number) <= MAX_WEIGHT:
            why = f"It is a number of at most {MAX_WEIGHT:g} before the '*'."
            raise _wrong(f"--loss {output[:60]}: '{before[:60]}' is no weight", why)
    return Term(output, kind, before, target)


def _wrong(what: str, why: str, hint: str = "") -> UsageError:
    return UsageError(what, why, hint or f"Example: --loss {EXAMPLE}", code="SM139")
