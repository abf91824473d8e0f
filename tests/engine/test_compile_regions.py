"""Which ops torch.compile compiles, and where Dynamo breaks its graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from blocks import chain, value

from staticmem.compiler.region import returned
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Op, Recorded, Ref, Region, Value
from staticmem.passes.compile_regions import breaks_of, compile_regions
from staticmem.scenario.step import WHOLE, Scenario


def asked(graph: Graph, *names: str) -> list[tuple[int, int, str]]:
    return [(r.start, r.end, r.name) for r in compile_regions(graph, Scenario(compile=names))]


def test_the_whole_model_is_one_region() -> None:
    assert asked(chain(3), WHOLE) == [(0, 7, "")]


def test_each_module_of_a_class_is_a_region() -> None:
    expected = [(0, 2, "net.blocks.0"), (2, 4, "net.blocks.1"), (4, 6, "net.blocks.2")]
    assert asked(chain(3), "Block") == asked(chain(3), "my.Block") == asked(chain(3), "net.blocks.*") == expected
    assert asked(chain(3), "net.blocks.1", "net.head") == [(2, 4, "net.blocks.1"), (6, 7, "net.head")]


def test_a_module_inside_of_a_compiled_one_is_compiled_with_it() -> None:
    assert asked(chain(2), "Block", "net.blocks.0.linear") == [(0, 2, "net.blocks.0"), (2, 4, "net.blocks.1")]


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UsageError, match="--compile 'Blocks' names no module") as error:
        asked(chain(2), "Blocks")
    assert error.value.code == "SM163"


@pytest.mark.parametrize(
    ("target", "args", "breaks"),
    [
        ("aten::nonzero", (Ref("h0"),), True),
        ("aten::_unique2", (Ref("h0"),), True),
        ("aten::item", (Ref("h0"),), True),
        ("aten::index.Tensor", (Ref("h0"), (Ref("mask"),)), True),
        ("aten::index.Tensor", (Ref("h0"), (Ref("places"),)), False),
        ("aten::repeat_interleave.Tensor", (Ref("places"),), True),
        ("aten::repeat_interleave.self_int", (Ref("h0"), 2), False),
        ("aten::relu", (Ref("h0"),), False),
    ],
)
def test_dynamo_breaks_at_what_follows_from_data(target: str, args: Any, breaks: bool) -> None:
    graph = chain(1)
    op = Op("it", target, args, {}, ("a0",), graph.ops[1].modules)
    values = {"mask": Value("mask", dtypes.bool_, (64, 16)), "places": Value("places", dtypes.int64, (4,))}
    graph = replace(graph, ops=(graph.ops[0], op, graph.ops[2]), values={**values, "y": value("y", 64, 8)})
    assert list(breaks_of(graph, Region(0, 3, 0, ""))) == ([1] if breaks else [])


def test_a_region_returns_what_a_module_keeps() -> None:
    """`self.last = y` in compiled code is a result of its graph (torch/_dynamo/side_effects.py)."""
    graph = chain(1)
    assert returned(graph, 0, 3) == ("y",)
    kept = Recorded({}, ("a0",), (), (), {})
    assert returned(replace(graph, recorded=kept), 0, 3) == ("a0", "y")
    assert returned(graph, 0, 2) == ("a0",)
