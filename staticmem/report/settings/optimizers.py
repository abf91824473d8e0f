"""Optimizers as Python and as `TrainingArguments(optim=)` name them."""

from __future__ import annotations

from staticmem.scenario.optimizers import NAMES_OF_TRANSFORMERS, TORCH_OPTIMIZERS
from staticmem.scenario.request import Request

# module to import and class of optimizers that are not torch.optim's: bitsandbytes/optim/__init__.py,
# timm/optim/lion.py, transformers/optimization.py, torchao/optim/__init__.py
_OTHERS = {
    "adam-8bit": ("bitsandbytes", "bitsandbytes.optim.Adam8bit"),
    "adamw-8bit": ("bitsandbytes", "bitsandbytes.optim.AdamW8bit"),
    "lion-8bit": ("bitsandbytes", "bitsandbytes.optim.Lion8bit"),
    "adamw-32bit": ("bitsandbytes", "bitsandbytes.optim.AdamW32bit"),
    "lion-32bit": ("bitsandbytes", "bitsandbytes.optim.Lion32bit"),
    "paged-adamw-8bit": ("bitsandbytes", "bitsandbytes.optim.PagedAdamW8bit"),
    "paged-adamw-32bit": ("bitsandbytes", "bitsandbytes.optim.PagedAdamW32bit"),
    "paged-lion-8bit": ("bitsandbytes", "bitsandbytes.optim.PagedLion8bit"),
    "paged-lion-32bit": ("bitsandbytes", "bitsandbytes.optim.PagedLion32bit"),
    "torchao-adamw-8bit": ("torchao.optim", "torchao.optim.AdamW8bit"),
    "torchao-adamw-4bit": ("torchao.optim", "torchao.optim.AdamW4bit"),
    "torchao-adamw-fp8": ("torchao.optim", "torchao.optim.AdamWFp8"),
    "lion": ("timm.optim", "timm.optim.Lion"),
    "adafactor-hf": ("transformers", "transformers.Adafactor"),
}
WRITTEN = (*TORCH_OPTIMIZERS, *_OTHERS)  # the others have groups of parameters that the model's author divides

# names of transformers that are the same optimizer with its defaults (trainer_optimizer.py); AdamW has two
_SAME_NAMES = {"sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop", "adafactor-hf": "adafactor"}
_WITH_DEFAULTS = ("momentum", "nesterov", "dampening", "amsgrad", "centered")


def class_of(request: Request) -> tuple[str, str]:
    """The module to import, and the class in it with its full name."""
    assert request.optimizer is not None
    if request.optimizer in TORCH_OPTIMIZERS:
        return "torch", f"torch.optim.{TORCH_OPTIMIZERS[request.optimizer]}"
    return _OTHERS[request.optimizer]


def keywords(request: Request) -> dict[str, object]:
    """Keywords of that class which decide its memory, but for the learning rate; those with its defaults left out."""
    decided: dict[str, object] = {
        name: value for name in ("momentum", "nesterov", "dampening", "amsgrad", "centered")
        if (value := getattr(request, name))
    }  # fmt: skip
    if request.optimizer == "adafactor-hf":  # its defaults are a relative step and no rate
        decided |= {"scale_parameter": False, "relative_step": False}
    elif request.weight_decay:  # AdamW's own default, 0.01, decides no memory: it decays parameters in place
        decided["weight_decay"] = request.weight_decay
    if request.optimizer in TORCH_OPTIMIZERS:
        if request.optimizer_impl == "fused":
            decided["fused"] = True
        elif request.optimizer_impl == "for-loop":
            decided["foreach"] = False
    return decided


def name_of_transformers(request: Request) -> str | None:
    """What `TrainingArguments(optim=)` calls it; None where no name makes it with these options."""
    if any(getattr(request, name) for name in _WITH_DEFAULTS):
        return None
    if request.optimizer in _SAME_NAMES:
        return _SAME_NAMES[request.optimizer] if request.optimizer_impl == "foreach" else None
    wanted = request.optimizer_impl if request.optimizer == "adamw" else None
    if wanted == "foreach":
        wanted = None
    names = [name for name, meaning in NAMES_OF_TRANSFORMERS.items() if meaning == (request.optimizer, wanted)]
    return names[0] if names else None
