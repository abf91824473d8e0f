"""Blocks under selective checkpoints, their export, and what a step of them holds in PyTorch on the CPU."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 8)
        self.saves: tuple[str, ...] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.saves is None:
                x = block(x)
            else:
                contexts = partial(create_selective_checkpoint_contexts, policy(self.saves))
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)
        return self.head(x)


def policy(saves: tuple[str, ...]) -> Any:
    """A policy of torchtitan's kind: it keeps what is named, of `NAME/N` the first of every N calls."""
    every = {name.partition("/")[0]: int(name.partition("/")[2] or 1) for name in saves}
    seen: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def decide(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        call = re.sub(r"^aten\.", "", str(func))
        name = next((n for n in (str(func), call, call.partition(".")[0]) if n in every), None)
        if name is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts = seen[context.is_recompute]
        counts[name] += 1
        saved = (counts[name] - 1) % every[name] == 0
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def export(path: Path, batch: int, width: int) -> None:
    with torch.device("meta"):
        model, x = Net(width).train(), torch.zeros(batch, width)
    torch.export.save(torch.export.export(model, (x,), strict=False), path)


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of live storages, rounded up to 512 each, and their peak in each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.phase = ""
        self.peaks: dict[str, int] = {}

    def see(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.storages[value.untyped_storage()._cdata] = weakref.ref(value.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            self.see(value)
        alive = [storage for ref in self.storages.values() if (storage := ref()) is not None]
        now = sum(-(-storage.nbytes() // 512) * 512 for storage in alive)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), now)
        return out


def peaks(batch: int, width: int, saves: tuple[str, ...]) -> dict[str, int]:
    """Peaks of the second step's forward and backward; SGD in place, the mean of the outputs as the loss."""
    model, x, live = Net(width).train(), torch.zeros(batch, width), Live()
    model.saves = saves
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    for value in (*model.parameters(), x):
        live.see(value)
    with live:
        for _ in range(2):
            live.peaks.clear()
            optimizer.zero_grad()
            live.phase = "forward"
            loss = model(x).mean()
            live.phase = "backward"
            loss.backward()
            live.phase = "optimizer"
            optimizer.step()
    return {name: live.peaks[name] for name in ("forward", "backward")}
