"""Networks whose recordings decide what compiled code makes of them: custom autograd functions, tensors in a `for`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd import Function


class Mish(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.tanh(F.softplus(x))
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        return g * (y + x * torch.sigmoid(x) * (1 - y * y))


class Linear(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


class RMSNorm(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = x * r
        ctx.save_for_backward(y, r, w)
        return y * w

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        y, r, w = ctx.saved_tensors
        gw = (g * y).flatten(0, -2).sum(0)
        gy = g * w
        return r * (gy - y * (gy * y).mean(-1, keepdim=True)), gw


class Round(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.round(x * 16) / 16

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


class Reversed(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g.neg() * 0.1


class Halved(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 0.5


class Again(Function):  # type: ignore[misc]
    """Its backward runs autograd, which the trace does not follow."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.tanh(x) * x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = torch.tanh(x) * x
        return torch.autograd.grad(y, x, g)[0]


class Layers(nn.Module):  # type: ignore[misc]
    def __init__(self, activation: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a = nn.ModuleList(nn.Linear(512, 2048) for _ in range(4))
        self.b = nn.ModuleList(nn.Linear(2048, 512) for _ in range(4))
        self.activation, self.head = activation, nn.Linear(512, 100)

    def forward(self, x: Any) -> Any:
        for a, b in zip(self.a, self.b, strict=True):
            x = x + b(self.activation(a(x)))
        return self.head(x)


class Own(nn.Module):  # type: ignore[misc]
    """A linear layer whose product is a custom function."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.empty(columns, rows)), nn.Parameter(torch.empty(columns))

    def forward(self, x: Any) -> Any:
        return Linear.apply(x, self.w, self.b)


class OwnLayers(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Sequential(Own(512, 1024), nn.GELU(), Own(1024, 512)) for _ in range(3))
        self.g = nn.ParameterList(nn.Parameter(torch.empty(512)) for _ in range(3))
        self.head = nn.Linear(512, 100)

    def forward(self, x: Any) -> Any:
        for layer, g in zip(self.l, self.g, strict=True):
            x = x + layer(RMSNorm.apply(x, g))
        return self.head(x)


class Rounded(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.l, self.h = nn.ModuleList(nn.Linear(512, 512) for _ in range(4)), nn.Linear(512, 100)

    def forward(self, x: Any) -> Any:
        for layer in self.l:
            x = F.relu(F.linear(Round.apply(x), Round.apply(layer.weight), layer.bias))
        return self.h(x)


class Images(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.ModuleList(nn.Conv2d(64 if k else 3, 64, 3, padding=1, bias=False) for k in range(4))
        self.n, self.f, self.d = (
            nn.ModuleList(nn.BatchNorm2d(64) for _ in range(4)),
            nn.Linear(64, 10),
            nn.Linear(64, 2),
        )

    def forward(self, x: Any) -> Any:
        for c, n in zip(self.c, self.n, strict=True):
            x = Mish.apply(n(c(x)))
        x = x.mean((2, 3))
        return self.f(x) + self.d(Reversed.apply(x)).sum(-1, keepdim=True)


class Halves(Function):  # type: ignore[misc]
    """Both halves of a row, of which one is a sigmoid: two results."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        a, b = x.chunk(2, -1)
        ctx.save_for_backward(x)
        return a.contiguous(), torch.sigmoid(b)

    @staticmethod
    def backward(ctx: Any, of_a: Any, of_b: Any) -> Any:
        b = torch.sigmoid(ctx.saved_tensors[0].chunk(2, -1)[1])
        return torch.cat([of_a, of_b * b * (1 - b)], -1)


class Clipped(Function):  # type: ignore[misc]
    """Its mask is an attribute of `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Any, low: float, high: float) -> Any:
        ctx.mask = (x > low) & (x < high)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * ctx.mask, None, None


class GatedHalves(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList(nn.Linear(512, 2048) for _ in range(3))
        self.b, self.head = nn.ModuleList(nn.Linear(1024, 512) for _ in range(3)), nn.Linear(512, 100)

    def forward(self, x: Any) -> Any:
        for a, b in zip(self.a, self.b, strict=True):
            value, gate = Halves.apply(a(x))
            x = x + b(value * gate)
        return self.head(Clipped.apply(x, -3.0, 3.0))


class RelativePositions(nn.Module):  # type: ignore[misc]
    """Attention whose queries, keys and values are the elements of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(63, 8), nn.Linear(256, 768), nn.Linear(256, 256)
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 10)
        places = torch.arange(128)
        self.register_buffer("distances", (places[:, None] - places[None]).clamp(-31, 31) + 31)

    def forward(self, x: Any) -> Any:
        for _ in range(2):
            b, t, c = x.shape
            q, k, v = self.qkv(self.norm(x)).reshape(b, t, 3, 8, 32).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-2, -1)) * (32**-0.5) + self.table(self.distances).permute(2, 0, 1)
            mask = torch.ones(t, t, device=x.device, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(mask, float("-inf")).softmax(-1)
            x = x + self.out((scores @ v).transpose(1, 2).reshape(b, t, c))
        return self.head(x.mean(1))


class Recurrent(nn.Module):  # type: ignore[misc]
    """A GRU's cell over a few steps: its fused kernel has no decomposition."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(512, 256), nn.Linear(256, 64)

    def forward(self, x: Any) -> Any:
        state = x.new_zeros(x.shape[0], 256)
        for step in x.split(8, 1):
            state = self.cell(step.mean(1), state)
        return self.head(state)


class Attends(nn.Module):  # type: ignore[misc]
    """Modules of attention, whose fused inference path compiled code does not take; one gives its weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(512, 8, batch_first=True)
        self.second = nn.MultiheadAttention(512, 8, batch_first=True)

    def forward(self, x: Any) -> Any:
        x = x + self.first(x, x, x, need_weights=False)[0]
        y, weights = self.second(x, x, x)
        return torch.nn.functional.gelu(x + y) * weights.mean()
