"""Each rule against PyTorch: results, layouts, aliases, allocations with what is alive, what is saved, gradients."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from observe import PARTS, Case, View, call, f
from sampling import sampled
from suite import CASES, UNCOVERED

from staticmem.ops import rules
from staticmem.ops.registry import one_name

marks: list[pytest.MarkDecorator] = [pytest.mark.torch]
if importlib.util.find_spec("torch") is not None:
    import our_side
    import real_side
    import torch
    import torch_side

    marks += [
        pytest.mark.skipif(not torch_side.enable_cuda(), reason="this PyTorch has no device guards to lend"),
        pytest.mark.filterwarnings("ignore::UserWarning"),
    ]
pytestmark = marks


@pytest.mark.parametrize("case", sampled(CASES, 8), ids=[case.name for case in CASES])
def test_rule_does_what_pytorch_does(case: Case) -> None:
    for pattern in case.patterns():
        theirs, ours = torch_side.run(case, pattern), our_side.run(case, pattern)
        for part in PARTS:
            if part in case.skip:
                continue
            expected, found = getattr(theirs, part), getattr(ours, part)
            if part in case.real:
                expected = real_side.real(case, pattern)[part]
                found = getattr(our_side.run(case, pattern, real_side.SCALAR), part)
            elif case.real and part == "grads":
                expected, found = _unnumbered(expected), _unnumbered(found)
            assert found == expected, f"{part} with gradients for {pattern}"


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_reduced_losses_have_the_storage_that_pytorch_leaves_them(name: str, reduction: int) -> None:
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    theirs = getattr(torch.ops.aten, name)(x, y, **{"reduction": reduction}).untyped_storage().nbytes()
    weight = (None,) if name == "binary_cross_entropy" else ()
    case = call(f"aten::{name}", f(4, 3).fixed, f(4, 3).fixed, *weight, reduction)
    assert our_side.run(case, (False, False)).forward[0][0] == theirs


def _unnumbered(grads: dict[str, View | None]) -> dict[str, Any]:
    """Without the number of the allocation: the dispatch mode makes one more."""
    return {k: v and (re.sub(r"back\d+", "back", v.label), v.shape, v.strides, v.dtype) for k, v in grads.items()}


@pytest.mark.parametrize("name", ["hann", "hamming", "blackman", "bartlett"])
def test_windows_are_views(name: str) -> None:
    """A periodic window is a view of one with an element more."""
    (case,) = [case for case in CASES if case.targets == (f"aten::{name}_window",)]
    storage = getattr(torch, f"{name}_window")(16).untyped_storage()
    ((most, after),) = our_side.run(case, ()).forward
    assert (most, after) == (storage.nbytes(), storage.nbytes())


def test_every_rule_is_covered_or_excused() -> None:
    called = {target for case in CASES for target in case.targets}
    covered = {t if t in rules() else t.split(".", 1)[0] for t in called}
    other_names = {target for target in rules() if one_name(target) != target}  # `test_kinds` compares them
    missing = set(rules()) - covered - set(UNCOVERED) - other_names
    assert not missing, "rules without a case: add one, or a reason to UNCOVERED"
    assert not set(UNCOVERED) & covered, "covered now: take it off the list"
    assert set(UNCOVERED) <= set(rules())


def test_every_skipped_part_has_a_reason() -> None:
    assert [case.name for case in CASES if (case.skip or case.real) and not case.why] == []
    assert all(set(case.skip) < set(PARTS) for case in CASES)
