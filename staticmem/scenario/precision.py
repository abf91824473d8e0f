"""Element types of a step, and the kernel of attention that they allow."""

from __future__ import annotations

from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.scenario.options import STEP, option, unknown

PRECISIONS = ("none", "fp32", "fp16", "bf16")


# fmt: off
@record(frozen=True, kw_only=True)
class Precision:
    """In what types the model runs."""

    dtype: str | None = option(
        None, STEP, "precision", "TYPE", "casts the whole model, as model.to(dtype)", choices=PRECISIONS,
        example="bf16",
    )
    amp: str | None = option(
        None, STEP, "precision", "TYPE", "mixed precision, as torch.autocast around the forward", choices=PRECISIONS,
        example="bf16",
    )
    sdpa: str = option(
        "auto", STEP, "choice", "KERNEL", "kernel of scaled_dot_product_attention; auto chooses as PyTorch does",
        choices=("auto", "cudnn", "flash", "efficient", "math"), example="auto",
        details="As on an sm_90 GPU; the automatic choice stands where PyTorch has no such kernel",
    )
    # fmt: on


def precision(name: str, word: str | None) -> DType | None:
    """A floating-point type by PyTorch's name or a short one; "none" is None."""
    if word is None or word.lower() == "none":
        return None
    dtype = dtypes.parse(word)
    if dtype not in (dtypes.float32, *dtypes.HALVES):
        raise unknown(name, word, PRECISIONS)
    return dtype
