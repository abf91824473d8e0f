"""What CUDA kernels of PyTorch allocate inside of themselves: closed forms with their sources. Sizes in bytes.

Only what can matter: kernels that keep a few partial sums of a block each are left out.
"""

from __future__ import annotations

from functools import lru_cache

from staticmem.ir.record import record
from staticmem.units import Band, exactly

INDEX = 8  # bytes of an int64 index
FLOAT = 4  # accumulators are float32


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


def flash_backward(
    batch: int, heads: int, queries: int, keys: int, head: int, key_heads: int, itemsize: int
) -> tuple[Band, ...]:
    """FlashAttention-2 backward: the sum over d_out x out, the query gradient in float32, expanded key gradients.

    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: softmax_d and dq_accum, rounded to 128
    queries and to 32 (above 128: 64) of the head; dk and dv of all query heads where there are fewer key heads.
    """
    rows, width = _round(queries, 128), _round(head, 32 if head <= 128 else 64)
    bands = [exactly(batch * heads * rows * FLOAT), exactly(batch * heads * rows * width * FLOAT)]
    if key_heads != heads:
        bands += [exactly(batch * keys * heads * _round(head, 8) * itemsize)] * 2
    return tuple(bands)


def cudnn_attention_backward(batch: int, heads: int, queries: int, head: int) -> Band:
    """cuDNN's attention backward: the query gradient and its row sums in float32 (workspace of the graph, MHA.cpp).

    The engine decides: newer ones on sm_90 and later need less.
    """
    total = batch * heads * queries * head * FLOAT + batch * heads * queries * FLOAT
    return Band(batch * heads * queries * FLOAT, total, total + batch * heads * _round(queries, 128) * FLOAT)


_GRADIENT_BLOCK = 64  # queries; kernel_backward.h: kBlockSizeI of kernels for heads up to 64 (128 for larger ones)
_BLOCK_HEADER = 16  # bytes; kernel_backward.h, GradQTempStorage: a lock, a counter and padding


def efficient_backward(batch: int, heads: int, queries: int, head: int, itemsize: int) -> tuple[Band, ...]:
    """Memory-efficient backward: delta, and the query gradient in blocks of float32.

    aten/src/ATen/native/transformers/cuda/attention_backward.cu: in float32 delta is (grad_out x out).sum(-1), made
    contiguous: a product of the size of the result, which the sum outlives, and delta twice. In half precision the
    kernel computes it. mem_eff_attention/kernel_backward.h, workspace_elements_gq: blocks of queries by 64 columns of
    the head, each with a header; key and value gradients stay in registers up to a head of 128.
    """
    delta = exactly(batch * heads * queries * FLOAT)
    tiles, block = -(-head // 64), _GRADIENT_BLOCK if head <= 64 else 2 * _GRADIENT_BLOCK

    def gradient(rows: int) -> int:
        blocks = batch * heads * -(-queries // rows) * tiles
        return blocks * (rows * 64 * FLOAT + _BLOCK_HEADER)

    expected = gradient(block)
    other = gradient(3 * _GRADIENT_BLOCK - block)
    accumulated = Band(min(expected, other), expected, max(expected, other))
    if itemsize < FLOAT:
        return delta, accumulated
    return exactly(batch * heads * queries * head * FLOAT), delta, delta, accumulated


LAYER_NORM_PARTIALS_SINCE = (2, 8)  # torch; pull request 148605 of pytorch, merged in March 2025
_LAYER_NORM_ROWS, _LAYER_NORM_COLUMNS, _LAYER_NORM_GRID = 32, 32, 32 * 1024


def layer_norm_blocks(rows: int, columns: int, multiprocessors: int) -> int:
    """Blocks of rows whose partial gradients are kept; 0 where one block of threads sums all rows of a column.

    aten/src/ATen/native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: more than 65,536 rows that are
    too short to fill half of the multiprocessors.
    """
    if rows <= 64 * 1024 or columns // _LAYER_NORM_COLUMNS >= multiprocessors // 2:
        return 0
    wide = -(-columns // _LAYER_NORM_COLUMNS)
    return min(_LAYER_NORM_GRID // wide, -(-rows // _LAYER_NORM_ROWS))


_MOST_GATES = 4  # of an LSTM, the most of all cells


def recurrent(result: int, reserve: int) -> Band:
    """cuDNN's workspace of a recurrent layer, which only cuDNN knows (cudnnGetRNNTempSpaceSizes; ATen's cudnn/RNN.cpp).

    The products with the inputs of all steps are one (Appleyard, Kocisky and Blunsom 2016, "Optimizing Performance of
    Recurrent Neural Networks on GPUs"), so the gates of all steps of one layer are expected; at least nothing, at most
    those of all layers, which the reserve is made of.
    """
    gates = _MOST_GATES * result
    return Band(0, gates, max(gates, reserve))


EMBEDDING_SORTS_ABOVE = 3072  # aten/src/ATen/native/cuda/Embedding.cu: up to here one kernel without a sort
_ROWS_PER_THREAD = 10  # aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, NROWS_PER_THREAD


def embedding_sort(indices: int) -> Band:
    """Sorted indices and where they were, and cub's double buffers while they are sorted (Embedding.cu, cub.cuh)."""
    if indices <= EMBEDDING_SORTS_ABOVE:
        return exactly(0)
    kept = 2 * INDEX * indices
    return Band(kept, 2 * kept, 2 * kept + (1 << 20))


def embedding_segments(indices: int, rows: int, width: int) -> Band:
    """Partial gradients of segments of equal indices, in float32 (EmbeddingBackwardKernel.cu).

    Segments of 10 indices, and one more for each index that occurs: at most min(indices, rows).
    """
    if indices <= EMBEDDING_SORTS_ABOVE:
        return exactly(0)
    full = indices // _ROWS_PER_THREAD
    most = (full + min(indices, rows)) * width * FLOAT
    return Band(full * width * FLOAT, most, most)


def index_put_accumulate(indices: int) -> Band:
    """Linear index, its order, and both sorted (aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel)."""
    return exactly(4 * INDEX * indices)


def sort(elements: int, along: int, itemsize: int) -> Band:
    """cub's segmented radix sort: keys and positions once more (aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu).

    Up to 4,096 along the dimension it is sorted in place, in blocks.
    """
    if along <= 4096:
        return exactly(0)
    return Band(elements * itemsize, elements * (itemsize + INDEX), elements * (2 * itemsize + 2 * INDEX))


# -- sums ------------------------------------------------------------------------------------------------------------
#
# The buffer of PyTorch's CUDA reductions: partial results of blocks that share an output. A sum over many rows, such as
# the gradient of a bias, splits its input over blocks, and the buffer then holds a vector of each thread: tens of MiB
# for a result of some KiB. Source: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `ReduceConfig`,
# `gpu_reduce_kernel`); which dimensions a kernel sees is TensorIterator's doing (`reorder_dimensions`,
# `coalesce_dimensions`).

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
    found: list[tuple[int, int]] = []
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if size == 1:
            continue
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return found


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
    inputs = outputs = 1
    for size, _ in reduced:
        inputs *= size
    for size, _ in kept:
        outputs *= size
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
