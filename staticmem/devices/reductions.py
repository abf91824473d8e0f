"""The buffer of PyTorch's CUDA reductions: partial results of blocks that share an output.

A sum over many rows, such as the gradient of a bias, splits its input over blocks, and the buffer then holds a vector
of each thread: tens of MiB for a result of some KiB. Source: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`,
`ReduceConfig`, `gpu_reduce_kernel`); which dimensions a kernel sees is TensorIterator's doing (`reorder_dimensions`,
`coalesce_dimensions`).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from staticmem.ir.record import record

MAX_THREADS = 512  # mnt_wrapper::MAX_NUM_THREADS
WARP = 32
VECTOR = 4  # vt0 and input_vec_size of sums, and the largest output vector
MIN_VALUES, MAX_VALUES = 16, 256  # values of a thread, at least and at most, where blocks share an output
INDEXABLE = 2**31 - 1  # elements; a larger tensor is reduced in parts


@record(frozen=True, slots=True)
class Multiprocessors:
    """What the launch of a reduction asks of a card: its multiprocessors, and the threads that each can hold."""

    count: int = 132
    threads: int = 2048


def _power(n: int) -> int:
    """`last_pow2`: the largest power of two that is at most n."""
    return 1 << (max(n, 1).bit_length() - 1)


def _up(n: int, by: int) -> int:
    return -(-n // by)


def _coalesced(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(size, stride) from the innermost on, neighbours that lie behind one another joined."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


@lru_cache(maxsize=4096)  # blocks repeat, and steps are replayed for many cards
def reduction_buffer(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    axes: tuple[int, ...],
    multiprocessors: Multiprocessors,
    accumulator: int = 4,
) -> tuple[int, int]:
    """The buffer and the semaphores of a reduction over `axes`, in bytes; (0, 0) where blocks share no output.

    Args:
        shape: sizes of the input; `strides` in elements.
        accumulator: bytes of an intermediate result: 4 for sums of float32 and of half precision.
    """
    reduced = _coalesced([(shape[a], strides[a]) for a in axes])
    kept = _coalesced([(n, strides[a]) for a, n in enumerate(shape) if a not in axes])
    inputs, outputs = prod(size for size, _ in reduced), prod(size for size, _ in kept)
    if inputs * outputs > INDEXABLE or inputs * outputs == 0:
        return 0, 0
    along = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])  # reduction_on_fastest_striding_dimension
    dim0, dim1 = (inputs, outputs) if along else (outputs, inputs)
    fastest = (reduced or [(1, 1)])[0][1] if along else kept[0][1]
    vector = 1
    if fastest == 1 and along and dim0 >= 128 and len(reduced) == 1:
        dim0 //= VECTOR
    elif fastest == 1 and not along:
        vector = VECTOR
        for n in (kept[0][0], *(stride for _, stride in (*reduced, *kept[1:]))):  # get_output_vec_size
            while n % vector:
                vector //= 2
        dim0 //= vector
    most = MAX_THREADS // vector
    wide, high = min(_power(dim0), most), min(_power(dim1), most)
    width = min(wide, WARP)
    height = min(high, most // width)
    width = min(wide, most // height)
    step_in, step_out = (width, 1) if along else (1, width)
    across_warps = _up(inputs, step_in) >= min(height * 16, MAX_VALUES)
    if across_warps:
        step_in *= height
    else:
        step_out *= height
    grid, values = _up(outputs // vector, step_out), _up(inputs, step_in)
    target = multiprocessors.count * (multiprocessors.threads // (width * height))
    if not across_warps or values < MAX_VALUES or grid > target:
        return 0, 0
    blocks = max(min(_up(target, grid), _up(values, MIN_VALUES)), _up(values, MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    size = accumulator * outputs * blocks
    return (size if along else size * width * vector), 4 * grid
