"""What `max-autotune` may make of products: partial results, and templates that have their surroundings in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staticmem.compiler.inductor.autotuning import in_templates, partial_bytes
from staticmem.compiler.plan import Output, Plan, PlannedBuffer, Step
from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.studies import Study, request_of
from staticmem.tracing.nodes import PLACEHOLDER, Node

VIT = Path(__file__).parents[1] / "data" / "graphs" / "vit_b_16.pt2"


@pytest.mark.parametrize(
    ("sizes", "nbytes"),
    [
        ((256, 8192, 128), 32 * 256 * 128 * 4),  # k is 32 times m: at most 32 parts
        ((128, 8192, 256), 32 * 256 * 128 * 4),
        ((256, 8191, 128), 0),
        ((16, 8192, 16), 512 * 16 * 16 * 4),
    ],
)
def test_partial_results(sizes: tuple[int, int, int], nbytes: int) -> None:
    """`use_decompose_k_choice`: k >= 32 m and k >= 32 n; `get_k_splits`: no more than min(k // m, k // n) parts."""
    m, k, n = sizes
    forms = [form_of(shape, contiguous_strides(shape), dtypes.bfloat16) for shape in ((m, k), (k, n), (m, n))]
    a, b = Node(PLACEHOLDER, form=forms[0], name="a"), Node(PLACEHOLDER, form=forms[1], name="b")
    assert partial_bytes(Node("aten::mm", (a, b), forms[2])) == nbytes
    assert partial_bytes(Node("aten::bmm", (a, b), forms[2])) == 0


def test_what_is_between_a_product_and_one_other_kernel_has_no_buffer() -> None:
    """A cast (1), a product (2), an add (3) and a product (4), which are returned; 5 is between other kernels."""
    form = form_of((4, 4), (4, 1), dtypes.float32)
    product, other = "aten.mm.default", "triton: add"
    steps = (
        Step(other, 0, (1,), (0,)), Step(product, 1, (2,), (1,)), Step(other, 2, (3,), (2,)),
        Step(product, 3, (4,), ()), Step(other, 4, (5,), ()), Step(other, 5, (6,), (5,)),
    )  # fmt: skip
    buffers = tuple(PlannedBuffer(form, -1, "") for _ in range(6))
    plan = Plan(1, buffers, steps, tuple(Output(number, form) for number in (3, 4, 6)))
    least = in_templates(plan)
    assert [step.allocates for step in least.steps] == [(), (), (3,), (4,), (5,), (6,)]
    assert [step.frees for step in least.steps] == [(0,), (), (), (), (), (5,)]


def test_the_band_has_both_ends() -> None:
    words: dict[str, Any] = {"batch": 16, "optimizer": "sgd", "loss": "cross-entropy", "outputs": "dropped"}
    words |= {"compile": True, "amp": "bf16"}
    plain = Study.open(VIT, request_of(words))
    tuned = plain.ask(request_of({**words, "compile_mode": "max-autotune-no-cudagraphs"}))
    peak = plain.lifetimes.peak_bytes
    assert tuned.lifetimes.peak_bytes == peak
    assert tuned.live_band is not None
    low, high = plain.live_band or (peak, peak)
    assert tuned.live_band[0] < low
    assert tuned.live_band[1] >= high
