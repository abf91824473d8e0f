"""torchvision's detection ops.

Sources: torchvision/csrc/ops/autograd/*.cpp and csrc/ops/cuda/*.cu (what is saved, which gradients are made; what the
kernels allocate inside, such as the columns of `deform_conv2d`, is no tensor of the program);
torchvision/csrc/ops/autocast/*.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import Indices
from staticmem.ir import dtypes
from staticmem.ops.pointwise import gradient_like
from staticmem.ops.registry import KernelCall, Temporary, rule, workspace
from staticmem.units import exactly

_BOXES_OF_BLOCK = 64  # nms_kernel.cu, `threadsPerBlock`: bits of a word of the mask


@rule("torchvision::nms", kinds=("data_sized",), autocast="float32")
def nms(e: Eager, dets: Tensor, scores: Tensor, iou_threshold: float, *, size: int | None = None) -> Tensor:
    """int64 positions of the boxes that are kept (at most all of them), without gradient."""
    kept = e.empty((dets.shape[0] if size is None else size,), dtypes.int64, kernel="torchvision.nms.default")
    e.reads(Indices(dets.shape[0]))
    return kept


@workspace("torchvision.nms.default")
def nms_mask(call: KernelCall) -> list[Temporary]:
    """Which boxes each one covers, a bit for each; their order, and the boxes in it (csrc/ops/cuda/nms_kernel.cu)."""
    boxes = call.indices
    mask = boxes * -(-boxes // _BOXES_OF_BLOCK) * dtypes.int64.itemsize
    ordered = boxes * (dtypes.int64.itemsize + 4 * dtypes.float32.itemsize)
    return [Temporary(exactly(ordered), "nms: boxes in order"), Temporary(exactly(mask), "nms: mask")]


def _pooled(
    e: Eager, input: Tensor, rois: Tensor, shape: tuple[int, ...], name: str, extras: Sequence[Tensor] = ()
) -> Tensor:
    out = e.empty(shape, input.dtype, kernel=f"torchvision.{name}.default")
    gradient = gradient_like(input, f"torchvision._{name}_backward.default")
    return e.record(f"{name}_backward", out, [input], [Formula((0,), gradient)], [rois, *extras])


@rule("torchvision::roi_align", autocast="float32")
def roi_align(
    e: Eager, input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, *_: Any
) -> Tensor:
    """One window a box; saves the boxes; backward makes one tensor of the input's size."""
    shape = (rois.shape[0], input.shape[1], pooled_height, pooled_width)
    return _pooled(e, input, rois, shape, "roi_align")


@rule("torchvision::roi_pool", autocast="float32")
def roi_pool(
    e: Eager, input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Tensor, Tensor]:
    """One window a box, and the int32 positions of its maxima, which are saved with the boxes."""
    shape = (rois.shape[0], input.shape[1], pooled_height, pooled_width)
    argmax = e.empty(shape, dtypes.int32, kernel="torchvision.roi_pool.default")
    return _pooled(e, input, rois, shape, "roi_pool", [argmax]), argmax


@rule("torchvision::ps_roi_align torchvision::ps_roi_pool", autocast="float32")
def ps_roi_align(
    e: Eager, input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, *_: Any
) -> tuple[Tensor, Tensor]:
    """One window a box of a share of the channels, and int32 channels, which are saved with the boxes."""
    channels = input.shape[1] // (pooled_height * pooled_width)
    shape = (rois.shape[0], channels, pooled_height, pooled_width)
    mapping = e.empty(shape, dtypes.int32, kernel="torchvision.ps_roi_align.default")
    return _pooled(e, input, rois, shape, "ps_roi_align", [mapping]), mapping


@rule("torchvision::deform_conv2d", autocast="float32")
def deform_conv2d(
    e: Eager, input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, stride_h: int, stride_w: int,
    pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int, offset_groups: int, use_mask: bool,
) -> Tensor:  # fmt: skip
    """Saves all five tensors; backward makes the gradients of all of them in one node."""
    rows = (input.shape[2] + 2 * pad_h - dilation_h * (weight.shape[2] - 1) - 1) // stride_h + 1
    columns = (input.shape[3] + 2 * pad_w - dilation_w * (weight.shape[3] - 1) - 1) // stride_w + 1
    kernel = "torchvision.deform_conv2d.default"
    out = e.empty((input.shape[0], weight.shape[0], rows, columns), input.dtype, kernel=kernel)
    tensors = [input, weight, offset, mask, bias]

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.kernel("torchvision._deform_conv2d_backward.default")
        return [e.empty(t.shape, t.dtype) for t in tensors]

    return e.record("DeformConv2dFunction", out, tensors, [Formula((0, 1, 2, 3, 4), gradients)], tensors)
