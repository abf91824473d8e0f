"""Memory of kernels on bytes: packed weights, and the buffers of a run.

Source: onnxruntime/core/providers/cpu/quantization (qlinearconv.cc, matmul_integer_base.h, quantize_linear_matmul.cc,
conv_integer.cc) and contrib_ops/cpu/quantization (dynamic_quantize_matmul.cc, quant_gemm.cc, qlinear_pool.cc);
core/mlas/lib/qgemm.cpp and convsym.cpp. Compared with onnxruntime 1.32 on AVX-512 without AMX.
"""

from __future__ import annotations

from collections.abc import Sequence

from staticmem.ort.memory.kernel import Kernel, Packing, PackRule, WorkRule, elements, integer_pack, matrix
from staticmem.units import round_up

_MS = "com.microsoft"
_POINTER = 8


def _product(left: int | None, right: int, transposed: bool = False) -> PackRule:
    """A product whose right side is packed where it is a constant matrix of bytes. `left` is None where the kernel
    makes unsigned bytes of a float left side itself. A transposed right side is transposed in the arena first."""

    def rule(kernel: Kernel) -> Packing | None:
        kind = kernel.constant(right)
        sizes = matrix(kind, 2)
        if kind is None or sizes is None:
            return Packing(0)
        signed, left_signed = kernel.signed(right), False if left is None else kernel.signed(left)
        if signed is None or left_signed is None:
            return None
        rows, columns = sizes
        turned = transposed and bool(kernel.node.number("transB"))
        if turned:
            rows, columns = columns, rows
        temporary = (rows * columns,) if turned else ()
        return Packing(integer_pack(columns, rows, kernel.processor.rows(left_signed, signed)), temporary)

    return rule


def _symmetric(kernel: Kernel, sizes: Sequence[int], groups: int) -> int:
    """Bytes of the weights of a convolution whose zero points are constants, those of the weights zero; 0 for others
    (TryConvSymPrepack, MlasConvSymPackWSize). Zero points are read from the file."""
    filters, channels = sizes[0] // groups, sizes[1]
    kernel_size = elements(sizes[2:])
    if kernel.signed(3) is not True or kernel.signed(0) is not False or kernel.constant(2) is None:
        return 0
    zero = kernel.constant(5)
    if zero is None or not kernel.graph.zeros.get(kernel.name(5), False):
        return 0
    if groups > 1:
        return groups * kernel_size if channels == filters == 1 and groups % 16 == 0 else 0
    if filters < 16 or channels % 4 or filters % kernel.processor.filters:
        return 0
    return round_up(filters, 16) * channels * kernel_size


def _packed_conv(kernel: Kernel) -> Packing | None:
    kind = kernel.constant(3)
    sizes = matrix(kind)
    groups = kernel.node.number("group", 1)
    if sizes is None or len(sizes) < 3 or groups < 1 or sizes[0] % groups:
        return Packing(0)
    left, signed = kernel.signed(0), kernel.signed(3)
    if left is None or signed is None or kernel.graph.zeros.get(kernel.name(5)) is None:
        return None
    symmetric = _symmetric(kernel, sizes, groups)
    if symmetric:
        return Packing(symmetric, within=True)
    filters, channels, kernel_size = sizes[0] // groups, sizes[1], elements(sizes[2:])
    if filters != 1 or channels != 1:
        size = integer_pack(filters, channels * kernel_size, kernel.processor.rows(left, signed))
        if size:
            return Packing(groups * size, (filters * channels * kernel_size,))
    return Packing(elements(sizes))  # the filter in another order


def _conv(kernel: Kernel) -> Sequence[int] | None:
    data, weight, result = kernel.shape(0), kernel.shape(3), kernel.result_shape()
    if data is None or weight is None or result is None:
        return None
    last = bool(kernel.node.number("channels_last"))
    groups = kernel.node.number("group", 1)
    packing = _packed_conv(kernel)
    constant = kernel.constant(3) is not None
    rank = len(weight) - 2
    if packing is None or rank < 1 or len(data) != rank + 2 or groups < 1:
        return None
    symmetric = constant and _symmetric(kernel, weight, groups) > 0
    filters, channels, kernel_size = weight[0] // groups, weight[1], elements(weight[2:])
    spatial, results = (data[1:-1], result[1:-1]) if last else (data[2:], result[2:])
    image, image_in = elements(results), elements(spatial)
    depthwise = channels == filters == 1 and (symmetric or not constant or packing.temporary == ())
    requests: list[int] = []
    if not constant:
        requests.append(elements(weight))
    columns = weight[0] * image
    if not symmetric:
        requests.append(4 * columns)
    if not last:
        requests += [channels * groups * image_in, columns]
    pointers = _POINTER * kernel_size * image
    plain = kernel_size == 1 and not any(kernel.node.numbers("pads", ())) and tuple(spatial) == tuple(results)
    if depthwise or (symmetric and not plain):
        if last and not symmetric and data[0] > 1:
            return None  # not tried
        requests.append(pointers * (data[0] if last else 1))
    elif not plain:
        column = channels * kernel_size * image
        requests.append(column * groups if rank > 2 else column)
    return requests


def _integer_conv(kernel: Kernel) -> Sequence[int] | None:
    data, weight, result = kernel.shape(0), kernel.shape(1), kernel.result_shape()
    if data is None or weight is None or result is None:
        return None
    kernel_size, image = elements(weight[2:]), elements(result[2:])
    plain = kernel_size == 1 and not any(kernel.node.numbers("pads", ())) and data[2:] == result[2:]
    groups = kernel.node.number("group", 1)
    if groups != 1 and len(weight) > 4:
        return None  # not tried
    return () if plain else (weight[1] * kernel_size * image,)


def _sums(kernel: Kernel) -> Sequence[int] | None:
    """Products of 32 bits, of the whole result."""
    result = kernel.result(0)
    return None if result is None else (4 * result.numel,)


def _quantised_left(kernel: Kernel) -> Sequence[int] | None:
    """The left side in bytes."""
    left = kernel.value(0)
    return None if left is None else (left.numel,)


def _quant_gemm(kernel: Kernel) -> Sequence[int] | None:
    result = kernel.result(0)
    if result is None:
        return None
    return (4 * result.numel,) if len(kernel.node.inputs) > 8 and kernel.name(8) else ()


def _quant_pool(kernel: Kernel) -> Sequence[int] | None:
    """The input as floats."""
    data = kernel.value(0)
    if data is None or kernel.node.number("channels_last"):
        return None
    return (4 * data.numel,)


PACKED: dict[tuple[str, str], PackRule] = {
    ("", "MatMulInteger"): _product(0, 1),
    ("", "QLinearMatMul"): _product(0, 3),
    (_MS, "MatMulIntegerToFloat"): _product(0, 1),
    (_MS, "DynamicQuantizeMatMul"): _product(None, 1),
    (_MS, "QGemm"): _product(0, 3, transposed=True),
    ("", "QLinearConv"): _packed_conv,
    (_MS, "QLinearConv"): _packed_conv,
}
WORKSPACES: dict[tuple[str, str], WorkRule] = {
    ("", "QLinearMatMul"): _sums,
    (_MS, "DynamicQuantizeMatMul"): _quantised_left,
    (_MS, "QGemm"): _quant_gemm,
    ("", "QLinearConv"): _conv,
    (_MS, "QLinearConv"): _conv,
    ("", "ConvInteger"): _integer_conv,
    (_MS, "QLinearAveragePool"): _quant_pool,
}
