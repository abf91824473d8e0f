"""What CUDA kernels of PyTorch allocate inside of themselves: closed forms with their sources. Sizes in bytes.

Only what can matter: kernels that keep a few partial sums of a block each are left out.
"""

from __future__ import annotations

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
