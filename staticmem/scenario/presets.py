"""What training libraries set without being asked: `--preset`.

A preset is data: options that hold where none are given, each with the file that has the default. What a library leaves
to the user (precision, batch, checkpoints) is in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.ir.record import record
from staticmem.scenario.losses import OF_TRANSFORMERS
from staticmem.scenario.optimizers import TORCH_OPTIMIZERS
from staticmem.version import DEFAULTS_CHANGED, torch_release


@record(frozen=True, slots=True)
class Default:
    """The value that a library gives an option, and where."""

    value: Any
    source: str


@record(frozen=True, slots=True)
class Preset:
    """The defaults of a version of a library, by the names of options."""

    library: str
    defaults: Mapping[str, Default]
    caches: bool = True  # the model's outputs have keys and values where its config says so


PRESETS: dict[str, Preset] = {
    "hf-trainer": Preset(
        "transformers 5.23",
        {
            "optimizer": Default("adamw", "training_args.py, `default_optim`: adamw_torch_fused from PyTorch 2.8 on"),
            "optimizer_impl": Default("fused", "the same"),
            "clip_grad_norm": Default(True, "training_args.py, `max_grad_norm` = 1.0"),
            "loss": Default(
                OF_TRANSFORMERS, "trainer.py, `compute_loss`: the model's own, from labels (loss/loss_utils.py)"
            ),
            "outputs": Default("dropped", "trainer.py, `compute_loss` returns the loss alone"),
            "float32_outputs": Default(True, "its accelerator prepares the model: as in `accelerate`"),
            "zero_grad": Default("first", "trainer.py: `model.zero_grad()` after `optimizer.step()`"),
        },
        caches=False,  # trainer.py, `config.use_cache = args.use_cache`; training_args.py: False
    ),
    "accelerate": Preset(
        "accelerate 1.15",
        {
            "set_to_none": Default(True, "optimizer.py, `AcceleratedOptimizer.zero_grad`"),
            "loss": Default(OF_TRANSFORMERS, "examples/nlp_example.py: `loss = outputs.loss`"),
            "outputs": Default("held", "the same: `outputs = model(**batch)`"),
            "float32_outputs": Default(True, "accelerator.py, `prepare_model`: `convert_outputs_to_fp32`"),
            "zero_grad": Default("first", "examples/nlp_example.py: `zero_grad()` after `optimizer.step()`"),
        },
    ),
    "lightning": Preset(
        "lightning 2.6",
        {
            "clip_grad_norm": Default(False, "pytorch/trainer/trainer.py, `gradient_clip_val` = None"),
            "outputs": Default("dropped", "`training_step` returns the loss, and its variables end with it"),
            "zero_grad": Default(
                "after-forward", "pytorch/loops/optimization/automatic.py, `Closure.closure`: after `training_step`"
            ),
        },
    ),
    "torchtune": Preset(
        "torchtune at bd2a0fc",
        {
            "dtype": Default("bf16", "recipes/configs/llama3_2/1B_full.yaml, `dtype`: the whole model"),
            "optimizer": Default("adamw", "the same file, `optimizer`: torch.optim.AdamW with `fused: True`"),
            "optimizer_impl": Default("fused", "the same"),
            "loss": Default("linear-cross-entropy", "the same, `loss`: LinearCrossEntropyLoss"),
            "clip_grad_norm": Default(False, "the same, `clip_grad_norm: null`"),
            "outputs": Default("dropped", "recipes/full_finetune_single_device.py, `_loss_step`: `del outputs`"),
            "zero_grad": Default("first", "the same: `zero_grad` after `optimizer.step()`"),
        },
    ),
}


def with_preset(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with what their preset sets besides; presets are of training."""
    preset = PRESETS.get(str(options.get("preset")).lower())
    if preset is None or options.get("mode") == "infer":
        return dict(options)
    defaults = {name: default.value for name, default in preset.defaults.items()}
    if options.get("optimizer") is not None:  # another optimizer has its own implementation
        defaults.pop("optimizer_impl", None)
    return {"mode": "train", **defaults, **options}


def with_release(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the defaults that a release of PyTorch before 2.0 has for what is not given.

    Sources: torch/optim/adam.py before 2.0 ("Placeholder for more complex foreach logic": None means no);
    https://github.com/pytorch/pytorch/pull/92731 made `set_to_none=True` the default of zero_grad().
    """
    given, version = dict(options), options.get("torch_version")
    if version is None or torch_release(str(version)) >= DEFAULTS_CHANGED:
        return given
    defaults: dict[str, Any] = {"set_to_none": False}
    if given.get("optimizer") in TORCH_OPTIMIZERS:
        defaults["optimizer_impl"] = "for-loop"
    return {**defaults, **given}


def described(name: str, options: Mapping[str, Any]) -> str:
    """What a preset has set of a request's options, and what was given instead."""
    preset = PRESETS[name]
    same = [k for k, default in preset.defaults.items() if options[k] == default.value]
    text = ", ".join(f"{k.replace('_', '-')} {word_of(options[k])}" for k in same)
    others = [k.replace("_", "-") for k in preset.defaults if k not in same]
    return f"preset {name} ({preset.library}): {text}" + (f"; otherwise: {', '.join(others)}" if others else "")


def word_of(value: Any) -> str:
    """A value of an option as text."""
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
