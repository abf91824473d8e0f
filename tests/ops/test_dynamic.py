"""Sizes that the data decides: the largest possible one, which tensors of ones reach in PyTorch, or the one given."""

from __future__ import annotations

from typing import Any

import our_side
import pytest
from observe import Case, Observation, b, call, f, i

BOUNDS = {
    "nonzero": call("aten::nonzero", f(4, 3).fixed),
    "argwhere": call("aten::argwhere", f(4, 3).fixed),
    "nonzero_numpy": call("aten::nonzero_numpy", f(4, 3).fixed),
    "masked_select": call("aten::masked_select", f(4, 3), b(3)),
    "index": call("aten::index.Tensor", f(4, 3), (b(4, 3),)),
    "rows": call("aten::index.Tensor", f(4, 3), (b(4),)),
    "columns": call("aten::index.Tensor", f(2, 4, 3), (i(4), b(4))),
}


def observed(case: Case) -> Observation:
    return our_side.run(case, case.patterns()[0])


@pytest.mark.torch
@pytest.mark.parametrize("case", BOUNDS.values(), ids=BOUNDS)
def test_the_bound_is_what_ones_give_in_pytorch(case: Case) -> None:
    torch = pytest.importorskip("torch")
    from torch_side import group, op, torch_dtype

    flat: list[Any] = [torch.ones(s.shape, dtype=torch_dtype(s.dtype)) for s in case.flat]
    flat = [t.requires_grad_() if needs else t for t, needs in zip(flat, case.patterns()[0], strict=True)]
    result = case.program(op, *group(case.inputs, flat))
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    ours = observed(case).outputs
    assert [v and (v.shape, v.dtype) for v in ours] == [
        (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in outputs
    ]


@pytest.mark.torch
def test_unique_of_distinct_numbers_keeps_them_all() -> None:
    torch = pytest.importorskip("torch")
    given = torch.arange(12.0).view(4, 3)
    for name, theirs in (
        ("_unique2", torch.ops.aten._unique2(given, True, True, True)),
        ("unique_consecutive", torch.ops.aten.unique_consecutive(given, True, True)),
        ("unique_dim", torch.ops.aten.unique_dim(given, 1, True, True, True)),
    ):
        args: tuple[Any, ...] = (f(4, 3).fixed, 1) if name == "unique_dim" else (f(4, 3).fixed,)
        flags = (True, True) if name == "unique_consecutive" else (True, True, True)
        ours = observed(call(f"aten::{name}", *args, *flags)).outputs
        assert [v and v.shape for v in ours] == [tuple(t.shape) for t in theirs]


def test_masked_select_saves_input_and_mask_and_fills_zeros() -> None:
    """derivatives.yaml: `masked_select_backward(grad, self, mask)`."""
    seen = observed(call("aten::masked_select", f(4, 3), b(4, 3)))
    assert (seen.saved, seen.backward) == (["in0", "in1"], [(48, 48)])


def test_positions_of_a_mask_are_saved() -> None:
    """An index by a mask makes int64 positions first (TensorAdvancedIndexing.cpp, `expandTensors`)."""
    seen = observed(call("aten::index.Tensor", f(4, 3), (b(4),)))
    assert seen.forward == [(32, 32), (48, 80)]
    assert seen.saved == ["new0"]


def test_a_size_that_the_file_gives_counts() -> None:
    assert observed(call("aten::nonzero", f(4, 3).fixed, size=5)).forward == [(5 * 2 * 8, 80)]
    assert observed(call("aten::masked_select", f(4, 3), b(4, 3), size=5)).forward == [(20, 20)]
    assert observed(call("aten::bincount", i(4), size=7)).forward == [(56, 56)]
    assert observed(call("aten::nonzero_static", f(4, 3).fixed, size=2)).forward == [(32, 32)]
