"""Partitions of small models, against PyTorch's: saved values, nodes of both graphs, and their order."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch: Any = pytest.importorskip("torch")
nn: Any = torch.nn
Module: Any = nn.Module


class Residual(Module):  # type: ignore[misc]
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return x + self.layers(x)


class Checkpointed(Module):  # type: ignore[misc]
    """Each block in a region of `torch.utils.checkpoint`."""

    def __init__(self, *blocks: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


class Attention(Module):  # type: ignore[misc]
    """With the scores written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).split(16, -1)
        scores = torch.softmax(q @ k.transpose(-2, -1) / 4 + torch.ones(6, 6, device=x.device).triu(1) * -1e9, -1)
        return self.out(scores @ v)


def mlp() -> Any:
    return Residual(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def convolutions() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        Residual(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Hardswish()),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def convolved() -> Any:
    return Residual(nn.Conv1d(6, 6, 3, padding=1), nn.SiLU(), nn.Softmax(-1))


def transformer() -> Any:
    return nn.Sequential(Residual(nn.LayerNorm(16), Attention()), mlp())


MODELS = {
    "linear": (lambda: nn.Linear(16, 16), (4, 16)),
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8), nn.Tanh()), (4, 16)),
    "attention": (lambda: Residual(nn.LayerNorm(16), Attention()), (2, 6, 16)),
    "transformer": (lambda: nn.Sequential(transformer(), transformer()), (2, 6, 16)),
    "convolutions": (convolutions, (2, 3, 8, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Sigmoid(), nn.Linear(16, 4)), (4, 16)),
    "checkpoint": (lambda: Checkpointed(mlp(), mlp(), nn.Linear(16, 16), mlp()), (2, 6, 16)),
    "checkpoint between others": (
        lambda: nn.Sequential(nn.Linear(16, 16), Checkpointed(mlp(), convolved()), nn.Linear(16, 16)), (2, 6, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_are_cut_as_pytorch_cuts_them(name: str) -> None:
    from real_partitions import of_model

    make: Any
    make, shape = MODELS[name]
    pairs = of_model(make().train(), [torch.ones(shape, requires_grad=True)])
    assert pairs
    for mine, theirs in pairs:
        assert mine.saved == theirs.saved
        assert mine.forward == theirs.forward
        assert mine.backward == theirs.backward


@pytest.mark.parametrize("budget", [0.3, 0.7])
@pytest.mark.parametrize("name", ["transformer", "convolutions", "checkpoint between others"])
def test_budgets_are_met_as_pytorch_meets_them(name: str, budget: float) -> None:
    from real_partitions import of_model

    make: Any
    make, shape = MODELS[name]
    for mine, theirs in of_model(make().train(), [torch.ones(shape, requires_grad=True)], budget):
        assert mine.saved == theirs.saved
        assert mine.forward == theirs.forward
        assert mine.backward == theirs.backward
