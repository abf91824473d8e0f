"""Workspace of a convolution in PyTorch: which library runs it, and the bytes that cuDNN's plan takes."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from staticmem.devices.conv import BACKWARD_FILTER, Convolution
from staticmem.devices.conv_tables import WITHOUT_TF32, form_bytes, forms, piece_bytes, search_range
from staticmem.units import NOTHING, Band, exactly

if TYPE_CHECKING:
    from staticmem.devices.cudnn import Cudnn

PLANS = 3  # plans of the heuristic: PyTorch tries the next one where memory is short; they make the band
# Median of the strays (`stray_bounds`) of weight gradients in NCHW, over input, weight and result; of other passes it
# is between 0.9 and 1.0, a copy of all three (docs/internals/workspace.md).
STRAY_FILTER = 1.31
# cuDNN before 8 is asked through another interface (aten/src/ATen/native/cudnn/Conv_v7.cpp) and was never asked for
# this package. Its algorithms for 3 x 3 windows of stride 1 include Winograd's in parts (CUDNN_CONVOLUTION_*_ALGO_
# WINOGRAD_NONFUSED), which holds the tensors transformed: F(4 x 4, 3 x 3) makes 6 x 6 numbers of 4 x 4 of input and
# result, and of 3 x 3 of the weight. Published memory of segmentation heads on V100 leaves room for 220 to 830 MiB of
# workspace where the tables say 10; which algorithm the heuristic took for them is not known.
OLD_CUDNN = 8
WINOGRAD_DATA, WINOGRAD_WEIGHT = 36 / 16, 36 / 9
EVERY = 10_000  # plans; more than cuDNN has for any convolution


def runs_on_cudnn(conv: Convolution, architecture: str) -> bool | None:
    """Whether PyTorch gives the convolution to cuDNN; None: only for some sizes.

    aten/src/ATen/native/Convolution.cpp, `use_cudnn` and `use_cudnn_depthwise`: a depthwise convolution in NCHW runs
    PyTorch's own kernel in float32, bfloat16 and float64; in float16 cuDNN takes sizes of a list; in channels_last
    cuDNN takes it always. bfloat16 needs sm_80.
    """
    if conv.precision == "bfloat16" and architecture in ("sm_70", "sm_75"):
        return False
    if conv.depthwise and not conv.channels_last and len(conv.stride) == 2:
        return None if conv.precision == "float16" else False
    return True


def workspace(conv: Convolution, architecture: str, version: str, cudnn: Cudnn | None = None) -> Band:
    """Bytes of workspace that the convolution's plan takes.

    Args:
        conv: one pass.
        architecture: `sm_80`.
        version: of cuDNN, `9.20.0`: its heuristics change with it.
        cudnn: an installed libcudnn that is asked; None: the tables of the package.
    """
    used = runs_on_cudnn(conv, architecture)
    if used is False:
        return _columns(conv)
    band = _asked(conv, architecture, cudnn) if cudnn is not None else _look_up_band(conv, architecture, version)
    return band if used else Band(0, 0, band.high)


def stray_bounds(conv: Convolution, architecture: str, band: Band, version: str) -> tuple[int, int] | None:
    """Bounds for strays: answers of cuDNN that the leaf of a table does not have. They are nothing, and a copy of all
    three tensors (weight gradients: with partial sums).

    Number and sizes of strays are in docs/internals/workspace.md: with tensor cores 6 to 18 % of a pass in NCHW.
    Without TF32 they are too few to matter, and convolutions that do not run on cuDNN have none. Of a `version` before
    8 they are nothing, and the transformed tensors of Winograd's algorithm.
    """
    if int(version.partition(".")[0]) < OLD_CUDNN and runs_on_cudnn(conv, architecture) is True:
        winograd = 0
        if conv.w[2:] == (3, 3) and set(conv.stride) == {1} and conv.groups == 1:
            pieces = piece_bytes(conv)
            winograd = int(WINOGRAD_DATA * (pieces["x"] + pieces["y"]) + WINOGRAD_WEIGHT * pieces["w"])
        return 0, max(band.high, winograd)
    plain = conv.precision in ("float32", "float64") or (architecture in WITHOUT_TF32 and conv.precision == "tf32")
    if plain or runs_on_cudnn(conv, architecture) is not True:
        return None
    ratio = STRAY_FILTER if conv.direction == BACKWARD_FILTER else 1.0
    return 0, max(band.high, int(ratio * sum(piece_bytes(conv).values())))


def plans(conv: Convolution, architecture: str, version: str, cudnn: Cudnn | None = None) -> tuple[int, ...]:
    """Workspaces of the plans in the order in which PyTorch tries them; empty: none is needed or known."""
    if not runs_on_cudnn(conv, architecture):
        return ()
    if cudnn is not None:
        return tuple(plan.workspace for plan in cudnn.plans(conv, architecture, limit=PLANS))
    return _form_sizes(conv, architecture, version)


def largest_plan(conv: Convolution, architecture: str, cudnn: Cudnn | None = None) -> Band:
    """Bytes of the largest workspace among all plans, which the search of `cudnn.benchmark` takes.

    Without a libcudnn: quantiles over random convolutions (scripts/convolutions/conv_workspace_tables.py search), as
    the engines that a network's convolution has are not known.
    """
    used = runs_on_cudnn(conv, architecture)
    if used is False:
        return NOTHING
    if cudnn is not None:
        band = exactly(max((plan.workspace for plan in cudnn.plans(conv, architecture, limit=EVERY)), default=0))
    else:
        total = sum(piece_bytes(conv).values())
        band = Band(*(int(total * ratio) for ratio in search_range(conv, architecture)))
    return band if used else Band(0, 0, band.high)


def fastest_plan(first: Band, sizes: tuple[int, ...]) -> Band:
    """The plan that is measured fastest: the heuristic's first is expected, its first three are the band.

    cuDNN orders its heuristic by expected time; what a card measures may order them otherwise.
    """
    return Band(min(first.low, *sizes), first.expected, max(first.high, *sizes)) if sizes else first


def _columns(conv: Convolution) -> Band:
    """What PyTorch's own kernels take where cuDNN does not run: the windows of one sample as columns, which a matrix
    product reads or writes in each pass. Depthwise kernels take none, nor does a window of one element
    (aten/src/ATen/native/cuda/ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu, NaiveDilatedConvolution.cu; a
    dilated kernel makes them in any case)."""
    plain = prod(conv.w[2:]) == 1 and set(conv.stride) == {1} and set(conv.padding) == {0} and set(conv.dilation) == {1}
    if plain or (conv.depthwise and len(conv.stride) == 2):
        return NOTHING
    return exactly(conv.w[1] * prod(conv.w[2:]) * prod(conv.y[2:]) * conv.itemsize)


def _asked(conv: Convolution, architecture: str, cudnn: Cudnn) -> Band:
    candidates = cudnn.plans(conv, architecture)
    return exactly(candidates[0].workspace) if candidates else NOTHING


@lru_cache(maxsize=4096)
def _form_sizes(conv: Convolution, architecture: str, version: str) -> tuple[int, ...]:
    """Bytes of the forms that the tables have for a convolution, the likeliest first."""
    return tuple([form_bytes(conv, form) for form in forms(conv, architecture, version)])


def _look_up_band(conv: Convolution, architecture: str, version: str) -> Band:
    sizes = _form_sizes(conv, architecture, version)
    if not sizes:  # no table: nothing, or a copy of all three tensors
        return Band(0, 0, sum(piece_bytes(conv, 8).values()))
    if len(conv.stride) == 3:  # the tables are of 2-D convolutions: their forms, within nothing and a copy of all
        return Band(0, sizes[0], max(*sizes, sum(piece_bytes(conv, 8).values())))
    return Band(min(sizes), sizes[0], max(sizes))
