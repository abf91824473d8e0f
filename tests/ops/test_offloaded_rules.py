"""Each rule under `save_on_cpu` against PyTorch: what it saves, as tensors with their layouts, and what its backward
makes of those that come back."""

from __future__ import annotations

import importlib.util

import pytest
from observe import Case
from sampling import sampled
from suite import CASES

from staticmem.scenario.step import PAGEABLE, PINNED

marks: list[pytest.MarkDecorator] = [pytest.mark.torch]
if importlib.util.find_spec("torch") is not None:
    import our_side
    import torch
    import torch_side

    marks += [
        pytest.mark.skipif(not torch_side.enable_cuda(), reason="this PyTorch has no device guards to lend"),
        pytest.mark.filterwarnings("ignore::UserWarning"),
    ]
pytestmark = marks

UNLIKE = {
    "matmul(f32[2x4x5], f32[1x5x3])": "for fake tensors PyTorch squeezes what it expands otherwise",
    "in-place product with a slice": "CopySlices unpacks after it has copied the gradient: the peak is the same",
    "in-place product with a view of a view": "CopySlices, as above",
    "relu_ on a slice": "CopySlices, as above",
}


def _fits(case: Case) -> bool:
    """Not: saved CPU tensors, which are not copied, and batch norm, whose fake backward is a composed one."""
    return case.device == "cuda" and not case.real and "batch_norm" not in case.name and case.name not in UNLIKE


_FIT = [case for case in CASES if _fits(case)]


@pytest.mark.parametrize("kind", [PAGEABLE, PINNED])
@pytest.mark.parametrize("case", sampled(_FIT, 16), ids=[case.name for case in _FIT])
def test_rule_does_what_pytorch_does(case: Case, kind: str) -> None:
    for pattern in case.patterns():
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=kind == PINNED)
        theirs, ours = torch_side.run(case, pattern, hooks), our_side.run(case, pattern, offload=kind)
        for part in ("outputs", "backward", "grads"):
            if part not in case.skip:
                expected, found = getattr(theirs, part), getattr(ours, part)
                assert found == expected, f"{part} with gradients for {pattern}"


def test_every_difference_is_of_a_case() -> None:
    assert set(UNLIKE) <= {case.name for case in CASES}
