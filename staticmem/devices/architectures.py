"""Which cards can run a step: architectures that a release of PyTorch is built for, and element types that chips have.

Kernels in a wheel run on chips of the same major compute capability, from the minor one that they were built for on
(CUDA C++ Programming Guide, "Binary compatibility"). Chips of Jetson are not compatible with those of desktop cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from staticmem.devices.gpus import Gpu
from staticmem.ir.record import record
from staticmem.ops.registry import EFFICIENT, PADDED_HEADS
from staticmem.version import cuda_of_build, torch_release

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
# Wheels for CUDA 11 of releases before 2.0 (the packages that the page above read: 1.7.1+cu110, 1.8.0+cu111 and later).
_OF_CUDA_11: tuple[tuple[Capability, str], ...] = (
    ((11, 0), "3.7 5.0 6.0 7.0 7.5 8.0"),
    ((11, 1), "3.7 5.0 6.0 7.0 7.5 8.0 8.6"),
)
JETSON = ((8, 7),)  # Orin: NVIDIA's own builds for JetPack; Thor (11.0) runs those for aarch64

RECORDED_AS: Capability = (9, 0)  # what code is told that asks while it is recorded (`recording.device_answers`)

# The first compute capability with arithmetic in bfloat16 (torch/cuda/__init__.py,
# `is_bf16_supported(including_emulation=False)`). Before it eager kernels load bfloat16 and compute in float32.
_BFLOAT16 = (8, 0)
# The first release whose torch.autocast takes bfloat16 before that: `is_bf16_supported` tries to make a tensor. That of
# 2.2.2 says no on a V100 (https://github.com/pytorch/pytorch/issues/124996), and torch/amp/autocast_mode.py raises
# "Current CUDA Device does not support bfloat16".
_AUTOCAST_EMULATES = (2, 3)
# The first release in which Inductor leaves such graphs uncompiled with a warning (torch/_inductor/compile_fx.py,
# `_check_triton_bf16_support`; https://github.com/pytorch/pytorch/pull/129288). Before it Triton fails.
_INDUCTOR_SKIPS = (2, 4)
SLOWLY = "bfloat16 is emulated on it, slowly, and engines such as vLLM refuse it (float16 is not: --amp fp16)"
# engines: vllm/platforms/cuda.py

# Inductor writes kernels in Triton (torch/_dynamo/device_interface.py, `CudaInterface.is_triton_capable`, which raises
# `GPUTooOldForTriton` before it).
_FIRST_WITH_TRITON = (7, 0)
# Triton has float8_e4m3fn from Ada on (triton/language/semantic.py, `cast`, refuses fp8e4nv before it).
_FLOAT8 = (8, 9)


def capability(chip: str) -> Capability | None:
    """(8, 6) of `sm_86`; None for a chip of another vendor."""
    match = re.fullmatch(r"sm_(\d+)(\d)", chip)
    return (int(match.group(1)), int(match.group(2))) if match is not None else None


def computes_in_bfloat16(card: Gpu) -> bool:
    """Whether a card has arithmetic in bfloat16, which others emulate."""
    chip = capability(card.chip or card.architecture)
    return chip is None or chip >= _BFLOAT16


@record(frozen=True)
class Needs:
    """What a step needs of a chip: whether it computes in bfloat16, by autocast or otherwise, whether it runs code of
    torch.compile, and such code in bfloat16, and a kernel of it that PyTorch has in bfloat16 from compute capability
    8.0 on alone, empty for none; which heads of attention in other types have another kernel before that
    (`ops.registry.PADDED_HEADS`, `ANY_HEADS`, `EFFICIENT`).
    """

    bfloat16: bool = False
    autocast: bool = False  # to bfloat16
    compiled: bool = False
    compiled_bfloat16: bool = False
    fused: str = ""
    attention: str = ""
    compiled_float8: bool = False  # E4M3, as PyTorch and optimizers of torchao have it


@record(frozen=True)
class Standing:
    """Whether a step runs on a card, whatever its memory.

    Attributes:
        obstacle: why PyTorch refuses it, or runs another step than was predicted: a clause; empty where it runs.
        condition: where it runs, on which condition: `PyTorch 2.13's wheel for CUDA 12.6`; empty for none.
        reason: why there is a condition: a clause.
    """

    obstacle: str = ""
    condition: str = ""
    reason: str = ""


RUNS = Standing()


def standing(card: Gpu, torch: str, needs: Needs) -> Standing:
    """Whether a card runs a step with this PyTorch. Of cards of other vendors nothing is known, so nothing stands in
    their way here.

    Args:
        torch: a version, as `2.13`.
    """
    chip = capability(card.chip or card.architecture)
    if chip is None:
        return RUNS
    refused = _refused(chip, torch_release(torch), needs)
    if refused:
        return Standing(obstacle=refused)
    conditions = [*_find_build(chip, torch)]
    if needs.bfloat16 and chip < _BFLOAT16:
        conditions.append(("slow arithmetic in bfloat16", SLOWLY))
    if needs.attention == EFFICIENT and chip < _BFLOAT16:
        conditions.append(("memory-efficient attention", "flash and cuDNN need 8.0, and --sdpa efficient counts it"))
    return Standing("", " and ".join(what for what, _ in conditions), "; ".join(why for _, why in conditions))


def _refused(chip: Capability, release: tuple[int, int], needs: Needs) -> str:
    """What PyTorch raises an error for, or runs as another step than the one that was predicted."""
    if needs.compiled and chip < _FIRST_WITH_TRITON:
        return "torch.compile writes kernels in Triton, which needs compute capability 7.0"
    if needs.compiled_float8 and chip < _FLOAT8:
        return "Triton has the type float8_e4m3fn from compute capability 8.9 on"
    if chip < _BFLOAT16 and needs.attention not in ("", EFFICIENT):
        return _other_attention(chip, needs.attention)
    if chip >= _BFLOAT16 or not needs.bfloat16:
        return ""
    name = f"{release[0]}.{release[1]}"
    if needs.autocast and release < _AUTOCAST_EMULATES:
        return f"torch.autocast of PyTorch {name} refuses bfloat16 before compute capability 8.0 (2.3 emulates it)"
    if needs.compiled_bfloat16 and release < _INDUCTOR_SKIPS:
        return f"Triton of PyTorch {name} has no bfloat16 before compute capability 8.0"
    if needs.compiled_bfloat16:
        return (
            "torch.compile, which --compile-optimizer and optimizers of torchao call too, does not compile code in "
            "bfloat16 before compute capability 8.0"
        )
    if needs.fused:
        other = "--sdpa math is what it runs" if "attention" in needs.fused else "it runs other kernels"
        return (
            f"PyTorch has {needs.fused} in bfloat16 from compute capability 8.0 on: {other}, which takes other memory"
        )
    return ""


def _other_attention(chip: Capability, heads: str) -> str:
    """That attention runs another kernel than the one that was predicted."""
    if heads == PADDED_HEADS:
        flash = "PyTorch pads heads of attention to a multiple of 8 from compute capability 8.0 on alone"
        math = f"{flash}: --sdpa math is what it runs, which takes more memory"
        # before tensor cores the memory-efficient kernel takes such heads (sdp_utils.cpp, `minimum_gemm_alignment`)
        return math if chip >= (7, 0) else f"{flash}: it runs the memory-efficient kernel, which takes other memory"
    return (
        "before compute capability 8.0 PyTorch's memory-efficient attention takes heads of any size in float32: it "
        "runs instead of the math kernel that was predicted, and takes less memory"
    )


def _find_build(chip: Capability, torch: str) -> Iterable[tuple[str, str]]:
    """The build of PyTorch that has kernels for a chip, where the one that pip installs has none, and why."""
    release, build = torch_release(torch), cuda_of_build(torch)
    if chip in JETSON:
        yield "NVIDIA's build of PyTorch for JetPack", "PyTorch's own wheels have no kernels for Jetson Orin"
        return
    cuda, built = next((cuda, built) for since, cuda, built in reversed(_ON_PYPI) if since <= max(release, (1, 0)))
    named = f"{release[0]}.{release[1]} from PyPI (CUDA {cuda})"
    of_build = [listed for since, listed in _OF_CUDA_11 if build is not None and since <= build and release < (2, 0)]
    if of_build:
        built, named = of_build[-1], torch
    if _runs(chip, built) or (chip == _ON_PYPI_ARM[1] and release >= _ON_PYPI_ARM[0]):
        return
    name, shown = f"{release[0]}.{release[1]}", f"{chip[0]}.{chip[1]}"
    why = f"PyTorch {named} has no kernels for compute capability {shown}"
    for since, until, other, built in _ELSEWHERE:
        if since <= release < until and _runs(chip, built):
            yield (
                f"PyTorch {name}'s wheel for CUDA {other}",
                f"{why}; that wheel may have another cuDNN than is assumed",
            )
            return
    yield f"a build of PyTorch {name} of your own, or {_nearest(chip, release)}", why


def _nearest(chip: Capability, release: tuple[int, int]) -> str:
    """The last release before, else the first one behind, whose wheels have kernels for a chip."""
    spans = [(since, until, f"with its wheel for CUDA {cuda}", built) for since, until, cuda, built in _ELSEWHERE]
    starts = [since for since, _, _ in _ON_PYPI]
    ends = [*starts[1:], (99, 0)]
    spans += [(since, until, "from PyPI", built) for (since, _, built), until in zip(_ON_PYPI, ends, strict=True)]
    spans.append((_ON_PYPI_ARM[0], (99, 0), "from PyPI for aarch64", f"{_ON_PYPI_ARM[1][0]}.{_ON_PYPI_ARM[1][1]}"))
    serving = [span for span in spans if _runs(chip, span[3])]
    before = [(until, how) for _, until, how, _ in serving if until <= release]
    if before:
        (major, minor), how = max(before)
        return f"a PyTorch before {major}.{minor} {how}"
    (major, minor), how = min((since, how) for since, _, how, _ in serving)
    return f"PyTorch {major}.{minor} {how}"


def _runs(chip: Capability, built: str) -> bool:
    """Whether a list of compute capabilities has one whose kernels run on a chip."""
    return any(major == chip[0] and minor <= chip[1] for major, minor in _capabilities(built))


def _capabilities(listed: str) -> Iterable[Capability]:
    for word in listed.split():
        major, minor = word.split(".")
        yield int(major), int(minor)
