"""Facts of rules that are counted by hand: found missing by scripts/faults/mutants.py."""

from __future__ import annotations

import our_side
import pytest
from observe import Case, Observation, call, f, i

from staticmem.eager.context import Eager
from staticmem.eager.tensor import Tensor
from staticmem.ir import dtypes
from staticmem.ops.indexing import index, take_along_dim
from staticmem.ops.rearranging import repeat_interleave
from staticmem.ops.registry import function_of


def observed(case: Case) -> Observation:
    return our_side.run(case, case.patterns()[0])


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ((5,), (5, 3, 4)),
        ((None, 5), (2, 5, 4)),
        ((None, None, 5), (2, 3, 5)),
        ((None, 5, 5), (2, 5)),
        ((5, None, 5), (5, 3)),  # not adjacent: what is picked comes first, as in NumPy
    ],
)
def test_where_picked_elements_stand(given: tuple[int | None, ...], shape: tuple[int, ...]) -> None:
    e = Eager()
    e.trace.begin("forward")
    indices: list[Tensor | None] = [None if size is None else e.empty((size,), dtypes.int64) for size in given]
    assert index(e, e.empty((2, 3, 4), dtypes.float32), indices).shape == shape


def test_a_change_in_place_is_a_kernel() -> None:
    e = Eager()
    e.trace.begin("forward")
    made = e.empty((4,), dtypes.float32)
    for target in ("relu_", "exp_", "neg_"):
        kernels = len(e.trace.kernels)
        assert function_of(f"aten::{target}")(e, made) is made
        assert [kernel.name for kernel in list(e.trace.kernels)[kernels:]] == [f"aten.{target}.default"]


def test_the_order_of_a_norm_is_two_where_nobody_says_another() -> None:
    """A norm of order 2 keeps the input and its result; that of another order makes powers for its gradient."""
    default, two, three = (observed(call("aten::norm", f(4, 3), *order)) for order in ((), (2,), (3,)))
    assert (default.backward, default.saved) == (two.backward, two.saved)
    assert default.backward != three.backward
    none = observed(call("aten::norm", f(4, 3), None))
    assert (none.backward, none.saved) == (two.backward, two.saved)


def test_the_kernel_of_a_loss_says_whether_there_are_positions() -> None:
    for shape, target, name in (((4, 7), (4,), "nll_loss"), ((2, 7, 4, 5), (2, 4, 5), "nll_loss2d")):
        e = Eager()
        e.trace.begin("forward")
        function_of("aten::nll_loss_nd")(e, e.empty(shape, dtypes.float32), e.empty(target, dtypes.int64))
        assert f"aten.{name}_forward.default" in {kernel.name for kernel in e.trace.kernels}


def test_a_root_mean_square_norm_gives_its_weight_a_gradient() -> None:
    seen = observed(call("aten::rms_norm", f(4, 6), (6,), f(6)))
    by_input, by_weight = seen.grads["in0"], seen.grads["in1"]
    assert by_input is not None
    assert by_weight is not None
    assert (by_input.shape, by_weight.shape) == ((4, 6), (6,))
    assert observed(call("aten::embedding", f(5, 3), i(2))).grads["in0"] is not None


def batch_norm(shape: tuple[int, ...], exported: bool, training: bool = True) -> tuple[str, list[tuple[int, ...]]]:
    """The kernel of a batch norm, and the sizes of what it makes. `exported`: in train(), as the file says."""
    e = Eager(training=training)
    e.trace.begin("forward")
    x, channels = e.empty(shape, dtypes.float32), [e.empty((shape[1],), dtypes.float32) for _ in range(4)]
    before = len(e.trace.buffers)
    function_of("aten::batch_norm")(e, x, *channels, exported)
    return e.trace.kernels[-1].name.split(".")[1], [b.shape for b in e.trace.buffers[before:]]


