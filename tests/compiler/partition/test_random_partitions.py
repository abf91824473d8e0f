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

    for seed in range(60):
        module, forward_outputs, static = joint_module(seed, checkpoints)
        mine = ours(*joint_of(module, forward_outputs, static))
        theirs, _ = real(module, forward_outputs, static)
        assert (seed, mine) == (seed, theirs)
