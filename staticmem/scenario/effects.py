"""Where options act: an option that is given in a step in which it cannot act is said, and never ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from staticmem.scenario.options import Option

# What an option needs of the step to act, beside what errors say. Options of the table "training" need a training step.
_OPTIMIZER = ("optimizer_impl", "weight_decay", "offload_optimizer", "clip_grad_norm")
_BACKWARD = ("retain_graph", "set_to_none", "zero_grad", "accumulate")
_TRAINING = ("kbit_training", *_OPTIMIZER, *_BACKWARD)
# those that have notes of their own, or act in another mode too
_OTHERWISE = ("preset", "optimizer", "loss", "target_length", "float32_outputs", "outputs", "backward")
_OF_RANKS = ("parallel", "devices", "expert_parallel", "context_parallel", "rotate_method")


def idle(options: Mapping[str, Option], values: Mapping[str, Any], mode: str, optimizer: str | None) -> Iterator[str]:
    """Sentences on options that were given and cannot act in a step of this mode, with this optimizer.

    Args:
        options: those that are declared.
        values: of each of them; the default is "not given".
    """
    for name, one in options.items():
        if values[name] != one.default and name not in _OTHERWISE:
            needed = _needed(name, one, values, mode, optimizer)
            if needed:
                yield f"{one.flag} is not used: it needs {needed}"


def _needed(name: str, one: Option, values: Mapping[str, Any], mode: str, optimizer: str | None) -> str:
    """What the step lacks for the option to act; empty where it acts."""
    if name == "devices":
        return "" if values["parallel"] or values["context_parallel"] else "--parallel STRATEGY"
    if mode != "train":
        of_training = name in _TRAINING or (one.training and name not in _OF_RANKS)
        return "a training step (--optimizer, or --mode train)" if of_training else ""
    if name in _OPTIMIZER and optimizer is None:
        return "an optimizer (--optimizer adam)"
    if name in _BACKWARD and not values["backward"]:
        return "a backward (leave --no-backward out)"
    return ""
