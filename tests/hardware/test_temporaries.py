"""Closed forms of what kernels allocate: values worked out by hand from the sources that the module names."""

from __future__ import annotations

import pytest

from staticmem.hardware import temporaries as t
from staticmem.hardware.band import Band, exactly


def test_flash_backward_rounds_queries_and_head() -> None:
    # 8 x 12 heads, 512 queries, head 64: row sums and the float32 query gradient
    rows = 8 * 12 * 512 * 4
    assert t.flash_backward(8, 12, 512, 512, 64, 12, 2) == exactly(rows + rows * 64)
    # 100 queries count as 128, a head of 72 as 96
    assert t.flash_backward(1, 1, 100, 100, 72, 1, 2) == exactly(128 * 4 + 128 * 96 * 4)


def test_flash_backward_expands_keys_of_grouped_queries() -> None:
    plain = t.flash_backward(1, 32, 128, 256, 64, 32, 2).expected
    assert t.flash_backward(1, 32, 128, 256, 64, 8, 2).expected - plain == 2 * 256 * 32 * 64 * 2


def test_efficient_backward_is_a_query_gradient_and_delta() -> None:
    low, expected, high = t.efficient_backward(2, 12, 512, 64)
    delta = 2 * 12 * 512 * 4
    assert (low, expected, high) == (delta, delta + delta * 64, delta + delta * 128)


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
