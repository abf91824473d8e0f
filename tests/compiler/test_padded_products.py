"""Matrix products that Inductor may pad: which ops have them, and what that takes."""

from __future__ import annotations

from staticmem.compiler.graphs import NodeGraph
from staticmem.compiler.region import padded_products
from staticmem.eager.strides import Form, contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.tracing.nodes import PLACEHOLDER, Node


def product(m: int, k: int, n: int) -> NodeGraph:
    def form(*shape: int) -> Form:
        return form_of(shape, contiguous_strides(shape), dtypes.float32)

    a, b = Node(PLACEHOLDER, form=form(m, k), name="a"), Node(PLACEHOLDER, form=form(k, n), name="b")
    c = Node("aten::mm", (a, b), form(m, n), op=7)
    return NodeGraph((a, b, c), (c,))


def test_an_op_has_the_bytes_of_its_padded_copies() -> None:
    """1024 x 1023 and 1023 x 1024 become 1024 x 1024 each: two copies."""
    assert padded_products(product(1024, 1023, 1024)) == ((7, 2 * 1024 * 1024 * 4),)
    assert padded_products(product(1024, 1024, 1024)) == ()
    assert padded_products(product(1, 1023, 1024)) == ()  # reads more than it computes


def test_the_larger_of_forward_and_backward_counts() -> None:
    small, large = product(512, 511, 512), product(1024, 1023, 1024)
    assert padded_products(small, large) == padded_products(large)
