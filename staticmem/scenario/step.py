"""What a user asks: mode, optimizer, loss, precision, levers. Sizes are bound before, in `graph.model`."""

from __future__ import annotations

import re

from staticmem.errors import UsageError
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record

# torch.optim's, except lion (timm), adafactor-hf (transformers' Adafactor) and the 8-bit ones (bitsandbytes.optim)
OPTIMIZERS = (
    "sgd", "adam", "adamw", "rmsprop", "adagrad", "radam", "nadam", "adamax", "adadelta", "adafactor", "lion",
    "adafactor-hf", "adam-8bit", "adamw-8bit", "lion-8bit",
)  # fmt: skip
FUSED = ("sgd", "adam", "adamw", "adagrad", "adam-8bit", "adamw-8bit", "lion-8bit")  # have fused kernels
IMPLEMENTATIONS = ("foreach", "fused", "for-loop")
LOSSES = ("auto", "cross-entropy", "mse", "mean", "none")
SDPA_KERNELS = ("auto", "cudnn", "flash", "efficient", "math")
MODES = ("train", "infer")
INPLACE_ACTIVATIONS = ("auto", "none", "all")
SQRT = "sqrt"
MAX_PATTERN = 1000  # characters of a regular expression: longer ones are a mistake


@record(frozen=True)
class Scenario:
    """One configuration. `dtype` casts the whole model; `amp` runs the forward under `torch.autocast("cuda")`.

    `sdpa` is the kernel of scaled_dot_product_attention; "auto" chooses as PyTorch does on an sm_90 device.

    `optimizer_impl` "foreach" is an optimizer's default on CUDA: Adafactor's is its for-loop, the 8-bit ones are fused.

    Levers (docs/levers.md). The defaults are PyTorch's:
        checkpoint: modules that run under `torch.utils.checkpoint(use_reentrant=False)`: class names (`Bottleneck`, or
            the full `torchvision.models.resnet.Bottleneck`) and module paths (`layer1.0`; `*` stands for one part).
        checkpoint_every: so many modules of `checkpoint` that follow each other in one parent share one checkpoint.
        checkpoint_segments: segments of `checkpoint_sequential`; "sqrt" is the root of the number of its modules.
        checkpoint_sequential: path of the Sequential that `checkpoint_segments` divides; None is the one with the most
            modules of its own.
        accumulate: micro-batches a step; the batch of the graph is one micro-batch.
        freeze: a regular expression (`re.search`); parameters whose name it matches have requires_grad False.
        weight_decay, nesterov, dampening, amsgrad, centered: as in torch.optim, where they change what is alive.
        offload_optimizer: optimizer state and update on the CPU.
        grad_scaler: `torch.amp.GradScaler` around the loss and the step.
        set_to_none: what `zero_grad` does; False keeps zeroed gradients through the forward.
        clip_grad_norm: `torch.nn.utils.clip_grad_norm_` before the step.

    Raises:
        UsageError: a lever's value is out of range, or levers exclude each other.
    """

    mode: str = "infer"
    optimizer: str | None = None
    optimizer_impl: str = "foreach"
    momentum: float = 0.0
    loss: str = "auto"
    dtype: DType | None = None
    amp: DType | None = None
    sdpa: str = "auto"
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

    def __post_init__(self) -> None:
        _at_least_one("accumulate", self.accumulate, "Micro-batches a step are a whole number.")
        _at_least_one("checkpoint-every", self.checkpoint_every, "Modules that share a checkpoint are a whole number.")
        segments = self.checkpoint_segments
        if segments != SQRT and (not isinstance(segments, int) or segments < 0):
            raise UsageError(
                f"--checkpoint-segments {segments} is not a number of segments",
                f"It is a whole number from 1, or {SQRT}.",
                "Try --checkpoint-segments sqrt.",
                code="SM160",
            )
        if self.checkpoint_every > 1 and not self.checkpoint:
            raise UsageError(
                "--checkpoint-every needs --checkpoint",
                "It groups the modules that --checkpoint names.",
                "Name the class or the paths of the blocks with --checkpoint.",
                code="SM160",
            )
        if self.checkpoint_sequential is not None and not segments:
            raise UsageError(
                "--checkpoint-sequential needs --checkpoint-segments",
                "It names the Sequential that is divided.",
                "Add --checkpoint-segments sqrt.",
                code="SM160",
            )
        if self.freeze is not None:
            _pattern(self.freeze)
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        if self.optimizer_impl == "fused" and self.optimizer is not None and self.optimizer not in FUSED:
            raise UsageError(
                f"{self.optimizer} has no fused implementation",
                f"Fused kernels exist for {', '.join(FUSED)}.",
                "Use --optimizer-impl foreach.",
                code="SM133",
            )
        for flag, given, wanted in (
            ("nesterov", self.nesterov, ("sgd",)),
            ("dampening", self.dampening, ("sgd",)),
            ("amsgrad", self.amsgrad, ("adam", "adamw")),
            ("centered", self.centered, ("rmsprop",)),
        ):
            if given and self.optimizer not in wanted:
                raise UsageError(
                    f"--{flag} does not apply to {self.optimizer or 'a step without optimizer'}",
                    f"It is an option of {' and '.join(wanted)}.",
                    f"Use --optimizer {wanted[0]}, or leave --{flag} out.",
                    code="SM161",
                )
        if self.nesterov and (not self.momentum or self.dampening):
            raise UsageError(
                "--nesterov needs a momentum and no dampening",
                "torch.optim.SGD says the same.",
                "Add --momentum 0.9.",
                code="SM161",
            )
        if self.weight_decay < 0:
            raise UsageError(
                f"--weight-decay {self.weight_decay} is negative", "It is a factor from 0.", "Try 0.01.", code="SM161"
            )

    @property
    def training(self) -> bool:
        return self.mode == "train"


def _at_least_one(flag: str, value: int, why: str) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"--{flag} {value} is less than 1", why, f"Use --{flag} 1 or more.", code="SM160")


def _pattern(text: str) -> None:
    try:
        if len(text) > MAX_PATTERN:
            raise UsageError(
                f"--freeze is {len(text)} characters long",
                f"A regular expression has at most {MAX_PATTERN} here.",
                "Use a shorter one.",
                code="SM162",
            )
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"--freeze '{text}' is not a regular expression", f"Python says: {error}.", "Try '^(?!fc)'.", code="SM162"
        ) from error
