"""Models with several outputs, each of which has a loss: `tests/data/measured/several-outputs.json` has their steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Dense(nn.Module):  # type: ignore[misc]
    """Classes, depth and edges of every pixel, from one decoder: a tuple with a list in it."""

    def __init__(self) -> None:
        super().__init__()

        def block(channels: int, out: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))

        self.body = nn.Sequential(block(3, 32), block(32, 64), nn.MaxPool2d(2), block(64, 64))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.seg, self.depth, self.edge = nn.Conv2d(64, 19, 1), nn.Conv2d(64, 1, 1), nn.Conv2d(64, 1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        f = self.up(self.body(x))
        return self.seg(f), self.depth(f), [self.edge(f)]


class Detector(nn.Module):  # type: ignore[misc]
    """Scores and boxes of every position of two levels, and the features: a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.SiLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.SiLU()
        )  # fmt: skip
        self.c2 = nn.Sequential(nn.Conv2d(64, 128, 3, 2, 1), nn.SiLU())
        self.cls = nn.ModuleList([nn.Conv2d(64, 80, 3, padding=1), nn.Conv2d(128, 80, 3, padding=1)])
        self.reg = nn.ModuleList([nn.Conv2d(64, 4, 3, padding=1), nn.Conv2d(128, 4, 3, padding=1)])

    def forward(self, x: torch.Tensor) -> Any:
        a = self.c1(x)
        b = self.c2(a)
        return {
            "scores": torch.cat([h(f).flatten(2).transpose(1, 2) for h, f in zip(self.cls, (a, b), strict=True)], 1),
            "boxes": torch.cat([h(f).flatten(2).transpose(1, 2) for h, f in zip(self.reg, (a, b), strict=True)], 1),
            "features": [a, b],
        }


class Autoencoder(nn.Module):  # type: ignore[misc]
    """A variational one, which returns one of its losses: a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Sequential(nn.Linear(784, 400), nn.ReLU())
        self.mu, self.lv = nn.Linear(400, 20), nn.Linear(400, 20)
        self.d = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.e(x)
        mu, lv = self.mu(h), self.lv(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * lv)
        return {"x": self.d(z), "kl": -0.5 * torch.sum(1 + lv - mu.pow(2) - lv.exp())}


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dense": (Dense, (4, 3, 96, 96)),
    "detector": (Detector, (4, 3, 160, 160)),
    "autoencoder": (Autoencoder, (128, 784)),
}
