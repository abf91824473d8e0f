"""Convolutions as cuDNN gets them: sizes, passes, forms of workspace, and which library runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticmem.devices import conv_ops
from staticmem.devices.conv import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    PASSES,
    Convolution,
    precision_of,
    transposed,
)
from staticmem.devices.conv_features import FEATURES, Form, features, form_bytes, parse_form
from staticmem.devices.conv_workspace import runs_on_cudnn, workspace
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Graph, Op, Ref, Value
from staticmem.units import NOTHING

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


def test_a_transposed_convolution_runs_the_other_passes() -> None:
    passes = [transposed(CONV.for_pass(direction)).direction for direction in PASSES]
    assert passes == [BACKWARD_DATA, FORWARD, BACKWARD_FILTER]
    forward = transposed(CONV)
    assert [conv_ops.of_pass(forward, direction).direction for direction in PASSES] == passes


def op(target: str, *args: Arg, **kwargs: Arg) -> Op:
    return Op("n", target, (Ref("x"), Ref("w"), None, *args), kwargs, ("y",))


def test_arguments_of_conv2d() -> None:
    found = conv_ops.convolution(
        op("aten::conv2d", (2, 2), (1, 1)), CONV.x, CONV.w, CONV.y, dtypes.float32, channels_last=False
    )
    assert found == CONV


def test_defaults_strings_and_keywords() -> None:
    same = conv_ops.convolution(
        op("aten::conv2d", padding="same"), CONV.x, CONV.w, (32, 128, 56, 56), dtypes.float16, channels_last=True
    )
    assert same is not None
    assert (same.padding, same.stride, same.precision, same.channels_last) == ((1, 1), (1, 1), "float16", True)
    unknown = op("aten::conv2d", Ref("s"), 1)
    assert conv_ops.convolution(unknown, CONV.x, CONV.w, CONV.y, dtypes.float32, channels_last=False) is None
    ints = op("aten::conv2d", 2, 1)
    assert conv_ops.convolution(ints, CONV.x, CONV.w, CONV.y, dtypes.int8, channels_last=False) is None


def test_a_transposed_op_is_the_convolution_that_it_transposes() -> None:
    up = op("aten::conv_transpose2d", (2, 2), (0, 0))
    found = conv_ops.convolution(
        up, (4, 64, 8, 8), (64, 32, 2, 2), (4, 32, 16, 16), dtypes.float32, channels_last=False
    )
    assert found is not None
    assert (found.direction, found.x, found.y) == (BACKWARD_DATA, (4, 32, 16, 16), (4, 64, 8, 8))


def test_one_dimension_runs_as_two() -> None:
    found = conv_ops.convolution(
        op("aten::conv1d", (2,), (1,)), (8, 4, 100), (16, 4, 3), (8, 16, 50), dtypes.float32, channels_last=False
    )
    assert found is not None
    assert (found.x, found.w, found.stride, found.padding) == ((8, 4, 1, 100), (16, 4, 1, 3), (1, 2), (0, 1))


def test_layout_spreads_from_a_permuted_tensor() -> None:
    def value(name: str, *shape: int) -> Value:
        return Value(name, dtypes.float32, shape)

    ops = (
        Op("p", "aten::permute", (Ref("x"), (0, 3, 1, 2)), {}, ("p",)),
        Op("c", "aten::conv2d", (Ref("p"), Ref("w")), {}, ("c",)),
        Op("r", "aten::relu", (Ref("c"),), {}, ("r",)),
        Op("q", "aten::permute", (Ref("r"), (0, 2, 3, 1)), {}, ("q",)),
        Op("d", "aten::conv2d", (Ref("z"), Ref("w")), {}, ("d",)),
    )
    inputs = (value("x", 2, 8, 8, 4), value("z", 2, 4, 8, 8), value("w", 4, 4, 1, 1))
    graph = Graph("g", "fx", "", inputs, (), (), ops, ("q",))
    shapes = conv_ops.shapes_of(graph)
    assert conv_ops.channels_last_values(graph, shapes) == {"p", "c", "r"}
    assert conv_ops.channels_last_values(graph, shapes, everywhere=True) == {"x", "z", "w"}


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
    seen = {features(CONV.for_pass(direction)) for direction in PASSES}
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
