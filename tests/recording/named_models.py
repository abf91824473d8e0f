"""Models whose code holds values longer than it reads them, each with one whose code lets go of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


def block(given: int, made: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.ReLU())


class Network(nn.Module):  # type: ignore[misc]
    """Down and up with two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([block(3, 16), block(16, 32), block(32, 64)])
        self.ups = nn.ModuleList([block(96, 32), block(48, 16)])
        self.head = nn.Conv2d(16, 1, 1)


class UNet(Network):
    def forward(self, x: Any) -> Any:
        conv1 = self.downs[0](x)
        conv2 = self.downs[1](F.max_pool2d(conv1, 2))
        conv3 = self.downs[2](F.max_pool2d(conv2, 2))
        up = F.interpolate(conv3, scale_factor=4)
        up = self.ups[0](torch.cat([up, F.interpolate(conv2, scale_factor=2)], 1))
        up = self.ups[1](torch.cat([up, conv1], 1))
        return self.head(up)


class UNetFreed(Network):
    def forward(self, x: Any) -> Any:
        conv1 = self.downs[0](x)
        conv2 = self.downs[1](F.max_pool2d(conv1, 2))
        conv3 = self.downs[2](F.max_pool2d(conv2, 2))
        up = F.interpolate(conv3, scale_factor=4)
        del conv3
        up = self.ups[0](torch.cat([up, F.interpolate(conv2, scale_factor=2)], 1))
        del conv2
        up = self.ups[1](torch.cat([up, conv1], 1))
        del conv1
        return self.head(up)


class Listed(Network):
    def forward(self, x: Any) -> Any:
        skips = []
        for index, down in enumerate(self.downs):
            x = down(F.max_pool2d(x, 2) if index else x)
            skips.append(x)
        for index, up in enumerate(self.ups):
            x = F.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skips[1 - index]], 1))
        return self.head(x)


class ListedFreed(Network):
    def forward(self, x: Any) -> Any:
        skips = []
        for index, down in enumerate(self.downs):
            x = down(F.max_pool2d(x, 2) if index else x)
            if index < 2:
                skips.append(x)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skips.pop()], 1))
        return self.head(x)


class Attention(nn.Module):  # type: ignore[misc]
    """Keeps its weights for plots."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.up, self.down = nn.Linear(32, 2048), nn.Linear(2048, 32)
        self.kept: Any = None

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2)).softmax(-1)
        self.kept = weights.detach()
        x = x + weights @ v
        return x + self.down(F.relu(self.up(x)))


class AttentionFreed(Attention):
    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2)).softmax(-1)
        del q, k
        x = x + weights @ v
        del weights, v
        return x + self.down(F.relu(self.up(x)))


class Residual(nn.Module):  # type: ignore[misc]
    """Has intermediate results that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ModuleList([nn.Linear(64, 256)]), nn.Linear(256, 64)
        self.wide = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 64))

    def forward(self, x: Any) -> Any:
        for layer in self.first:
            hidden = F.gelu(layer(x))
            normed = F.layer_norm(hidden, (256,))
            x = x + self.second(hidden)
        return self.wide(x) + x, normed.shape[0]


class ResidualFreed(Residual):
    def forward(self, x: Any) -> Any:
        for layer in self.first:
            hidden = F.gelu(layer(x))
            normed = F.layer_norm(hidden, (256,))
            size = normed.shape[0]
            del normed
            x = x + self.second(hidden)
            del hidden
        return self.wide(x) + x, size


class Held(Network):
    """Holds a value in ways that `del` of one name does not end."""

    def inner(self, x: Any, skips: Any) -> Any:
        narrow = F.max_pool2d(x, 2)
        return narrow, lambda: skips

    def forward(self, x: Any) -> Any:
        conv1 = self.downs[0](x)
        conv2, keeps = self.inner(conv1, (conv1,))
        both = (conv1, conv2)
        x = self.downs[1](conv2)
        return x, keeps, both[0].shape


class Copied(Network):
    """Its code asks for all of its variables."""

    def forward(self, x: Any) -> Any:
        conv1 = self.downs[0](x)
        names = locals()
        x = self.downs[1](conv1)
        x = self.downs[2](x)
        assert names["conv1"] is conv1
        return x
