"""The optimizers, and their options. GaLore's and APOLLO's: `--optim-args` and `--optim-target-modules`.

Both have the names and the defaults of `TrainingArguments`: transformers 5.24, trainer_optimizer.py
(`_get_galore_optimizer`, `_get_apollo_optimizer`, `_setup_low_rank_optimizer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from staticmem.errors import UsageError, closest
from staticmem.ir.record import record
from staticmem.scenario.adapters import ALL_LINEAR
from staticmem.scenario.options import LEVERS, STEP, TRAINED, UPDATED, option

GALORE, APOLLO = LOW_RANK = ("galore-adamw", "apollo-adamw")
TORCH_OPTIMIZERS = {  # name for `--optimizer`: class of torch.optim
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "radam": "RAdam",
    "nadam": "NAdam",
    "adamax": "Adamax",
    "adadelta": "Adadelta",
    "adafactor": "Adafactor",
}
# of bitsandbytes.optim: those without "8bit" have states in float32, paged ones keep large states in managed memory
_PAGED = ("paged-adamw-8bit", "paged-adamw-32bit", "paged-lion-8bit", "paged-lion-32bit")
BITSANDBYTES = ("adam-8bit", "adamw-8bit", "lion-8bit", "adamw-32bit", "lion-32bit", *_PAGED)
# AdamW of torchao.optim: states of 8 or 4 bits, or FP8 E4M3, with a scale for each block
STATE_IN_FLOAT8 = "torchao-adamw-fp8"
TORCHAO = ("torchao-adamw-8bit", "torchao-adamw-4bit", STATE_IN_FLOAT8)
# muon is torch.optim.Muon beside an AdamW, lion timm's, adafactor-hf transformers' Adafactor, those of `LOW_RANK` are
# of galore_torch and apollo_torch
OPTIMIZERS = (*TORCH_OPTIMIZERS, "muon", "lion", "adafactor-hf", *BITSANDBYTES, *TORCHAO, *LOW_RANK)
FUSED = ("sgd", "adam", "adamw", "adagrad", *BITSANDBYTES)  # have fused kernels
COMPILED_OPTIMIZERS = ("sgd", "adam", "adamw")  # whose compiled step was measured
# names of transformers (training_args.py, `OptimizerNames`; trainer_optimizer.py has what they make): the name here,
# and the implementation that the name asks for. Its "adafactor" is adafactor-hf here, where adafactor is torch.optim's.
NAMES_OF_TRANSFORMERS: dict[str, tuple[str, str | None]] = {
    "adamw_torch": ("adamw", None),
    "adamw_torch_fused": ("adamw", "fused"),
    "adamw_bnb_8bit": ("adamw-8bit", None),
    "adamw_8bit": ("adamw-8bit", None),
    "adamw_torch_8bit": ("torchao-adamw-8bit", None),
    "adamw_torch_4bit": ("torchao-adamw-4bit", None),
    "lion_8bit": ("lion-8bit", None),
    "lion_32bit": ("lion-32bit", None),
    "paged_adamw_32bit": ("paged-adamw-32bit", None),
    "paged_adamw_8bit": ("paged-adamw-8bit", None),
    "paged_lion_32bit": ("paged-lion-32bit", None),
    "paged_lion_8bit": ("paged-lion-8bit", None),
    "galore_adamw": ("galore-adamw", None),
    "apollo_adamw": ("apollo-adamw", None),
}
EXAMPLE = "rank=128,update_proj_gap=200"
SIDES = ("std", "reverse_std", "right", "left", "full")  # `proj_type`
_CHOICES = {"proj_type": SIDES, "proj": ("random", "svd"), "scale_type": ("channel", "tensor")}
_KEYS = {
    GALORE: ("rank", "update_proj_gap", "scale", "proj_type"),
    APOLLO: ("rank", "update_proj_gap", "scale", "proj_type", "proj", "scale_type"),
}
# names of transformers for what is not covered, and why
_LAYERWISE = "It updates each parameter inside of the backward, and frees its gradient there, which is not covered."
_OTHER_STATES = "Its states in the projected space are not covered; those of AdamW are."
REFUSED = {
    "galore_adamw_layerwise": _LAYERWISE,
    "galore_adamw_8bit_layerwise": _LAYERWISE,
    "galore_adafactor_layerwise": _LAYERWISE,
    "apollo_adamw_layerwise": _LAYERWISE,
    "galore_adamw_8bit": _OTHER_STATES,
    "galore_adafactor": _OTHER_STATES,
}
MAX_RANK = 1 << 20


# fmt: off
@record(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer, and the options of its class."""

    optimizer: str | None = option(
        None, STEP, "choice", "NAME", "optimizer of the step, which makes it training", choices=OPTIMIZERS,
        aliases=tuple(NAMES_OF_TRANSFORMERS),
        training=True, example="adam",
        details="[Optimizers](levers.md#optimizers); names of `TrainingArguments(optim=)` are accepted too",
    )
    optimizer_impl: str = option(
        "foreach", STEP, "choice", "IMPL", "PyTorch's implementation of the optimizer",
        choices=("foreach", "fused", "for-loop"), training=True, example="foreach",
        needs=UPDATED,
    )
    momentum: float = option(
        0.0, STEP, "fraction", "M", "momentum of sgd or rmsprop",
        training=True, owners=("sgd", "rmsprop"), example="0.9", needs=TRAINED,
    )
    weight_decay: float = option(
        0.0, LEVERS, "factor", "W", "weight decay of the optimizer", example="0.01", needs=UPDATED,
    )
    nesterov: bool = option(False, LEVERS, "switch", "", "Nesterov momentum of sgd", owners=("sgd",))
    dampening: float = option(
        0.0, LEVERS, "factor", "D", "dampening of sgd with momentum", example="0", owners=("sgd",)
    )
    amsgrad: bool = option(False, LEVERS, "switch", "", "AMSGrad of adam and adamw", owners=("adam", "adamw"))
    centered: bool = option(False, LEVERS, "switch", "", "centered rmsprop", owners=("rmsprop",))
    offload_optimizer: bool = option(
        False, LEVERS, "switch", "", "optimizer state and its update are on the CPU", needs=UPDATED
    )
    compile_optimizer: bool = option(
        False, LEVERS, "switch", "", "torch.compile(optimizer.step): the update makes no temporary tensor",
        owners=COMPILED_OPTIMIZERS, details="[compile](compile.md)",
    )
    # fmt: on

    def check(self) -> None:
        """Raises:
        UsageError: a factor is out of range.
        """
        if not 0 <= self.momentum < 1:
            why = "It is a fraction: 0 <= momentum < 1."
            raise UsageError(f"--momentum {self.momentum} is out of range", why, "Try 0.9.", "SM132")
        if self.weight_decay < 0:
            what = f"--weight-decay {self.weight_decay} is negative"
            raise UsageError(what, "It is a factor from 0.", "Try 0.01.", code="SM161")


