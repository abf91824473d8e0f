"""Closed forms of what kernels allocate: values worked out by hand from the sources that the module names."""

from __future__ import annotations

import pytest

from staticmem.devices import temporaries as t
from staticmem.units import Band, exactly


def test_flash_backward_rounds_queries_and_head() -> None:
    # 8 x 12 heads, 512 queries, head 64: row sums and the float32 query gradient
    rows = 8 * 12 * 512 * 4
    assert t.flash_backward(8, 12, 512, 512, 64, 12, 2) == (exactly(rows), exactly(rows * 64))
    # 100 queries count as 128, a head of 72 as 96
    assert t.flash_backward(1, 1, 100, 100, 72, 1, 2) == (exactly(128 * 4), exactly(128 * 96 * 4))


def test_flash_backward_expands_keys_of_grouped_queries() -> None:
    expanded = exactly(256 * 32 * 64 * 2)
    assert t.flash_backward(1, 32, 128, 256, 64, 8, 2)[2:] == (expanded, expanded)
    assert t.flash_backward(1, 32, 128, 256, 64, 32, 2)[2:] == ()


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "seen"),
    [(16, 12, 197, 12_595_200), (4, 12, 512, 6_297_600)],  # PyTorch 2.14 on a stub: ViT-B/16, GPT-2
)
def test_the_query_gradient_of_efficient_backward(batch: int, heads: int, queries: int, seen: int) -> None:
    product, delta, again, accumulated = t.efficient_backward(batch, heads, queries, 64, 4)
    assert product == exactly(batch * heads * queries * 64 * 4)
    assert delta == again == exactly(batch * heads * queries * 4)
    assert accumulated.expected == seen
    assert accumulated.low <= seen <= accumulated.high
    assert t.efficient_backward(batch, heads, queries, 64, 2) == (delta, accumulated)


def test_layer_norm_keeps_partial_sums_of_many_short_rows() -> None:
    assert t.layer_norm_blocks(64 * 1024, 96, 132) == 0
    assert t.layer_norm_blocks(200_704, 96, 132) == 200_704 // 32
    assert t.layer_norm_blocks(4_000_000, 96, 132) == 32 * 1024 // 3  # the largest grid
    assert t.layer_norm_blocks(200_704, 32 * 66, 132) == 0  # columns alone fill half of the multiprocessors


@pytest.mark.parametrize("indices", [1, 3072])
def test_few_indices_are_not_sorted(indices: int) -> None:
    assert t.embedding_sort(indices) == exactly(0)
    assert t.embedding_segments(indices, 30000, 768) == exactly(0)


def test_an_embedding_of_many_indices() -> None:
    n, rows, width = 4096, 30522, 768
    assert t.embedding_sort(n).expected == 4 * 8 * n
    assert t.embedding_segments(n, rows, width) == Band(409 * width * 4, (409 + n) * width * 4, (409 + n) * width * 4)
    assert t.embedding_segments(n, 2, width).expected == (409 + 2) * width * 4


def test_sorts() -> None:
    assert t.index_put_accumulate(1000) == exactly(32000)
    assert t.sort(4096, 4096, 4) == exactly(0)
    assert t.sort(8192, 8192, 4).expected == 8192 * 12


def test_recurrent_layers_have_a_band_around_the_gates_of_one_layer() -> None:
    # 2 layers of an LSTM: the reserve has 5 values for each of the result's, in each layer
    assert t.recurrent(1000, 10_000) == Band(0, 4000, 10_000)
    assert t.recurrent(1000, 0) == Band(0, 4000, 4000)  # inference has no reserve
    assert t.recurrent(0, 0) == exactly(0)
