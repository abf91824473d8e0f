"""Buffers of reductions: what PyTorch 2.14 allocated on a stub of a card with 132 multiprocessors of 2,048 threads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticmem.devices.reductions import Multiprocessors, reduction_buffer

CARD = Multiprocessors(132, 2048)


@pytest.mark.parametrize(
    ("rows", "columns", "seen"),
    [
        (3152, 3072, (78_643_200, 96)),  # bias gradients of ViT-B/16 at batch 16: the MLP, q, k and v, the projection
        (3152, 2304, (58_982_400, 72)),
        (3152, 768, (19_660_800, 24)),
        (2048, 3072, (50_331_648, 96)),  # of GPT-2, batch 4, sequence 512
        (2048, 2304, (37_748_736, 72)),
        (2048, 768, (12_582_912, 24)),
    ],
)
def test_sums_over_rows(rows: int, columns: int, seen: tuple[int, int]) -> None:
    assert reduction_buffer((rows, columns), (columns, 1), (0,), CARD) == seen


def test_dimensions_that_lie_behind_one_another_are_one() -> None:
    flat = reduction_buffer((3152, 768), (768, 1), (0,), CARD)
    assert reduction_buffer((16, 197, 768), (197 * 768, 768, 1), (0, 1), CARD) == flat
    assert reduction_buffer((16, 1, 197, 12, 64), (197 * 768, 768, 768, 64, 1), (0, 1, 2), CARD) == flat


def test_along_the_fastest_dimension_a_block_keeps_one_value() -> None:
    """By hand, for the bias of a convolution in NCHW: 16 x 12,544 inputs of each of 64 results. A block is 32 x 16
    threads; each sums 392 values, so that inputs are split: at least in ceil(528 / 64) = 9, of at most 25."""
    shape, strides = (16, 64, 112, 112), (64 * 12544, 12544, 112, 1)
    assert reduction_buffer(shape, strides, (0, 2, 3), CARD) == (4 * 64 * 9, 4 * 64)


def test_channels_last_has_vectors_in_the_buffer() -> None:
    nchw = reduction_buffer((16, 64, 112, 112), (64 * 12544, 12544, 112, 1), (0, 2, 3), CARD)
    nhwc = reduction_buffer((16, 64, 112, 112), (64 * 12544, 1, 112 * 64, 64), (0, 2, 3), CARD)
    assert nhwc[0] > 100 * nchw[0]


def test_small_sums_need_nothing() -> None:
    assert reduction_buffer((32, 1000), (1000, 1), (0,), CARD) == (0, 0)
    assert reduction_buffer((), (), (), CARD) == (0, 0)
    assert reduction_buffer((0, 8), (8, 1), (0,), CARD) == (0, 0)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.data())
def test_bytes_are_of_whole_vectors_and_a_smaller_card_needs_no_more(shape: list[int], data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(len(shape))), unique=True, min_size=1))
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    large, small = (
        reduction_buffer(tuple(shape), tuple(strides), tuple(axes), Multiprocessors(n, 2048)) for n in (132, 16)
    )
    for buffer, semaphores in (large, small):
        assert (buffer == 0) == (semaphores == 0)
        assert buffer % 4 == 0
    if small[0] and large[0]:
        assert small[0] <= large[0]
