"""`Request`: everything that a user can ask of one analysis, in the user's words.

The command line, YAML configs and Python all make a `Request`; what its words mean is decided here and nowhere else.
A field left out has the default of this class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from staticmem.errors import UsageError, did_you_mean
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Note
from staticmem.ir.record import record
from staticmem.scenario.step import (
    IMPLEMENTATIONS,
    INPLACE_ACTIVATIONS,
    LOSSES,
    MODES,
    OPTIMIZERS,
    SDPA_KERNELS,
    Scenario,
)

PRECISIONS = ("float32", "float16", "bfloat16")
METHODS = ("liveness", "textbook")
CUDNN = ("tables", "library")
MODULE_LOADING = ("lazy", "eager")  # CUDA_MODULE_LOADING
ALL = sys.maxsize  # for `top`: every tensor
# fields that a request and a scenario of a training step share by name
LEVERS = (
    "checkpoint", "checkpoint_every", "checkpoint_segments", "checkpoint_sequential", "accumulate", "freeze",
    "weight_decay", "nesterov", "dampening", "amsgrad", "centered", "offload_optimizer", "grad_scaler", "set_to_none",
    "clip_grad_norm",
)  # fmt: skip


@record(frozen=True)
class Request:
    """One analysis as it was asked for; `staticmem.analyze` says what each field means."""

    batch: int | None = None
    resolution: int | tuple[int, int] | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    mode: str | None = None
    optimizer: str | None = None
    optimizer_impl: str = "foreach"
    momentum: float = 0.0
    loss: str = "auto"
    dtype: str | None = None
    amp: str | None = None
    sdpa: str = "auto"
    unfold_batchnorm: bool = False
    inplace_activations: str = "auto"
    checkpoint: tuple[str, ...] = ()
    checkpoint_every: int = 1
    checkpoint_segments: int | str = 0
    checkpoint_sequential: str | None = None
    accumulate: int = 1
    freeze: str | None = None
    weight_decay: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    amsgrad: bool = False
    centered: bool = False
    offload_optimizer: bool = False
    grad_scaler: bool = False
    set_to_none: bool = True
    clip_grad_norm: bool = False
    parallel: str | None = None
    devices: int | None = None
    method: str = "liveness"
    gpu: str | None = None
    gpus_file: str | None = None
    alloc_conf: str | None = None
    torch_version: str | None = None
    module_loading: str | None = None
    tf32: bool = True
    channels_last: bool = False
    cudnn_benchmark: bool = False
    cudnn: str = "tables"
    profile: str | None = None
    top: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", known("method", self.method, METHODS))
        object.__setattr__(self, "cudnn", known("cudnn", self.cudnn, CUDNN))
        if self.module_loading is not None:
            object.__setattr__(self, "module_loading", known("module-loading", self.module_loading, MODULE_LOADING))
        policy = known("inplace-activations", self.inplace_activations, INPLACE_ACTIVATIONS)
        object.__setattr__(self, "inplace_activations", policy)
        if self.parallel is not None:
            from staticmem.scenario.parallel import STRATEGIES

            word = known("parallel", self.parallel, (*STRATEGIES, "none"))
            object.__setattr__(self, "parallel", None if word == "none" else word)
        if isinstance(self.checkpoint, str):
            object.__setattr__(self, "checkpoint", (self.checkpoint,))
        if isinstance(self.resolution, int):
            object.__setattr__(self, "resolution", (self.resolution, self.resolution))
        elif self.resolution is not None and len(self.resolution) != 2:
            raise UsageError(
                f"a resolution of {len(self.resolution)} numbers", "It is a height and a width.",
                "Give two, or one for both.", code="SM110",
            )  # fmt: skip

    @property
    def names_device(self) -> bool:
        """Whether anything of the device was given, so that it can be wrong."""
        words = (self.gpu, self.alloc_conf, self.torch_version, self.module_loading, self.profile)
        return any(word is not None for word in words) or self.cudnn != "tables"

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width, where a resolution is given."""
        assert not isinstance(self.resolution, int)
        return self.resolution

    def scenario(self) -> tuple[Scenario, list[Note]]:
        """The validated scenario of the step, and what has to be said about it.

        Raises:
            UsageError: an unknown word, or words that exclude each other.
        """
        notes: list[Note] = []
        optimizer = known("optimizer", self.optimizer, OPTIMIZERS) if self.optimizer is not None else None
        impl = known("optimizer-impl", self.optimizer_impl, IMPLEMENTATIONS)
        loss = known("loss", self.loss, LOSSES)
        mode = known("mode", self.mode, MODES) if self.mode is not None else "train" if optimizer else "infer"
        self._check_momentum(optimizer)
        if impl == "fused" and optimizer == "rmsprop":
            raise UsageError(
                "rmsprop has no fused implementation",
                "PyTorch has fused kernels for sgd, adam, adamw and adagrad.",
                "Use --optimizer-impl foreach.",
                code="SM133",
            )
        if mode == "infer" and optimizer is not None:
            notes.append(Note("warning", "SM302", f"the optimizer ({optimizer}) is not used: inference was asked for"))
            optimizer = None
        if mode == "train" and optimizer is None:
            notes.append(Note("assumption", "SM303", "no optimizer: forward and backward only"))
        if mode == "train" and optimizer is not None:
            text = "a step after the first: optimizer state exists, and zero_grad() has set gradients to None"
            notes.append(Note("assumption", "SM300", text))
        levers = {name: getattr(self, name) for name in LEVERS}
        if mode == "infer":  # levers of the training step say nothing of an inference
            levers = {}
        scenario = Scenario(
            mode, optimizer, impl, self.momentum, loss, precision("dtype", self.dtype), precision("amp", self.amp),
            known("sdpa", self.sdpa, SDPA_KERNELS), **levers,
        )  # fmt: skip
        return scenario, notes

    def _check_momentum(self, optimizer: str | None) -> None:
        if self.momentum and optimizer not in ("sgd", "rmsprop"):
            raise UsageError(
                f"--momentum does not apply to {optimizer or 'a step without optimizer'}",
                "sgd and rmsprop have a momentum buffer.",
                "Use --optimizer sgd, or leave --momentum out.",
                code="SM132",
            )
        if not 0 <= self.momentum < 1:
            raise UsageError(
                f"--momentum {self.momentum} is out of range",
                "It is a fraction: 0 <= momentum < 1.",
                "Try 0.9.",
                code="SM132",
            )


FIELDS = tuple(f.name for f in fields(Request))


def request_of(words: Mapping[str, Any]) -> Request:
    """The request of some words; None is "not given".

    Raises:
        TypeError: a word that `Request` does not have.
    """
    return Request(**{name: value for name, value in words.items() if value is not None})


def known(flag: str, word: str, words: tuple[str, ...]) -> str:
    """The word in lower case, if it is one of `words`.

    Raises:
        UsageError: it is not; the error names the closest.
    """
    if word.lower() in words:
        return word.lower()
    raise UsageError(
        f"unknown {flag} '{word}'",
        f"--{flag} is one of {', '.join(words)}.",
        did_you_mean(word.lower(), words),
        code="SM134",
    )


def precision(flag: str, name: str | None) -> DType | None:
    """A floating-point type by PyTorch's name or a short one; "none" is None."""
    if name is None or name.lower() == "none":
        return None
    found = dtypes.parse(name)
    if found is None or found.name not in PRECISIONS:
        words = ("fp32", "fp16", "bf16", *PRECISIONS, "none")
        raise UsageError(
            f"unknown {flag} '{name}'", f"--{flag} is one of {', '.join(words)}.", did_you_mean(name, words), "SM134"
        )
    return found
