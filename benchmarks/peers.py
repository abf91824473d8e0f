"""What a user would otherwise run, as processes of their own. It needs PyTorch, and for `torchinfo` that package.

python benchmarks/peers.py memtracker MODEL BATCH    # PyTorch's MemTracker: one training step with Adam on fake tensors
python benchmarks/peers.py torchinfo MODEL BATCH     # torchinfo.summary on the meta device
python benchmarks/peers.py torch                     # import torch, which both pay

MODEL is resnet50 (models/architectures.py) or one of exports.py, which need torchvision or transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]


def built(name: str) -> tuple[Callable[[], nn.Module], Callable[[str, int], torch.Tensor]]:
    """How to make the model, and an input of it on a device with a batch."""
    if name == "resnet50":
        sys.path.insert(0, str(ROOT / "models"))
        from architectures import ARCHITECTURES

        return ARCHITECTURES[name], lambda device, batch: torch.empty((batch, 3, 224, 224), device=device)
    from exports import MODELS, example

    return MODELS[name], lambda device, batch: example(name, device, batch)


def memtracker(name: str, batch: int) -> None:
    """torch/distributed/_tools/mem_tracker.py, as its documentation uses it: nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    make, example = built(name)
    with torch.device("meta"):
        model = make().train()
    with FakeTensorMode():
        for module in model.modules():  # initialisers read values, which fake tensors do not have
            for key, p in module.named_parameters(recurse=False):
                module.register_parameter(key, nn.Parameter(torch.empty(p.shape, dtype=p.dtype)))
            for key, b in module.named_buffers(recurse=False):
                module.register_buffer(key, torch.empty(b.shape, dtype=b.dtype))
        data = example("cpu", batch)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        tracker: Any = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for turn in range(2):  # the second step has optimizer state
                model(data).float().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if turn == 0:
                    tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")
    print(max(parts["Total"] for parts in peak.values()))


def torchinfo(name: str, batch: int) -> None:
    """The summary of the model for this input; its memory is the sum of outputs."""
    from torchinfo import summary  # type: ignore[import-not-found,import-untyped,unused-ignore]

    make, example = built(name)
    with torch.device("meta"):
        model = make().train()
    summary(model, input_data=example("meta", batch), device="meta", verbose=0)


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb != "torch":
        {"memtracker": memtracker, "torchinfo": torchinfo}[verb](arguments[0], int(arguments[1]))
