"""A batch norm and its activation as one op that overwrites its input: InPlaceABN.

The result alone is saved, and the backward computes the normalised input from it.

Source: inplace_abn/functions.py (`InPlaceABN`), src/inplace_abn_cuda.cu (`statistics_template`,
`backward_reduce_template`) of mapillary/inplace_abn at b50bfe9.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.eager.autograd import Formula, Grads
from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.pointwise import inplace
from staticmem.ops.registry import rule

INPLACE_ABN = "inplace_abn::inplace_abn_"
RELU = ("aten::relu", "aten::relu_")
ACTIVATIONS = (*RELU, "aten::leaky_relu", "aten::leaky_relu_", "aten::elu", "aten::elu_")  # that it can run


@rule(INPLACE_ABN, kinds=("norm",))
def inplace_abn(
    e: Eager, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None,
) -> Tensor:  # fmt: skip
    """In place: saves its result, the variance, the count of samples, weight and bias. Backward makes the normalised
    input and the gradient, each of the input's size, and two sums of C; statistics are float32 beside float16."""
    channels = (input.shape[1],)
    statistic = dtypes.float32 if input.dtype is dtypes.float16 else input.dtype
    e.empty(channels, statistic, kernel="inplace_abn.statistics.default")  # the mean
    variance = e.empty(channels, statistic)
    count = e.empty((1,), dtypes.int64)
    if running_mean is not None:
        _update(e, channels, statistic)
    out = inplace(e, input, "inplace_abn.forward.default")

    def gradients(e: Eager, grads: Grads, need: Sequence[bool]) -> Sequence[Tensor | None]:
        e.empty_like(out, kernel="inplace_abn.backward_reduce.default")  # a variable until the function returns
        by_input = e.empty_like(out)
        by_bias, by_weight = (e.empty(channels, statistic) for _ in range(2))
        if weight is not None and need[1]:  # `dweight[weight < 0] *= -1`, where no weight is negative
            e.empty(channels, dtypes.bool_, kernel="aten.lt.Scalar")
        return e.alias(by_input, out.shape, out.strides), by_weight, by_bias

    saves = [out, variance, count, weight, bias]
    return e.record("InPlaceABNBackward", out, [input, weight, bias], [Formula((0, 1, 2), gradients)], saves)


def _update(e: Eager, channels: tuple[int, ...], statistic: dtypes.DType) -> None:
    """Running statistics: `momentum * mean`, then `momentum * var * count / (count - 1)`."""
    e.empty((1,), statistic, kernel="aten._to_copy.default")  # the count, a variable
    e.free(e.empty(channels, statistic, kernel="aten.mul.Tensor"))
    first = e.empty(channels, statistic, kernel="aten.mul.Tensor")
    second = e.empty(channels, statistic, kernel="aten.mul.Tensor")
    e.free(first)
    less = e.empty((1,), statistic, kernel="aten.sub.Tensor")
    ratio = e.empty(channels, statistic, kernel="aten.div.Tensor")
    for temporary in (second, less, ratio):
        e.free(temporary)
