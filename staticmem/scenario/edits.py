"""What is changed in the model itself."""

from __future__ import annotations

import re

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.scenario.options import LEVERS, STEP, option

NONE_FROZEN = "none"  # for `freeze`: all parameters are trained, also where the file does not say it
# variables of the training loop that `let_go` names: all that the forward is given, and the loss with its outputs
BATCH_OF_LOOP, LOSS_OF_LOOP = OF_LOOP = ("batch@loop", "loss@loop")
MAX_PATTERN = 1000  # characters of a regular expression: longer ones are a mistake


# fmt: off
@record(frozen=True, kw_only=True)
class Edits:
    """What of the model is frozen or replaced, and what the file does not say of it."""

    freeze: str | None = option(
        None, LEVERS, "text", "REGEX", "regular expression; parameters whose name contains a match are not trained",
        example="'^(?!fc)'", details="`'^(?!fc)'`: all but `fc`; `none`: all are trained",
    )
    inplace_abn: bool = option(
        False, LEVERS, "switch", "", "batch norms with their ReLU as InPlaceABN, which saves the result alone",
        details="ReLU becomes leaky ReLU ([levers](levers.md#batch-norms-in-place))",
    )
    let_go: str | tuple[str, ...] = option(
        (), LEVERS, "names", "NAME|all", "variables that the model's code lets go of after their last use",
        example="[conv5, skips@model.py:41]", training=False, needs="",
        details="Needs a recording. `NAME@FILE:LINE` is one of several ([which del is worth "
        "what](liveness-graph.md#which-del-is-worth-what)); `batch@loop` and `loss@loop` are the training "
        "loop's, need no recording and are not in `all`",
    )
    unfold_batchnorm: bool = option(
        False, STEP, "switch", "", "puts a batch norm after every convolution with a bias",
        details="For an inference export analysed for training",
    )
    inplace_activations: str = option(
        "auto", STEP, "choice", "POLICY", "what ran in place, where the file does not say",
        choices=("auto", "none", "all"), example="auto",
        details="ONNX files do not say it",
    )
    # fmt: on

    def check(self) -> None:
        """Raises:
        UsageError: what is frozen is no regular expression.
        """
        text = self.freeze or ""
        if len(text) > MAX_PATTERN:
            raise UsageError(
                f"--freeze is {len(text)} characters long",
                f"A regular expression has at most {MAX_PATTERN} here.",
                "Use a shorter one.",
                code="SM162",
            )
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            what, why = f"--freeze '{text}' is not a regular expression", f"Python says: {error}."
            raise UsageError(what, why, "Try '^(?!fc)'.", code="SM162") from error
