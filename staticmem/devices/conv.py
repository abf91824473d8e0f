"""A convolution as cuDNN gets it: sizes, layout, precision, and which of its three passes."""

from __future__ import annotations

from functools import cached_property

from staticmem.eager import trace
from staticmem.eager.strides import prefers_channels_last
from staticmem.errors import UsageError
from staticmem.ir.record import record

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "forward", "backward_data", "backward_filter"
PASSES = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)

# How PyTorch may compute: float32 with and without tensor cores (`torch.backends.cudnn.allow_tf32`, on by default:
# aten/src/ATen/Context.h, allow_tf32_cudnn), and the half precisions.
PRECISIONS = ("tf32", "float32", "float16", "bfloat16", "float64")
ITEMSIZE = {"tf32": 4, "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def precision_of(dtype: str, allow_tf32: bool = True) -> str:
    """The precision that a dtype computes in. A dtype that cuDNN does not convolve is an error."""
    if dtype == "float32":
        return "tf32" if allow_tf32 else "float32"
    if dtype not in ITEMSIZE or dtype == "tf32":
        raise UsageError(f"no convolution in {dtype}", f"cuDNN convolves {', '.join(PRECISIONS[1:])}.", code="SM410")
    return dtype


@record(frozen=True)
class Convolution:
    """One pass of a convolution of `x` (N, C, spatial) with `w` (K, C/groups, window). Sizes are elements.

    `padding` is the same on both sides, as PyTorch passes it. A transposed convolution is the same three passes in
    other roles: see `passes_of`.
    """

    direction: str
    precision: str
    channels_last: bool
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        rank = len(self.x) - 2
        if rank not in (2, 3) or len(self.w) != rank + 2:
            raise ValueError(f"cuDNN convolves 2 or 3 spatial dimensions, got {self.x} with {self.w}")
        if {len(self.stride), len(self.padding), len(self.dilation)} != {rank}:
            raise ValueError(f"stride, padding and dilation of {self} must have {rank} numbers each")
        if self.x[1] != self.w[1] * self.groups or self.w[0] % self.groups:
            raise ValueError(f"channels of {self.x} and {self.w} do not fit {self.groups} groups")

    @cached_property
    def y(self) -> tuple[int, ...]:
        """Sizes of the result."""
        window = zip(self.x[2:], self.w[2:], self.stride, self.padding, self.dilation, strict=True)
        return (self.x[0], self.w[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in window))

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.precision]

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and trace.is_depthwise(self.x[1], self.w[0], self.groups)


_SWAPPED = {FORWARD: BACKWARD_DATA, BACKWARD_DATA: FORWARD, BACKWARD_FILTER: BACKWARD_FILTER}


def passes_of(call: trace.Convolution, channels_last: bool, allow_tf32: bool = True) -> tuple[Convolution, ...]:
    """The passes that a kernel runs, in its order; none where cuDNN does not convolve such tensors.

    The layout is the one that PyTorch asks cuDNN for: channels_last where input or weight lies so
    (aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format), or always with `channels_last`, where the
    whole model was moved to it: the trace is of the model as it is. A 1-D convolution runs as a 2-D one of height 1
    (aten/src/ATen/native/Convolution.cpp, view1d_as_2d).

    A transposed one is given as the convolution from its result to its input, whose passes it runs in other roles.
    aten/src/ATen/native/cudnn/ConvShared.cpp: `cudnn_convolution_transpose_forward` calls the data gradient, its data
    gradient calls the forward, its weight gradient calls the weight gradient with input and gradient exchanged.
    """
    x, w, y = call.input.shape, call.weight.shape, call.result.shape
    dtype, rank = call.result.dtype.name, len(w) - 2
    if rank < 1 or dtype not in ITEMSIZE or 0 in (*x, *w, *y):
        return ()
    last = channels_last or any(prefers_channels_last(f.shape, f.strides) for f in (call.input, call.weight))
    if call.transposed:
        x = y
    stride, padding, dilation = call.stride, call.padding, call.dilation
    if rank == 1:
        x, w = (x[0], x[1], 1, x[2]), (w[0], w[1], 1, w[2])
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    if call.gradients is None:
        passes = [FORWARD]
    else:
        passes = [each for each, wanted in zip((BACKWARD_DATA, BACKWARD_FILTER), call.gradients, strict=True) if wanted]
    if call.transposed:
        passes = [_SWAPPED[each] for each in passes]
    precision = precision_of(dtype, allow_tf32)
    try:
        return tuple(
            [
                Convolution(each, precision, last and rank == 2, x, w, stride, padding, dilation, call.groups)
                for each in passes
            ]
        )
    except ValueError:
        return ()
