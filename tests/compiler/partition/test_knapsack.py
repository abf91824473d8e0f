"""The choice for a memory budget, against PyTorch's `dp_knapsack` and its counter of FLOPs."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from staticmem.compiler.partition.extract import STEPS, knapsack, runtime
from staticmem.eager.strides import contiguous_strides, form_of
from staticmem.ir import dtypes
from staticmem.ops.registry import rules
from staticmem.tracing.nodes import PLACEHOLDER, Node

rules()  # nodes that are made by hand import no family

pytestmark = pytest.mark.torch


def test_choices_are_those_of_pytorch() -> None:
    module: Any = pytest.importorskip("torch._functorch._activation_checkpointing.knapsack")
    for seed in range(60):
        random = Random(seed)
        count = random.randrange(1, 30)
        sizes = [random.choice([0.0, 1e-6, 0.01, 0.125, 0.3, 1.5, random.random()]) for _ in range(count)]
        values = [float(random.choice([1, 1, 7, 10**6, 10**12, random.randrange(1, 10**9)])) for _ in range(count)]
        budget = random.choice([0.05, 0.3, 0.5, 0.9])
        _, saved, _ = module.dp_knapsack(sizes, values, budget)
        mine = knapsack([round(size * STEPS) for size in sizes], values, round(budget * STEPS))
        assert (seed, [i for i, is_saved in enumerate(mine) if is_saved]) == (seed, saved)


def given(*shape: int) -> Node:
    return Node(PLACEHOLDER, (), form_of(shape, contiguous_strides(shape), dtypes.float32))


CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (given(4, 16), given(16, 32)),
    "addmm": (given(32), given(4, 16), given(16, 32)),
    "bmm": (given(3, 4, 16), given(3, 16, 32)),
    "baddbmm": (given(3, 4, 32), given(3, 4, 16), given(3, 16, 32)),
    "convolution": (given(2, 8, 9, 9), given(6, 4, 3, 3), None, (2, 2), (1, 1), (1, 1), False, (0, 0), 2),
    "convolution, transposed": (given(2, 8, 9, 9), given(8, 3, 3, 3), None, (2, 2), (1, 1), (1, 1), True, (0, 0), 1),
    "convolution in one dimension": (given(2, 8, 9), given(6, 8, 3), None, (1,), (0,), (1,), False, (0,), 1),
    "_scaled_dot_product_flash_attention": (given(2, 4, 8, 16), given(2, 4, 6, 16), given(2, 4, 6, 16)),
    "cumsum": (given(4, 16), 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_flops_are_those_of_pytorch(name: str) -> None:
    torch: Any = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    base, args = name.split(",")[0].split()[0], CALLS[name]
    real = [torch.empty(arg.shape, device="meta") if isinstance(arg, Node) else arg for arg in args]
    with FlopCounterMode(display=False) as counter:
        result = getattr(torch.ops.aten, base).default(*real)
    shape = tuple((result if isinstance(result, torch.Tensor) else result[0]).shape)
    node = Node(f"aten::{base}", args, form_of(shape, contiguous_strides(shape), dtypes.float32))
    assert runtime(node) == max(counter.get_total_flops(), 1)
