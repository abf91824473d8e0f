"""Layouts against PyTorch itself, on random shapes and strides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmem.eager import strides as layout

pytestmark = pytest.mark.torch
torch: Any = pytest.importorskip("torch")

SIZES = st.integers(min_value=1, max_value=4)
SHAPES = st.lists(SIZES, min_size=0, max_size=5).map(tuple)


@st.composite
def laid_out(draw: Any, shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES) -> Any:
    """A tensor that is a permutation of a contiguous one, with some dimensions expanded, sliced or padded."""
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    padded = [size * draw(st.sampled_from([1, 1, 1, 2])) for size in shape]
    base = torch.empty([padded[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    for dim, size in enumerate(shape):
        way = draw(st.sampled_from(["slice", "slice", "expand"]))
        base = base.narrow(dim, 0, size) if way == "slice" else base.narrow(dim, 0, 1).expand(
            [size if i == dim else -1 for i in range(len(shape))]
        )  # fmt: skip
    return base


@given(laid_out())
@settings(deadline=None, max_examples=300)
def test_tests_of_a_layout(tensor: Any) -> None:
    shape, strides = tuple(tensor.shape), tensor.stride()
    assert layout.is_contiguous(shape, strides) == tensor.is_contiguous()
    assert layout.is_dense(shape, strides) == torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if tensor.ndim == 4:
        last = torch.channels_last
        assert layout.is_channels_last_contiguous(shape, strides) == tensor.is_contiguous(memory_format=last)
        assert layout.prefers_channels_last(shape, strides) == torch.ops.aten.is_strides_like_format(tensor, last)
    if tensor.ndim == 5:
        last = torch.channels_last_3d
        assert layout.is_channels_last_contiguous(shape, strides) == tensor.is_contiguous(memory_format=last)
        assert layout.prefers_channels_last(shape, strides) == torch.ops.aten.is_strides_like_format(tensor, last)


@st.composite
def images(draw: Any) -> Any:
    """Channels last with one stride that is another, or nearly so: what random layouts hardly ever are."""
    shape = tuple(draw(st.lists(SIZES, min_size=4, max_size=5)))
    strides = list(layout.channels_last_strides(shape))
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        strides[dim] = max(strides[dim] + draw(st.integers(-3, 3)), 0)
    return torch.empty_strided(shape, strides)


@given(images())
@settings(deadline=None, max_examples=300)
def test_images_prefer_channels_last_where_pytorch_says_so(tensor: Any) -> None:
    shape, strides = tuple(tensor.shape), tensor.stride()
    last = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    assert layout.is_channels_last_contiguous(shape, strides) == tensor.is_contiguous(memory_format=last)
    assert layout.prefers_channels_last(shape, strides) == torch.ops.aten.is_strides_like_format(tensor, last)


@given(SHAPES)
@settings(deadline=None)
def test_strides_of_new_tensors(shape: tuple[int, ...]) -> None:
    assert layout.contiguous_strides(shape) == torch.empty(shape).stride()
    for rank, kind in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if len(shape) == rank:
            expected = torch.empty(shape, memory_format=kind).stride()
            assert layout.channels_last_strides(shape) == expected


@given(laid_out())
@settings(deadline=None, max_examples=300)
def test_empty_like_preserves_the_format(tensor: Any) -> None:
    assert layout.dense_like(tuple(tensor.shape), tensor.stride()) == torch.empty_like(tensor).stride()


@given(laid_out(), st.data())
@settings(deadline=None, max_examples=400)
def test_a_view_is_possible_exactly_where_pytorch_makes_one(tensor: Any, data: st.DataObject) -> None:
    rest = tensor.numel()
    target: list[int] = []
    while rest > 1 or not target:
        size = data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        target.append(size)
        rest //= size
        if len(target) == 5:
            target.append(rest)
            break
    ours = layout.view_strides(tuple(tensor.shape), tensor.stride(), tuple(target))
    try:
        theirs = tensor.view(target).stride()
    except RuntimeError:
        theirs = None
    assert ours == theirs


@st.composite
def operands(draw: Any) -> list[Any]:
    """Two or three tensors that broadcast."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=4).map(tuple))

    def shrunk() -> st.SearchStrategy[tuple[int, ...]]:
        lead = draw(st.integers(min_value=0, max_value=len(shape)))
        return st.tuples(*(st.sampled_from([1, size, size]) for size in shape[lead:]))

    return [draw(laid_out(shrunk())) for _ in range(draw(st.integers(min_value=1, max_value=3)))]


@given(operands())
@settings(deadline=None, max_examples=400)
def test_layout_of_an_elementwise_result(tensors: list[Any]) -> None:
    shapes = [tuple(t.shape) for t in tensors]
    theirs = {1: torch.neg, 2: torch.add, 3: torch.addcmul}[len(tensors)](*tensors)
    ours = layout.broadcast_shapes(*shapes)
    assert ours == tuple(theirs.shape)
    found = layout.pointwise_strides(ours, tuple((s, t.stride()) for s, t in zip(shapes, tensors, strict=True)))
    assert found == theirs.stride()


Layout = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.mark.parametrize(
    "given",
    [
        (((4, 1, 6), (1, 7, 4)),) * 2,  # all alike and dense: as they are, also where a size of 1 makes it say nothing
        (((1, 4, 6), (5, 1, 4)),) * 2,
        (((4, 1, 6), (1, 7, 4)), ((4, 1, 6), (1, 9, 4))),
        (((4, 1, 6), (6, 99, 1)),) * 2,  # contiguous: made anew
        (((2, 1, 3, 3), (9, 9, 3, 1)), ((2, 1, 3, 3), (9, 1, 3, 1))),  # both contiguous, and not alike: the same
        (((2, 3, 1, 5), (15, 1, 99, 3)),) * 2,
        (((4,), (1,)), ((2, 3, 4), (1, 2, 6))),  # a missing dimension decides nothing
        (((3, 4), (1, 3)), ((2, 3, 4), (12, 4, 1))),
        (((1, 4), (1, 1)), ((3, 4), (1, 3))),  # nor does one that is broadcast
    ],
)
def test_layout_of_a_result_of_these_operands(given: tuple[Layout, Layout]) -> None:
    theirs = torch.add(*(torch.empty_strided(*operand) for operand in given))
    shape = layout.broadcast_shapes(*(shape for shape, _ in given))
    assert layout.pointwise_strides(shape, given) == theirs.stride()


@given(laid_out(), st.lists(SIZES, max_size=2))
@settings(deadline=None)
def test_strides_of_an_expanded_view(tensor: Any, lead: list[int]) -> None:
    target = (*lead, *(size if size != 1 else 3 for size in tensor.shape))
    expected = tensor.expand(target).stride()
    assert layout.expand_strides(tuple(tensor.shape), tensor.stride(), target) == expected


def test_sizes_that_do_not_broadcast() -> None:
    with pytest.raises(ValueError, match="do not broadcast"):
        layout.broadcast_shapes((2, 3), (4,))
