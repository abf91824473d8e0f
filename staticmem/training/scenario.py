"""What a user asks: mode, optimizer, loss, precision. Sizes are bound before, in `graph.model`."""

from __future__ import annotations

from dataclasses import dataclass

from staticmem.dtypes import DType

OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad")
IMPLEMENTATIONS = ("foreach", "fused", "for-loop")
LOSSES = ("auto", "cross-entropy", "mse", "mean", "none")
SDPA_KERNELS = ("auto", "cudnn", "flash", "efficient", "math")
MODES = ("train", "infer")


@dataclass(frozen=True)
class Scenario:
    """One configuration. `dtype` casts the whole model; `amp` runs the forward under `torch.autocast("cuda")`.

    `sdpa` is the kernel of scaled_dot_product_attention; "auto" chooses as PyTorch does on an sm_90 device.
    """

    mode: str = "infer"
    optimizer: str | None = None
    optimizer_impl: str = "foreach"
    momentum: float = 0.0
    loss: str = "auto"
    dtype: DType | None = None
    amp: DType | None = None
    sdpa: str = "auto"

    @property
    def training(self) -> bool:
        return self.mode == "train"
