"""Calls whose overloads stand in other files of traces, with and without the overload's name."""

from __future__ import annotations

import pytest

from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.ops.traces.registry import lookup
from staticmem.tracing.tracer import Tracer


def traced(target: str, *args: object) -> list[str]:
    t = Tracer(training=False)
    x, y = (t.placeholder(name, form_of((4, 3), contiguous_strides((4, 3)), dtypes.float32)) for name in "xy")
    function = lookup(target)
    assert function is not None
    function(t, x, *(y if arg == "y" else arg for arg in args))
    return [node.target for node in t.nodes[2:]]


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes(name: str) -> None:
    along = [f"aten::{name}.dim", "operator::getitem", "operator::getitem"]
    assert traced(f"aten::{name}.dim", 1) == along
    assert traced(f"aten::{name}", 1, True) == along
    assert traced(f"aten::{name}") == [f"aten::{name}"]
    assert traced(f"aten::{name}", "y") == traced(f"aten::{name}.other", "y") == [f"aten::{name}imum"]


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_group_norm_has_contiguous_input_on_a_gpu(channels_last: bool) -> None:
    """`group_norm` of aten/src/ATen/native/group_norm.cpp: channels last stay on the CPU alone."""
    t = Tracer(training=False)
    strides = (128, 1, 32, 8) if channels_last else contiguous_strides((2, 8, 4, 4))
    x = t.placeholder("x", form_of((2, 8, 4, 4), strides, dtypes.float32))
    function = lookup("aten::group_norm")
    assert function is not None
    result = function(t, x, 2)
    assert result.strides == contiguous_strides((2, 8, 4, 4))
    assert [node.target for node in t.nodes].count("aten::clone") == channels_last
