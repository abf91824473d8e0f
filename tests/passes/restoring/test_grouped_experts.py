"""Experts of transformers as a GPU runs them, and layers that ranks cannot share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_graphs import Builder, targets

from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Ref
from staticmem.passes.requested.expert_parallel import expert_parameters, split_experts
from staticmem.passes.restoring.masks import run_grouped
from staticmem.scenario.strategies import ExpertShare
from staticmem.studies import Study, request_of

QWEN = Path(__file__).parents[2] / "data" / "experts" / "qwen3_moe.pt2"
BLOCKS = QWEN.with_name("moe_blocks.pt2")


def exported(where: str) -> Graph:
    """The products of an export of transformers: rows are cast to the type of the weights, the sum to the tokens'."""
    b = Builder(tokens=(6, 8), weight=(4, 8, 8), offs=(4,), order=(12,)).within(where, root="m.Net")
    rows = b.call("index.Tensor", Ref("tokens"), (Ref("order"),), name="rows")
    turned = b.call("transpose.int", Ref("weight"), -2, -1, name="turned")
    cast = b.call("to.dtype", rows, dtypes.float32, name="cast")
    out = b.call("grouped", cast, turned, Ref("offs"), name="out")
    b.ops[-1] = replace(b.ops[-1], target="transformers::grouped_mm_fallback")
    summed = b.call("sum.dim_IntList", b.call("view", out, (6, 2, 8)), (1,), name="summed")
    return b.graph(b.call("to.dtype", summed, dtypes.float32, name="result"))


def test_products_are_those_of_a_gpu() -> None:
    graph, notes = run_grouped(exported("mlp.experts:transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts"))
    assert "_grouped_mm" in targets(graph)
    assert [note.code for note in notes] == ["SM240"]
    casts = {op.outputs[0]: op.args for op in graph.ops if op.target == "aten::to.other"}
    assert casts == {"cast": (Ref("rows"), Ref("turned")), "result": (Ref("summed"), Ref("tokens"))}


def test_code_of_others_stays() -> None:
    before = exported("experts:mine.Experts")
    assert run_grouped(before) == (before, ())


def test_casts_of_experts_are_none_in_half_precision() -> None:
    words = {"batch": 2, "dims": {"seq": 16}, "optimizer": "adamw", "dtype": "bf16"}
    found = Study.open(QWEN, request_of(words))
    trace, graph = found.result.trace, found.result.graph
    experts = {i for i, op in enumerate(graph.ops) if op.modules and op.modules[-1].path.endswith("experts")}
    floats = [
        b.shape
        for b in trace.buffers
        if trace.kernels[b.kernel].op in experts and b.dtype is dtypes.float32 and b.category == "activation"
    ]
    assert floats == []


def test_experts_are_weights_of_three_dimensions() -> None:
    graph = Study.open(BLOCKS, request_of({"batch": 2})).graph
    names = [f"layers.{i}.moe.experts.{part}" for i in range(3) for part in ("gate", "up", "down")]
    assert list(expert_parameters(graph)) == names


def test_biases_of_experts_are_refused() -> None:
    """A tensor by row that is no result of the rows would have to go to the ranks with them."""
    b = Builder(tokens=(6, 8), bias=(12, 8)).within("experts:m.Experts", root="m.Net")
    weight = b.parameter("weight", 4, 8, 8)
    ids = b.call("topk", Ref("tokens"), 2, name="ids")
    order = b.call("argsort", ids, name="order")
    counts = b.call("bincount", order, name="counts")
    rows = b.call("index.Tensor", Ref("tokens"), (order,), name="rows")
    offs = b.call("cumsum", counts, 0, name="offs")
    out = b.call("_grouped_mm", rows, weight, offs, name="out")
    biased = b.call("add.Tensor", out, Ref("bias"), name="biased")
    again = b.call("_grouped_mm", biased, weight, offs, name="again")
    with pytest.raises(UsageError, match="biases of experts") as error:
        split_experts(b.graph(again), ExpertShare(2))
    assert error.value.code == "SM109"


def test_rows_without_a_router_are_refused() -> None:
    b = Builder(tokens=(6, 8), offs=(4,))
    weight = b.parameter("weight", 4, 8, 8)
    out = b.call("_grouped_mm", Ref("tokens"), weight, Ref("offs"), name="out")
    with pytest.raises(UsageError, match="in the order of experts"):
        split_experts(b.graph(out), ExpertShare(2))