@pytest.mark.parametrize(
    ("shape", "training", "kernel"),
    [
        ((2, 4), True, "native_batch_norm"), ((2, 4, 5), True, "cudnn_batch_norm"),
        ((1, 4, 5), True, "cudnn_batch_norm"), ((0, 4, 5), True, "cudnn_batch_norm"),
        ((880801, 1, 1), True, "cudnn_batch_norm"), ((880802, 1, 1), True, "native_batch_norm"),
        ((65535, 1, 1), False, "cudnn_batch_norm"), ((65536, 1, 1), False, "native_batch_norm"),
    ],
)  # fmt: skip
def test_which_batch_norm_is_cudnns(shape: tuple[int, ...], training: bool, kernel: str) -> None:
    """aten/src/ATen/native/Normalization.cpp, `_select_batch_norm_backend`: the largest batches are not."""
    assert batch_norm(shape, training, training)[0] == kernel


def test_a_model_in_eval_that_was_exported_in_train() -> None:
    assert batch_norm((2, 4, 5), True, False)[1] == [(2, 4, 5), (0,), (0,), (0,)]
    assert batch_norm((2, 4, 5), True, True)[1] == [(2, 4, 5), (4,), (4,), (0,)]


def test_batch_norm_copies_a_gradient_only_for_cudnn_in_training() -> None:
    image, channel = f(2, 4, 5, 6).channels_last, (f(4), f(4), f(4).fixed, f(4).fixed)
    for rest in ((*channel, False), (f(4), None, f(4).fixed, f(4).fixed, True)):
        cases = [call("aten::batch_norm", image, *rest, 0.1, 1e-5, True, root=root) for root in ("contiguous", "like")]
        found = [len(observed(case).backward) for case in cases]
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("target", "rest", "axes", "kernel"),
    [
        ("mean", (), (0, 1, 2), "aten.mean.default"),
        ("mean", (1,), (1,), "aten.mean.dim"),
        ("mean", ((0, -1), True), (0, 2), "aten.mean.dim"),
        ("sum", (), (0, 1, 2), "aten.sum.dim_IntList"),  # `sum.default` calls it with all dimensions
        ("sum", ((0, 2),), (0, 2), "aten.sum.dim_IntList"),
    ],
)
def test_a_reduction_says_what_it_reduces(
    target: str, rest: tuple[object, ...], axes: tuple[int, ...], kernel: str
) -> None:
    """The buffer of CUDA's reduction depends on the layout of its input and on the axes that go."""
    e = Eager()
    e.trace.begin("forward")
    x = e.empty((2, 3, 4), dtypes.float32, (12, 1, 3))
    function_of(f"aten::{target}")(e, x, *rest)
    assert e.trace.reads == {e.running: (((2, 3, 4), (12, 1, 3), axes),)}
    assert e.trace.kernels[e.running].name == kernel


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_what_is_taken_along_a_dimension_is_broadcast_over_the_others(axis: int) -> None:
    """torch.take_along_dim of (2, 1, 4) and (1, 3, 1): the axis keeps each one's own size."""
    e = Eager()
    e.trace.begin("forward")
    sizes = [2, 3, 4]
    sizes[axis] = (1, 3, 1)[axis]
    taken = take_along_dim(e, e.empty((2, 1, 4), dtypes.float32), e.empty((1, 3, 1), dtypes.int64), axis)
    assert taken.shape == tuple(sizes)


def test_one_hot_has_one_more_dimension() -> None:
    e = Eager()
    e.trace.begin("forward")
    made = function_of("aten::one_hot")(e, e.empty((2, 3), dtypes.int64), 7)
    assert (made.shape, made.dtype) == ((2, 3, 7), dtypes.int64)


def test_a_repetition_by_a_tensor_has_the_size_that_is_given() -> None:
    e = Eager()
    e.trace.begin("forward")
    repeated = repeat_interleave(e, e.empty((3, 2), dtypes.float32), e.empty((3,), dtypes.int64), 0, output_size=5)
    assert repeated.shape == (5, 2)
    with pytest.raises(ValueError, match="output_size"):
        repeat_interleave(e, e.empty((3, 2), dtypes.float32), e.empty((3,), dtypes.int64), 0)
