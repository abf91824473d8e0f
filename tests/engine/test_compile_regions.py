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
from staticmem.passes.requested.regions import breaks_of, compile_regions, ddp_cuts
from staticmem.scenario.compiling import WHOLE
from staticmem.scenario.step import Scenario


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


MIB = 1 << 20


@pytest.mark.parametrize(
    ("weights", "head", "checkpoints", "cuts"),
    [
        ((10, 10, 10), 2, (), [6]),  # the head fills the first bucket; what comes before does not fill another
        ((10, 10, 10), 0.5, (), [4]),  # the last block fills it, with its relu and the head
        ((30, 10, 20), 2, (), [2, 6]),  # 20 + 10 MiB, then the first block
        ((0, 10, 20), 2, (), [6]),  # calls without a trained parameter join the graph behind them
        ((30, 30, 30), 2, (), [2, 4, 6]),
        ((30, 30, 30), 2, (Region(2, 6, 0, "net"),), [2, 6]),  # a checkpoint is one call
        ((30, 30, 30), 2, (Region(3, 5, 0, "net"),), [2, 3, 6]),
        ((0, 0, 0), 0, (), []),
    ],
)
def test_graphs_are_cut_where_a_bucket_is_full(
    weights: tuple[int, ...], head: float, checkpoints: tuple[Region, ...], cuts: list[int]
) -> None:
    """DDPOptimizer goes through linear, relu, linear, relu, linear, relu, linear (ops 0 to 6) from the end; its first
    bucket is full at 1 MiB, others at 25 MiB."""
    nbytes = {f"w{k}": size * MIB for k, size in enumerate(weights)} | {"wh": int(head * MIB)}
    assert ddp_cuts(chain(3), 0, 7, nbytes, checkpoints) == cuts


def test_a_parameter_counts_as_often_as_it_is_read() -> None:
    graph = chain(3)
    tied = replace(graph, ops=tuple(op.changed(args=(op.args[0], Ref("wh"))) if op.outputs[0][0] == "h" else op
                                    for op in graph.ops))  # fmt: skip
    assert ddp_cuts(tied, 0, 7, {"wh": 13 * MIB}, ()) == [2, 6]
