"""Partitions of random joint graphs, against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch: Any = pytest.importorskip("torch")


@pytest.mark.parametrize("checkpoints", [False, True])
def test_random_graphs_are_cut_as_pytorch_cuts_them(checkpoints: bool) -> None:
    from random_joints import joint_module
    from real_partitions import joint_of, ours, real

    for seed in range(50):
        module, forward_outputs, static = joint_module(seed, checkpoints)
        mine = ours(*joint_of(module, forward_outputs, static))
        theirs, _ = real(module, forward_outputs, static)
        assert (seed, mine) == (seed, theirs)


@pytest.mark.parametrize("budget", [0.0, 0.4])
def test_random_graphs_are_cut_for_a_budget_as_pytorch_cuts_them(budget: float) -> None:
    """Where nothing is left to choose from 2.15, which we follow, takes another cut than 2.13."""
    from random_joints import joint_module
    from real_partitions import joint_of, ours, partitioner_of, real

    compared = 0
    for seed in range(50):
        module, forward_outputs, static = joint_module(seed)
        joint, names = joint_of(module, forward_outputs, static)
        if partitioner_of(joint).candidates:
            mine = ours(joint, names, budget)
            theirs, _ = real(module, forward_outputs, static, budget)
            assert (seed, mine) == (seed, theirs)
            compared += 1
    assert compared > 5
