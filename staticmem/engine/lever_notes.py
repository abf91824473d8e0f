"""What a report has to say about the levers of a step."""

from __future__ import annotations

from staticmem.ir import dtypes
from staticmem.ir.graph import Note
from staticmem.scenario.step import Scenario


def notes_of(scenario: Scenario, overwritten: int = 0) -> list[Note]:
    """Assumptions and warnings. `overwritten`: checkpoints that change one of their inputs in place."""
    notes: list[Note] = []
    if overwritten:
        text = (
            "a checkpoint changes its input in place, so that PyTorch's backward stops with an error: put the border "
            "before the op that makes this input, or make the change out of place"
        )
        notes.append(Note("warning", "SM311", text, overwritten))
    if scenario.amp is dtypes.float16 and not scenario.grad_scaler:
        text = "no GradScaler: with one, a few scalars of 512 bytes are alive besides (--grad-scaler)"
        notes.append(Note("assumption", "SM312", text))
    if scenario.accumulate > 1:
        text = f"micro-batch 2 of {scenario.accumulate} is shown: from it on, gradients exist during the forward"
        notes.append(Note("assumption", "SM313", text))
    if scenario.offload_optimizer and scenario.optimizer is not None:
        text = (
            "optimizer state and update are on the CPU; gradients are copied out and parameters back in without a "
            "tensor on the GPU, and gradients stay until zero_grad()"
        )
        notes.append(Note("assumption", "SM314", text))
    return notes
