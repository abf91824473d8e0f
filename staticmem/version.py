"""The version of the package and that of PyTorch; pyproject.toml has the same."""

from __future__ import annotations

import re

from staticmem.errors import UsageError

__version__ = "0.1.0"

# The PyTorch that the rules follow. It runs the step where nothing else is said (`--torch-version`), exported
# `models/`, and tests compare with it (extra `dev`). Readings that another version made say so where they stand.
REFERENCE_TORCH = "2.13.0"


def torch_release(name: str) -> tuple[int, int]:
    """`2.13.0+cpu` as (2, 13).

    Raises:
        UsageError: it is no version of PyTorch.
    """
    match = re.match(r"(\d{1,6})\.(\d{1,6})", name.strip())
    if match is None:
        default = REFERENCE_TORCH.rpartition(".")[0]
        raise UsageError(f"'{name}' is not a torch version", f"A version is two numbers, e.g. {default}.", code="SM403")
    return int(match.group(1)), int(match.group(2))


REFERENCE_RELEASE = torch_release(REFERENCE_TORCH)

# Since it optimizers run over lists of tensors by default (https://github.com/pytorch/pytorch/pull/92306, and 95820 for
# parameters), zero_grad() sets gradients to None (https://github.com/pytorch/pytorch/pull/92731), and there is
# scaled_dot_product_attention (https://github.com/pytorch/pytorch/releases/tag/v2.0.0).
DEFAULTS_CHANGED = (2, 0)
# Releases since which a step allocates or saves something else: softmax and convolution (1.11), fused attention (2.0),
# rms_norm (2.9), ring attention, fmax and fmin (2.14); the files of `ops/` have the sources. Steps of the releases
# between two of them are equal.
STEP_CHANGED = ((1, 0), (1, 11), DEFAULTS_CHANGED, (2, 9), (2, 14))


def release_of_step(release: tuple[int, int]) -> tuple[int, int]:
    """The first release whose steps are those of this one."""
    return max((since for since in STEP_CHANGED if since <= release), default=STEP_CHANGED[0])


def cuda_of_build(name: str) -> tuple[int, int] | None:
    """(11, 3) of `1.12.1+cu113`; None of a version that does not name a build for CUDA."""
    match = re.search(r"\+cu(\d{1,3})(\d)$", name.strip())
    return (int(match.group(1)), int(match.group(2))) if match is not None else None
