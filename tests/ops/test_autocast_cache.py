"""The copies of weights that autocast keeps, against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest

from staticmem.eager.context import Eager
from staticmem.ir import dtypes
from staticmem.ops import lookup
from staticmem.ops.dispatch import call


def ours(first_with_grad: bool) -> tuple[bool, int]:
    """Whether the second product with a weight has a history, and the casts that both took."""
    e = Eager()
    e.autocast = dtypes.bfloat16
    weight, x = e.empty((8, 8), dtypes.float32), e.empty((8, 8), dtypes.bfloat16)
    weight.requires_grad = True
    rule = lookup("aten::mm")
    assert rule is not None
    e.grad_enabled = first_with_grad
    call(e, rule, [weight, x], {})
    e.grad_enabled = True
    product = call(e, rule, [weight, x], {})
    return product.requires_grad, sum(name.startswith("aten._to_copy") for name in e.trace.kernels.names)


@pytest.mark.torch
@pytest.mark.parametrize("first_with_grad", [True, False])
def test_a_copy_made_under_no_grad_has_a_history(first_with_grad: bool) -> None:
    torch: Any = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    casts = []

    class Casts(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            casts.append(func is torch.ops.aten._to_copy.default)
            return func(*args, **(kwargs or {}))

    weight, x = torch.nn.Parameter(torch.zeros(8, 8)), torch.zeros(8, 8, dtype=torch.bfloat16)
    with Casts(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        with torch.set_grad_enabled(first_with_grad):
            torch.mm(weight, x)
        product = torch.mm(weight, x)
    assert ours(first_with_grad) == (product.requires_grad, sum(casts)) == (True, 1)
