"""Which cards can run a step: architectures that a release of PyTorch is built for, and element types that chips have.

Kernels in a wheel run on chips of the same major compute capability, from the minor one that they were built for on
(CUDA C++ Programming Guide, "Binary compatibility"). Chips of Jetson are not compatible with those of desktop cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from staticmem.devices.gpus import Gpu
from staticmem.version import torch_release

Capability = tuple[int, int]

# What the wheels on PyPI for Linux x86 are built for: the first release that is built so, its CUDA, and compute
# capabilities. The lists up to 1.13 are those of builds for CUDA 10.2 and 11.6, and those of 2.1 and 2.7 of builds for
# 12.1 and 12.6, as https://github.com/moi90/pytorch_compute_capabilities read them from packages.
# 2.8: .ci/manywheel/build_cuda.sh of that release, for CUDA 12.8.
# 2.11 and 2.14: https://github.com/pytorch/pytorch/issues/172663 and https://github.com/pytorch/pytorch/issues/190355;
# the wheel of 2.15 says the same of itself (`torch._C._cuda_getArchFlags()`).
_ON_PYPI: tuple[tuple[tuple[int, int], str, str], ...] = (
    ((1, 0), "10.2", "3.7 5.0 6.0 6.1 7.0 7.5"),
    ((1, 13), "11.7", "3.7 5.0 6.0 6.1 7.0 7.5 8.0 8.6"),
    ((2, 1), "12.1", "5.0 6.0 6.1 7.0 7.5 8.0 8.6 9.0"),
    ((2, 7), "12.6", "5.0 6.0 7.0 7.5 8.0 8.6 9.0"),
    ((2, 8), "12.8", "7.0 7.5 8.0 8.6 9.0 10.0 12.0"),
    ((2, 11), "13.0", "7.5 8.0 8.6 9.0 10.0 12.0"),
    ((2, 14), "13.2", "7.5 8.0 8.6 9.0 10.0 12.0"),
)
# Wheels for Linux aarch64 have this one besides, from CUDA 13.0 on (the issues above).
_ON_PYPI_ARM = ((2, 9), (11, 0))
# Wheels for another CUDA at download.pytorch.org: from one release until before another
# (https://github.com/pytorch/pytorch/issues/190385 removes the last of them).
_ELSEWHERE: tuple[tuple[tuple[int, int], tuple[int, int], str, str], ...] = (
    ((2, 7), (2, 8), "12.8", "7.5 8.0 8.6 9.0 10.0 12.0"),
    ((2, 8), (2, 15), "12.6", "5.0 6.0 7.0 7.5 8.0 8.6 9.0"),
)
JETSON = ((8, 7),)  # Orin: NVIDIA's own builds for JetPack; Thor (11.0) runs those for aarch64

# The first compute capability with arithmetic in a type. Before it PyTorch emulates, and cuDNN has no convolutions
# (torch/cuda/__init__.py, `is_bf16_supported(including_emulation=False)`).
_FIRST = {"bfloat16": (8, 0)}

# Inductor writes kernels in Triton (torch/_dynamo/device_interface.py, `CudaInterface.is_triton_capable`, which raises
# `GPUTooOldForTriton` before it).
_FIRST_WITH_TRITON = (7, 0)


def capability(chip: str) -> Capability | None:
    """(8, 6) of `sm_86`; None for a chip of another vendor."""
    match = re.fullmatch(r"sm_(\d+)(\d)", chip)
    return (int(match.group(1)), int(match.group(2))) if match is not None else None


def runs_compiled_code(card: Gpu) -> bool:
    """Whether kernels that `torch.compile` writes run on a card."""
    chip = capability(card.chip or card.architecture)
    return chip is None or chip >= _FIRST_WITH_TRITON


def obstacle(card: Gpu, torch: str, dtypes: Iterable[str] = (), *, compiled: bool = False) -> str:
    """Why a card cannot run a step with this PyTorch: a clause such as `it has no bfloat16`; empty where it can.

    Args:
        torch: a version, as `2.13`.
        dtypes: names of the element types that the step computes in.
        compiled: whether the step runs code of `torch.compile`.

    Of cards of other vendors nothing is known, so nothing stands in their way here.
    """
    chip = capability(card.chip or card.architecture)
    if chip is None:
        return ""
    if compiled and not runs_compiled_code(card):
        return "torch.compile writes kernels in Triton, which needs compute capability 7.0"
    return _not_served(chip, torch) or _without(chip, dtypes)


def _not_served(chip: Capability, torch: str) -> str:
    release = torch_release(torch)
    cuda, built = next((cuda, built) for since, cuda, built in reversed(_ON_PYPI) if since <= max(release, (1, 0)))
    if chip in JETSON:
        return "PyTorch's own wheels have no kernels for Jetson Orin: NVIDIA builds its own"
    if _runs(chip, built) or (chip == _ON_PYPI_ARM[1] and release >= _ON_PYPI_ARM[0]):
        return ""
    name = f"{release[0]}.{release[1]}"
    text = f"PyTorch {name} from PyPI (CUDA {cuda}) has no kernels for compute capability {chip[0]}.{chip[1]}"
    for since, until, other, built in _ELSEWHERE:
        if since <= release < until and _runs(chip, built):
            return f"{text}; its wheel for CUDA {other} has, with another cuDNN than is assumed"
    return text


def _runs(chip: Capability, built: str) -> bool:
    """Whether a list of compute capabilities has one whose kernels run on a chip."""
    return any(major == chip[0] and minor <= chip[1] for major, minor in _capabilities(built))


def _capabilities(listed: str) -> Iterable[Capability]:
    for word in listed.split():
        major, minor = word.split(".")
        yield int(major), int(minor)


def _without(chip: Capability, dtypes: Iterable[str]) -> str:
    for name in sorted(set(dtypes) & set(_FIRST)):
        if chip < _FIRST[name]:
            major, minor = _FIRST[name]
            return f"it has no arithmetic in {name}, which begins with compute capability {major}.{minor}"
    return ""
