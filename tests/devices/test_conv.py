"""Convolutions as cuDNN gets them: sizes, passes, forms of workspace, and which library runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticmem.devices.conv import BACKWARD_DATA, BACKWARD_FILTER, FORWARD, PASSES, Convolution, passes_of, precision_of
from staticmem.devices.conv_tables import FEATURES, Form, features, form_bytes, parse_form
from staticmem.devices.conv_workspace import runs_on_cudnn, workspace
from staticmem.eager import trace
from staticmem.eager.autograd import run_backward
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import channels_last_strides, contiguous_strides, form_of
from staticmem.eager.tensor import Owner, Tensor
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ops import lookup
from staticmem.ops.convolution import conv, conv_transpose
from staticmem.ops.views import permute
from staticmem.units import NOTHING, exactly

CONV = Convolution(FORWARD, "tf32", False, (32, 64, 56, 56), (128, 64, 3, 3), (2, 2), (1, 1), (1, 1))
DEPTHWISE = replace(CONV, w=(64, 1, 3, 3), groups=64)


def test_sizes_of_the_result() -> None:
    assert CONV.y == (32, 128, 28, 28)
    assert replace(CONV, dilation=(2, 2), padding=(2, 2), stride=(1, 1)).y == (32, 128, 56, 56)


@pytest.mark.parametrize(
    "change", [{"x": (32, 63, 56, 56)}, {"groups": 3}, {"stride": (1,)}, {"x": (32, 64, 56)}, {"w": (128, 64, 3)}]
)
def test_a_convolution_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"channels|spatial|numbers"):
        replace(CONV, **change)


def test_precisions() -> None:
    assert precision_of("float32") == "tf32"
    assert precision_of("float32", allow_tf32=False) == "float32"
    assert precision_of("bfloat16") == "bfloat16"
    with pytest.raises(UsageError):
        precision_of("int8")


def call(
    x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], numbers: tuple[tuple[int, ...], ...], groups: int = 1,
    dtype: DType = dtypes.float32, strides: Callable[[tuple[int, ...]], tuple[int, ...]] = contiguous_strides,
    **more: Any,
) -> trace.Convolution:  # fmt: skip
    input, weight, result = (form_of(shape, strides(shape), dtype) for shape in (x, w, y))
    stride, padding, dilation = numbers
    return trace.Convolution(input, weight, result, stride, padding, dilation, groups, **{"transposed": False, **more})


NUMBERS = ((2, 2), (1, 1), (1, 1))
CALL = call(CONV.x, CONV.w, CONV.y, NUMBERS)


def test_what_a_trace_says_of_a_convolution() -> None:
    assert passes_of(CALL, channels_last=False) == (CONV,)
    both = CALL._replace(gradients=(True, True))
    of_filter = replace(CONV, direction=BACKWARD_FILTER)
    assert passes_of(both, channels_last=False) == (replace(CONV, direction=BACKWARD_DATA), of_filter)
    assert passes_of(CALL._replace(gradients=(False, True)), False) == (of_filter,)
    assert passes_of(CALL._replace(gradients=(False, False)), False) == ()


def test_the_layout_is_that_of_input_or_weight() -> None:
    last = call(CONV.x, CONV.w, CONV.y, NUMBERS, dtype=dtypes.float16, strides=channels_last_strides)
    (found,) = passes_of(last, channels_last=False)
    assert (found.precision, found.channels_last) == ("float16", True)
    (mixed,) = passes_of(CALL._replace(weight=last.weight), channels_last=False)
    assert mixed.channels_last
    (moved,) = passes_of(CALL, channels_last=True)
    assert moved == replace(CONV, channels_last=True)


def test_what_cudnn_does_not_convolve() -> None:
    assert passes_of(call(CONV.x, CONV.w, CONV.y, NUMBERS, dtype=dtypes.int8), False) == ()
    assert passes_of(call((0, *CONV.x[1:]), CONV.w, (0, *CONV.y[1:]), NUMBERS), False) == ()
    assert passes_of(call(CONV.x, CONV.w, CONV.y, NUMBERS, groups=2), False) == ()


def test_a_transposed_convolution_runs_the_passes_of_the_one_that_it_transposes() -> None:
    up = call((4, 64, 8, 8), (64, 32, 2, 2), (4, 32, 16, 16), ((2, 2), (0, 0), (1, 1)), transposed=True)
    (forward,) = passes_of(up, channels_last=False)
    assert (forward.direction, forward.x, forward.y) == (BACKWARD_DATA, (4, 32, 16, 16), (4, 64, 8, 8))
    data, weight = passes_of(up._replace(gradients=(True, True)), channels_last=False)
    assert (data.direction, weight.direction) == (FORWARD, BACKWARD_FILTER)
    assert data.x == weight.x == forward.x


def test_one_dimension_runs_as_two() -> None:
    line = call((8, 4, 100), (16, 4, 3), (8, 16, 50), ((2,), (1,), (1,)))
    (found,) = passes_of(line, channels_last=True)
    assert (found.x, found.w, found.stride, found.padding) == ((8, 4, 1, 100), (16, 4, 1, 3), (1, 2), (0, 1))
    assert not found.channels_last


def recorded(run: Callable[[Eager, Tensor, Tensor], Tensor], x: tuple[int, ...], w: tuple[int, ...]) -> list[Any]:
    """What the trace says of the convolutions of a forward and its backward."""
    e = Eager()
    input, weight = e.empty(x, dtypes.float32), e.empty(w, dtypes.float32)
    weight.requires_grad = True
    e.trace.begin("forward")
    out = run(e, input, weight)
    e.trace.begin("backward")
    grads: dict[int, Tensor] = {}
    e.hold(weight, Owner(Reason.MODEL, "w"))
    run_backward(e, out, e.empty_like(out), grads)
    return [read for reads in e.trace.reads.values() for read in reads]


def test_the_rule_records_what_runs() -> None:
    """Arguments as ATen takes them: an int for all dimensions, words for a padding, no batch."""
    forward, backward = recorded(lambda e, x, w: conv(e, x, w, None, 1, "same", 2), (8, 9, 9), (16, 8, 3, 3))
    assert (forward.input.shape, forward.result.shape) == ((1, 8, 9, 9), (1, 16, 9, 9))
    assert (forward.stride, forward.padding, forward.dilation) == ((1, 1), (2, 2), (2, 2))
    assert (forward.gradients, backward.gradients) == (None, (False, True))
    assert backward._replace(gradients=None) == forward
    valid, _ = recorded(lambda e, x, w: conv(e, x, w, None, [2], "valid"), (1, 8, 9, 9), (16, 8, 3, 3))
    assert (valid.stride, valid.padding, valid.transposed) == ((2, 2), (0, 0), False)
    up, _ = recorded(lambda e, x, w: conv_transpose(e, x, w, None, 2, 1, 1, 4), (2, 8, 9), (8, 4, 3))
    assert (up.stride, up.padding, up.groups, up.transposed, up.result.shape) == ((2,), (1,), 4, True, (2, 16, 18))


def test_a_permuted_input_makes_the_network_behind_it_channels_last() -> None:
    """As ConvNeXt comes there, around its norms: (N, H, W, C) is permuted to (N, C, H, W)."""

    def network(e: Eager, x: Tensor, w: Tensor) -> Tensor:
        relu = lookup("aten::relu")
        assert relu is not None
        return conv(e, relu.function(e, conv(e, permute(e, x, (0, 3, 1, 2)), w)), w)

    reads = recorded(network, (2, 8, 8, 4), (4, 4, 1, 1))
    layouts = [conv.channels_last for read in reads for conv in passes_of(read, channels_last=False)]
    assert layouts == [True] * 5  # two forwards; both gradients of the second, the weight's of the first


# -- forms -----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["", "x", "y", "w", "xy", "xw", "yw", "xyw"]),
    st.sampled_from([1, 4, 8, 16]),
    st.none() | st.integers(-9, 30),
)
def test_a_form_survives_its_text(pieces: str, pad: int, step: int | None) -> None:
    form = Form(pieces, pad, step)
    assert parse_form(str(form)) == form


@pytest.mark.parametrize("text", ["", "yx", "x@", "q", "0^", "x@4^1.5"])
def test_a_text_that_is_no_form(text: str) -> None:
    with pytest.raises(ValueError, match="form"):
        parse_form(text)


def test_bytes_of_forms() -> None:
    x, w, y = 32 * 64 * 56 * 56 * 4, 128 * 64 * 9 * 4, 32 * 128 * 28 * 28 * 4
    assert form_bytes(CONV, Form("", 1, None)) == 0
    assert form_bytes(CONV, Form("xyw", 1, None)) == x + y + w
    assert form_bytes(CONV, Form("x", 1, 2)) == x + 2 * w
    stem = replace(CONV, precision="float16", x=(1, 3, 8, 8), w=(64, 3, 1, 1), stride=(1, 1), padding=(0, 0))
    assert form_bytes(stem, Form("x", 8, None)) == 8 * 64 * 2  # three channels count as eight


def test_features_have_names_and_depend_on_the_pass() -> None:
    seen = {features(replace(CONV, direction=direction)) for direction in PASSES}
    assert len(seen) == 3
    assert all(len(values) == len(FEATURES) for values in seen)


# -- which library ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "architecture", "expected"),
    [
        ({}, "sm_80", False), ({"channels_last": True}, "sm_80", True), ({"precision": "float16"}, "sm_80", None),
        ({"precision": "bfloat16"}, "sm_80", False), ({"precision": "bfloat16", "channels_last": True}, "sm_75", False),
    ],
)  # fmt: skip
def test_depthwise(change: dict[str, Any], architecture: str, expected: bool | None) -> None:
    conv = replace(DEPTHWISE, **change)
    assert runs_on_cudnn(conv, architecture) is expected
    if expected is False:
        assert workspace(conv, architecture, "9.26.0") == NOTHING
    if expected is None:
        assert workspace(conv, architecture, "9.26.0").expected == 0


@pytest.mark.parametrize("direction", PASSES)
def test_windows_are_columns_where_cudnn_does_not_run(direction: str) -> None:
    """One sample in bfloat16 before Ampere: 64 channels of 3 x 3 windows, for 28 x 28 places."""
    conv = replace(CONV, precision="bfloat16", direction=direction)
    assert workspace(conv, "sm_75", "9.26.0") == exactly(2 * 64 * 9 * 28 * 28)
    grouped = replace(conv, w=(128, 16, 3, 3), groups=4)
    assert workspace(grouped, "sm_70", "9.26.0") == exactly(2 * 16 * 9 * 28 * 28)
    pointwise = replace(conv, w=(128, 64, 1, 1), stride=(1, 1), padding=(0, 0))
    assert workspace(pointwise, "sm_75", "9.26.0") == NOTHING


def test_a_precision_without_a_table_is_a_band_from_nothing() -> None:
    band = workspace(replace(CONV, precision="float64"), "sm_80", "9.26.0")
    assert band.low == band.expected == 0
    assert band.high > 0


def test_three_dimensions_have_a_wide_band() -> None:
    """The tables know 2-D ones only: between nothing and a copy of all three tensors."""
    conv = Convolution(
        FORWARD, "tf32", False, (2, 16, 8, 28, 28), (32, 16, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1
    )  # fmt: skip
    band = workspace(conv, "sm_80", "9.20.0")
    copies = 4 * (2 * 16 * 8 * 28 * 28 + 2 * 32 * 8 * 28 * 28 + 32 * 16 * 27)
    assert band.low == 0
    assert band.high >= copies
    assert band.low <= band.expected <= band.high
