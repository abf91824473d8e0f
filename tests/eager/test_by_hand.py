"""Facts of layouts, dtypes and levels that are counted by hand: found missing by scripts/faults/mutants.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from staticmem.eager import strides
from staticmem.eager.calls import Effects
from staticmem.eager.context import Eager
from staticmem.eager.strides import form_of
from staticmem.eager.trace import Convolution, Copies, Reduction, round_up
from staticmem.ir import dtypes
from staticmem.ops.pointwise import scalar_dtype
from staticmem.scenario.request import Request
from staticmem.studies.study import Study

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("shape", "layout", "bits", "size"),
    [
        ((2, 3), (3, 1), 32, 24),
        ((2, 3), (0, 1), 32, 12),  # expanded: one row
        ((2, 2), (8, 1), 16, 20),  # a view: elements 0, 1, 8, 9
        ((3,), (1,), 4, 2),  # three halves of a byte
        ((), (), 64, 8),
        ((4, 0), (1, 1), 32, 0),
    ],
)
def test_bytes_from_the_first_to_behind_the_last(
    shape: tuple[int, ...], layout: tuple[int, ...], bits: int, size: int
) -> None:
    assert strides.storage_bytes(shape, layout, bits) == size


@pytest.mark.parametrize(
    ("shape", "layout", "found"),
    [
        ((2, 3, 4, 5), (60, 1, 15, 3), True),
        ((2, 3, 4, 5), (60, 20, 5, 1), False),
        ((2, 3, 4, 5, 6), (360, 1, 90, 18, 3), True),
        ((2, 3, 4, 5, 6), (360, 120, 30, 6, 1), False),
        ((2, 3, 4), (12, 1, 3), False),  # there is none with three dimensions
        ((2, 3, 4, 5, 6, 7), (2520, 1, 630, 126, 21, 3), False),
    ],
)
def test_channels_last(shape: tuple[int, ...], layout: tuple[int, ...], found: bool) -> None:
    assert strides.is_channels_last_contiguous(shape, layout) is found


def test_a_number_and_a_tensor() -> None:
    """c10's `result_type`: only a number of a higher kind changes the dtype."""
    e = Eager()
    e.trace.begin("forward")
    whole, real, truth = (e.empty((2,), kind) for kind in (dtypes.int32, dtypes.float16, dtypes.bool_))
    assert scalar_dtype(whole, True) == dtypes.int32
    assert scalar_dtype(truth, True) == dtypes.bool_
    assert scalar_dtype(whole, 2) == dtypes.int32
    assert scalar_dtype(whole, 2.0) == dtypes.float32
    assert scalar_dtype(real, 2.0) == dtypes.float16
    assert scalar_dtype(truth, 2) == dtypes.int64


def test_the_level_before_each_tick() -> None:
    found = Study.open(str(ROOT / "models" / "seed.pt2"), Request(optimizer="sgd")).lifetimes
    assert found.level_before(0) == 0
    assert found.live[0] > 0
    assert [found.level_before(tick) for tick in range(1, len(found.live) + 1)] == list(found.live)


def test_the_gradient_of_a_real_part_is_every_second_number() -> None:
    """`handle_r_to_c` takes `real(grad)`: a view of the complex one, whose strides count its halves."""
    from staticmem.eager.autograd import cast_gradient

    e = Eager()
    e.trace.begin("backward")
    made = e.empty((3, 4), dtypes.complex64)
    part = cast_gradient(e, made, dtypes.float32)
    assert part.storage is made.storage
    assert (part.shape, part.strides, part.dtype) == ((3, 4), (8, 2), dtypes.float32)
    assert e.trace.buffers[made.storage.id].size == round_up(3 * 4 * 8)


def test_what_a_repeated_call_says_of_its_kernels() -> None:
    """They have the numbers that they get in the step."""
    e = Eager()
    e.trace.begin("forward")
    e.kernel("before")
    summed = Reduction((4, 4), (4, 1), (0,))
    image, window = form_of((1, 3, 8, 8), (192, 64, 8, 1), dtypes.float32), form_of((3, 1), (1, 1), dtypes.float32)
    convolved = Convolution(image, window, image, (1, 1), (0, 0), (1, 1), 1, False)
    Effects(("a", "b", "c"), (), (), 0, ((1, (summed, Copies((64,)))), (0, (convolved,)))).repeat(e)
    assert e.trace.kernels.names == ["before", "a", "b", "c"]
    assert e.trace.reads == {2: (summed, Copies((64,))), 1: (convolved,)}


def test_the_number_of_elements() -> None:
    assert strides.numel(()) == 1
    assert strides.numel((3, 4, 5)) == 60
    assert strides.numel((3, 0)) == 0


def test_the_gradient_of_a_bias_is_summed_over_all_but_channels() -> None:
    """`grad_bias = grad.sum((0, 2, 3))` of convolution_backward (ConvUtils.h); CUDA's sum needs memory of its own."""
    result = Study.open(str(ROOT / "models" / "vgg16.pt2"), Request(optimizer="sgd")).result
    axes = {
        read.axes
        for reads in result.trace.reads.values()
        for read in reads
        if isinstance(read, Reduction) and len(read.shape) == 4
    }
    assert (0, 2, 3) in axes
    assert all(1 not in some for some in axes)
