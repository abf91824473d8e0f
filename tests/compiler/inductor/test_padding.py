"""Products that Inductor may pad; sizes by hand from `pad_addmm` of torch/_inductor/fx_passes/pad_mm.py."""

from __future__ import annotations

import pytest
from planned import plan

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.inductor.autotuning import extra_bytes
from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.tracing.nodes import PLACEHOLDER, Node


def product(m: int, k: int, n: int, dtype: DType) -> Node:
    one, other, result = (form_of(s, contiguous_strides(s), dtype) for s in ((m, k), (k, n), (m, n)))
    return Node("aten::mm", (Node(PLACEHOLDER, (), one, name="x"), Node(PLACEHOLDER, (), other, name="w")), result)


@pytest.mark.parametrize(
    ("sizes", "dtype", "extra"),
    [
        ((2048, 768, 50257), dtypes.float32, 4 * (768 * 50260 + 2048 * 3)),  # the weight and the columns of the result
        ((2048, 768, 50260), dtypes.float32, 0),
        ((2048, 768, 50260), dtypes.bfloat16, 2 * (768 * 50264 + 2048 * 4)),
        ((2048, 771, 512), dtypes.float32, 4 * (2048 * 772 + 772 * 512)),
        ((1, 771, 512), dtypes.float32, 0),  # not bound by what it computes
    ],
)
def test_extra_bytes(sizes: tuple[int, int, int], dtype: DType, extra: int) -> None:
    assert extra_bytes(product(*sizes, dtype)) == extra


def test_note() -> None:
    node = product(2048, 768, 50257, dtypes.float32)
    made = plan(NodeGraph((*node.inputs, node), (node,)), inference=True)
    assert [code for code, _ in made.notes] == ["pad_mm"]
    assert "[2048, 768] and [768, 50257]" in made.notes[0][1]