# fmt: off
@record(frozen=True, kw_only=True)
class ProjectionOptions:
    """What optimizers of `LOW_RANK` take besides."""

    optim_target_modules: str | tuple[str, ...] = option(
        (), STEP, "names", "NAME",
        "modules whose weights galore-adamw and apollo-adamw project: all-linear, or parts of paths",
        training=True, owners=LOW_RANK, example="[attn, mlp]", needs=TRAINED,
        details="[GaLore and APOLLO](levers.md#galore-and-apollo)",
    )
    optim_args: str | Mapping[str, Any] | None = option(
        None, STEP, "pairs", "KEY=VALUE,...", "options of galore-adamw and apollo-adamw",
        training=True, owners=LOW_RANK, example="{rank: 128, update_proj_gap: 200}",
        unset="rank=128,update_proj_gap=200", needs=TRAINED,
    )
    # fmt: on


@record(frozen=True)
class LowRank:
    """Gradients of some linear layers' weights, projected to a low rank.

    Attributes:
        targets: modules, as `optim_target_modules` names them in a list; `(ALL_LINEAR,)`: all linear layers.
        gap: steps between two computations of the projections.
        side: `proj_type`: the dimension that is projected.
        svd: the projection has singular vectors of the gradient; else it is random.
        by_channel: APOLLO scales each channel of a gradient; else all of it by one number.
    """

    targets: tuple[str, ...]
    rank: int = 128
    gap: int = 200
    side: str = "std"
    svd: bool = True
    by_channel: bool = True


def args_text(value: str | Mapping[str, Any]) -> str:
    """A text or a mapping as the text that `low_rank_of` reads."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={one}" for key, one in value.items())
    return value.strip()


def split_targets(values: Iterable[str]) -> tuple[str, ...]:
    """The names of `--optim-target-modules attn,mlp`; a comma in braces is one of a regular expression."""
    parts = (part.strip() for value in values for part in re.split(r",(?![^{]*\})", value))
    return tuple(dict.fromkeys(filter(None, parts)))


def low_rank_of(optimizer: str, args: str, targets: Sequence[str]) -> LowRank:
    """What an optimizer of `LOW_RANK` is asked.

    Raises:
        UsageError: no target, an unknown key, or a value that is not one of its key.
    """
    if not targets:
        raise UsageError(
            f"{optimizer} does not know which weights it projects",
            "Its package takes groups of parameters, and transformers asks for optim_target_modules.",
            f"Add --optim-target-modules {ALL_LINEAR}, or parts of names: attn,mlp.",
            code="SM161",
        )
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in args.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS[optimizer] or not equals or key in values:
            hint = closest(key, _KEYS[optimizer])
            raise _wrong(f"'{part[:60]}' is no option of {optimizer}", f"It has {', '.join(_KEYS[optimizer])}.", hint)
        choices = _CHOICES.get(key, ())
        if choices and value not in choices:
            raise _wrong(f"{key}={value[:60]}", f"It is one of {', '.join(choices)}.", closest(value, choices))
        values[key] = value
    rank, gap = (_whole(values, key, default) for key, default in (("rank", 128), ("update_proj_gap", 200)))
    _number(values.get("scale", "1"))
    asked = LowRank(
        tuple(targets), rank, gap, values.get("proj_type", "std"),
        svd=optimizer == GALORE or values.get("proj", "random") == "svd",
        by_channel=values.get("scale_type", "channel") == "channel"
    )
    if optimizer == APOLLO and asked.by_channel and asked.side != "std":
        raise _wrong(
            f"proj_type={asked.side} of {optimizer}",
            "apollo_torch then multiplies gradients by factors of another size, which fails.",
            "Use proj_type=std, or scale_type=tensor.",
        )
    if optimizer == APOLLO and asked.side == "full":
        raise _wrong(f"proj_type=full of {optimizer}", "apollo_torch fails with it in the second step.", "Use std.")
    return asked


def _whole(values: Mapping[str, str], key: str, default: int) -> int:
    text = values.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_RANK):
        raise _wrong(f"{key}={text[:60]}", f"It is a whole number from 1 to {MAX_RANK:,}.")
    return int(text)


def _number(text: str) -> None:
    try:
        fits = len(text) <= 20 and 0 <= float(text) < 1e9
    except ValueError:
        fits = False
    if not fits:
        raise _wrong(f"scale={text[:60]}", "It is a number.")


def _wrong(what: str, why: str, hint: str = "") -> UsageError:
    return UsageError(f"--optim-args: {what}", why, hint or f"Example: --optim-args {EXAMPLE}", code="SM161")
