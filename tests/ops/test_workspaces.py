"""What kernels take for themselves: values worked out by hand from the sources that each formula names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from staticmem import ops
from staticmem.eager.strides import Form, channels_last_strides, contiguous_strides, form_of
from staticmem.eager.trace import Reduction
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops.attention import efficient_backward, flash_backward
from staticmem.ops.indexing import embedding_backward
from staticmem.ops.loss import ctc_temporaries
from staticmem.ops.normalization import group_norm_temporaries, layer_norm_partial_sums
from staticmem.ops.recurrent import recurrent_workspace
from staticmem.ops.registry import FAMILIES, WORKSPACES, KernelCall, Temporary, rules, workspace
from staticmem.ops.scattering import index_put_sort
from staticmem.ops.softmax import softmax_temporaries
from staticmem.ops.sorting import sort_buffers
from staticmem.units import Band, exactly

FOLDER = Path(ops.__file__).parent
Shape = tuple[int, ...]


def kernel(
    *shapes: Shape,
    dtype: DType = dtypes.float32,
    phase: str = "backward",
    indices: int = 0,
    forward: Sequence[Form] = (),
    torch: tuple[int, int] = (2, 13),
    name: str = "",
) -> KernelCall:
    results = tuple(form(shape, dtype) for shape in shapes)
    return KernelCall(name, phase, results, indices, tuple(forward), multiprocessors=132, torch=torch)


def form(shape: Shape, dtype: DType = dtypes.float32) -> Form:
    return form_of(shape, contiguous_strides(shape), dtype)


def bands(taken: Sequence[Temporary]) -> list[Band]:
    return [temporary.band for temporary in taken]


def test_flash_backward_rounds_queries_and_head() -> None:
    # 8 x 12 heads, 512 queries, head 64: row sums and the float32 query gradient
    rows, shape = 8 * 12 * 512 * 4, (8, 12, 512, 64)
    assert bands(flash_backward(kernel(shape, shape, dtype=dtypes.float16))) == [exactly(rows), exactly(rows * 64)]
    # 100 queries count as 128, a head of 72 as 96
    shape = (1, 1, 100, 72)
    expected = [exactly(128 * 4), exactly(128 * 96 * 4)]
    assert bands(flash_backward(kernel(shape, shape, dtype=dtypes.float16))) == expected


def test_flash_backward_expands_keys_of_grouped_queries() -> None:
    expanded, queries = exactly(256 * 32 * 64 * 2), (1, 32, 128, 64)
    grouped = flash_backward(kernel(queries, (1, 8, 256, 64), dtype=dtypes.float16))
    assert bands(grouped)[2:] == [expanded, expanded]
    assert flash_backward(kernel(queries, (1, 32, 256, 64), dtype=dtypes.float16))[2:] == []


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "seen"),
    [(16, 12, 197, 12_595_200), (4, 12, 512, 6_297_600)],  # PyTorch 2.14 on a stub: ViT-B/16, GPT-2
)
def test_the_query_gradient_of_efficient_backward(batch: int, heads: int, queries: int, seen: int) -> None:
    shape = (batch, heads, queries, 64)
    product, delta, again, accumulated = bands(efficient_backward(kernel(shape, shape)))
    assert product == exactly(batch * heads * queries * 64 * 4)
    assert delta == again == exactly(batch * heads * queries * 4)
    assert accumulated.expected == seen
    assert accumulated.low <= seen <= accumulated.high
    half = efficient_backward(kernel(shape, shape, dtype=dtypes.bfloat16))
    assert bands(half) == [delta, accumulated]


@pytest.mark.parametrize(
    ("rows", "columns", "blocks"),
    [
        (64 * 1024, 96, 0),
        (200_704, 96, 200_704 // 32),
        (4_000_000, 96, 32 * 1024 // 3),  # the largest grid
        (200_704, 32 * 66, 0),  # columns alone fill half of the multiprocessors
    ],
)
def test_layer_norm_keeps_partial_sums_of_many_short_rows(rows: int, columns: int, blocks: int) -> None:
    taken = layer_norm_partial_sums(kernel((rows, columns), (columns,), (columns,)))
    partial = Temporary(exactly(blocks * columns * 4), "layer_norm backward: partial sums")
    assert taken == ([partial, partial, Reduction((blocks, columns), (columns, 1), (0,))] if blocks else [])


def test_layer_norm_of_older_versions_keeps_none() -> None:
    assert layer_norm_partial_sums(kernel((200_704, 96), (96,), torch=(2, 7))) == []


def test_softmax_backward_multiplies_first() -> None:
    """SoftMax.cu: `Tensor tmp = grad * output`, float32 where half was computed in float32."""
    name, scores = "aten._softmax_backward_data.default", (2, 8, 128, 128)
    taken = softmax_temporaries(kernel(scores, name=name, forward=[form(scores)]))
    assert bands(taken) == [exactly(2 * 8 * 128 * 128 * 4)]
    half = kernel(scores, name=name, forward=[form(scores)], dtype=dtypes.float16)
    assert bands(softmax_temporaries(half)) == bands(taken)
    assert softmax_temporaries(kernel(scores, name="aten._softmax.default", phase="forward")) == []
    assert softmax_temporaries(kernel(scores, name="aten._softmax.default")) == []  # a checkpoint's, in the backward


def test_safe_softmax_masks_a_softmax() -> None:
    """attention.cpp: `where(all(isneginf(self)), 0, softmax(self))`."""
    taken = softmax_temporaries(kernel((4, 100), name="aten._safe_softmax.default", phase="forward"))
    assert bands(taken) == [exactly(1600), exactly(400)]


def test_coefficients_of_group_norm() -> None:
    """A reading on a B200: 114,688 bytes of 128 samples of 64 channels in 16 groups, in the backward."""
    name, made = "aten.native_group_norm_backward.default", [form((128, 64, 8, 64)), form((128, 16)), form((128, 16))]
    shapes = made[0].shape, (64,), (64,)
    taken = group_norm_temporaries(kernel(*shapes, name=name, forward=made))
    assert [band.expected for band in bands(taken)] == [32768, 32768, 8192, 8192, 32768]
    assert sum(band.expected for band in bands(taken)) == 114_688
    frozen = group_norm_temporaries(kernel((64,), (64,), name=name, forward=made))  # no gradient of the input
    assert [band.expected for band in bands(frozen)] == [32768, 32768]
    pixel = [form((128, 64)), *made[1:]]
    taken = group_norm_temporaries(kernel((128, 64), (64,), name=name, forward=pixel))
    assert [band.expected for band in bands(taken)] == [32768, 32768, 8192, 8192]
    forward = "aten.native_group_norm.default"
    assert [band.expected for band in bands(group_norm_temporaries(kernel(*shapes, name=forward, forward=made)))] == [
        32768, 32768,
    ]  # fmt: skip


def test_group_norm_in_channels_last_sums_rows_of_pixels() -> None:
    shape = (2, 4, 6, 8)
    out = form_of(shape, channels_last_strides(shape), dtypes.bfloat16)
    made = [out, form((2, 2)), form((2, 2))]
    name = "aten.native_group_norm_backward.default"
    taken = group_norm_temporaries(kernel(shape, (4,), name=name, forward=made, dtype=dtypes.bfloat16))
    rows = 6  # the largest factor of 48 that is at most its root
    assert Temporary(exactly(2 * 4 * rows * 2 * 4), "group_norm coefficients", held=False) in taken


@pytest.mark.parametrize("indices", [1, 3072])
def test_few_indices_are_not_sorted(indices: int) -> None:
    assert embedding_backward(kernel((30000, 768), indices=indices)) == []


def test_an_embedding_of_many_indices() -> None:
    n, rows, width = 4096, 30522, 768
    sort, segments = bands(embedding_backward(kernel((rows, width), indices=n)))
    assert sort.expected == 4 * 8 * n
    assert segments == Band(409 * width * 4, (409 + n) * width * 4, (409 + n) * width * 4)
    _, segments = bands(embedding_backward(kernel((2, width), indices=n)))
    assert segments.expected == (409 + 2) * width * 4


def test_ctc_makes_a_second_table_in_its_backward() -> None:
    """native/cuda/LossCTC.cu: three tensors of a number for each sample in int64, and log_beta like log_alpha."""
    losses, log_alpha = form((8,)), form((8, 400, 121))
    taken = ctc_temporaries(kernel((8,), (8, 400, 121), name="aten._ctc_loss.default"))
    assert bands(taken) == [exactly(64)] * 3
    backward = kernel((400, 8, 64), forward=(losses, log_alpha), name="aten._ctc_loss_backward.default")
    assert bands(ctc_temporaries(backward)) == [*[exactly(64)] * 3, exactly(log_alpha.nbytes)]


def test_sorts() -> None:
    assert bands(index_put_sort(kernel((100,), indices=1000))) == [exactly(32000)]
    assert index_put_sort(kernel((100,), indices=1000, phase="forward")) == []
    assert sort_buffers(kernel((4096,))) == sort_buffers(kernel(())) == []
    assert bands(sort_buffers(kernel((8192,)))) == [Band(8192 * 4, 8192 * 20, 8192 * 24)]


def test_recurrent_layers_have_a_band_around_the_gates_of_one_layer() -> None:
    # 2 layers of an LSTM: the reserve has 5 values for each of the result's, in each layer
    assert bands(recurrent_workspace(kernel(forward=[form((250,)), form((125,)), form((2500,))]))) == [
        Band(0, 4000, 10_000)
    ]
    inference = [form((250,)), form((0,))]  # no reserve
    assert bands(recurrent_workspace(kernel(forward=inference))) == [Band(0, 4000, 4000)]
    assert recurrent_workspace(kernel()) == []


def test_a_workspace_stands_in_the_family_that_names_the_kernel() -> None:
    """Else the family might not be imported when the trace is read."""
    rules()
    assert "aten.relu.default" not in WORKSPACES
    texts = {family: (FOLDER / f"{family}.py").read_text("utf-8") for family in FAMILIES}
    for kernel, rule in WORKSPACES.items():
        family = rule.function.__module__.rsplit(".", 1)[1]
        assert [name for name, text in texts.items() if kernel in text] == [family]


def test_a_kernel_has_one_workspace() -> None:
    rules()
    with pytest.raises(ValueError, match=r"two workspaces of aten\.sort\.default"):
        workspace("aten.sort.default")(sort_buffers)
