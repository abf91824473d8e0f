"""What keeps a graph from being recorded as a CUDA graph."""

from __future__ import annotations

from staticmem.compiler.region import unsafe_ops, written_inputs
from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.tracing.nodes import PLACEHOLDER, Node


def node(target: str, *args: object, dtype: DType = dtypes.float32, name: str = "") -> Node:
    return Node(target, args, form_of((8,), contiguous_strides((8,)), dtype), name=name)


def test_inputs_that_are_written_to() -> None:
    """Buffers, as running statistics, have one place in all steps; a batch has not (`check_for_mutation`)."""
    batch, running = (node(PLACEHOLDER, name=name) for name in ("x", "running_mean"))
    value = node("aten::add.Tensor", batch, 1)
    nodes = [batch, running, value, node("aten::copy_", batch, value), node("aten::copy_", running, value)]
    assert written_inputs(nodes, {"running_mean"}) == ("x",)
    assert written_inputs(nodes[:3], ()) == ()


def test_ops_that_cannot_be_recorded() -> None:
    """A mask as an index is made numbers of, which waits for the GPU."""
    x, mask, numbers = node(PLACEHOLDER), node(PLACEHOLDER, dtype=dtypes.bool_), node(PLACEHOLDER, dtype=dtypes.int64)
    masked, numbered = (node("aten::index_put", x, (None, index), x) for index in (mask, numbers))
    assert unsafe_ops([x, mask, masked]) == ("aten::index_put",)
    assert unsafe_ops([x, numbers, numbered]) == ()
    assert unsafe_ops([x, node("aten::_linalg_eigh", x)]) == ("aten::_linalg_eigh",)
