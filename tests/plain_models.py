"""Models of code that no table has, each with something that a plain export loses (`test_plain_exports.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint


class Stack(nn.Module):  # type: ignore[misc]
    """A stem, `depth` blocks that `block(channels)` makes, and a head."""

    def __init__(self, block: Callable[[int], nn.Module], depth: int = 2, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(block(channels) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class WithoutAutocast(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.mix = nn.Conv2d(channels, channels, 1)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.conv(x))
        with torch.autocast("cuda", enabled=False):
            y = self.norm(self.mix(x.float()))
        return x + y


class WithAutocast(WithoutAutocast):
    def forward(self, x: Any) -> Any:
        x = F.relu(self.conv(x))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.norm(self.mix(x))
        return x + y


class WithoutGradient(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.conv(x))
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(x))
        return x * gate


class Bottleneck(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        return F.relu(self.mix(y) + x)


class Switched(Stack):
    """A checkpoint for each block, or none."""

    def __init__(self, on: bool, reentrant: bool = False) -> None:
        super().__init__(Bottleneck, depth=3)
        self.on, self.reentrant = on, reentrant

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return self.head(x.mean((2, 3)))


class Modulated(nn.Module):  # type: ignore[misc]
    """Two axes that one line adds, which an optimiser of ONNX makes one node of."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.style = nn.Linear(channels, 2 * channels)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x: Any) -> Any:
        scale, shift = self.style(x.mean((2, 3)))[:, :, None, None].chunk(2, dim=1)
        return F.silu(self.norm(self.conv(x)) * (1 + scale) + shift)


class Causal(nn.Module):  # type: ignore[misc]
    """Convolutions with weight_norm: hooks as they were, and parametrizations."""

    def __init__(self, norm: Any, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, channels, 1)
        self.padded = norm(nn.Conv1d(channels, channels, 3))
        self.cut = norm(nn.Conv1d(channels, channels, 3, padding=2))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        x = torch.tanh(self.padded(F.pad(x, (2, 0))))
        x = torch.sigmoid(self.cut(x)[:, :, :-2].contiguous())
        return self.head(x.mean(2))


class SwishFunction(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate * (1 + x * (1 - gate)))


class SignFunction(torch.autograd.Function):  # type: ignore[misc]
    """A straight-through estimator: what it computes has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        mask = x.abs() <= 1
        ctx.save_for_backward(mask)
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return grad * mask


class Activated(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int, activation: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.activation = activation

    def forward(self, x: Any) -> Any:
        x = self.norm(self.conv(x))
        return self.activation(x)


class Swish(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x * torch.sigmoid(x)


class EfficientSwish(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return SwishFunction.apply(x)


class Sign(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return SignFunction.apply(x)


def attention(query: Any, key: Any, value: Any, dropout: nn.Module) -> tuple[Any, Any]:
    scores = torch.matmul(query, key.transpose(-2, -1)) / query.size(-1) ** 0.5
    weights = dropout(scores.softmax(dim=-1))
    return torch.matmul(weights, value), weights


class Attends(nn.Module):  # type: ignore[misc]
    """Attention as tutorials write it, which keeps its weights for plots."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.weights = heads, None
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def split(self, x: Any) -> Any:
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x: Any) -> Any:
        query, key, value = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        y, self.weights = attention(query, key, value, self.dropout)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class AttendsInLines(Attends):
    def forward(self, x: Any) -> Any:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(query, key.transpose(-2, -1)) / query.size(-1) ** 0.5
        self.weights = self.dropout(scores.softmax(dim=-1))
        y = torch.matmul(self.weights, value)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Tokens(nn.Module):  # type: ignore[misc]
    def __init__(self, make: Callable[[], nn.Module], depth: int = 3, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        for layer, norm in zip(self.layers, self.norms):  # noqa: B905
            x = x + layer(norm(x))
        return self.head(x.mean(1))


class Coder(nn.Module):  # type: ignore[misc]
    """Methods that no trace shows, each called in a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.narrow = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Conv2d(16, 4, 1)
        self.wide, self.up = nn.Conv2d(4, 16, 1), nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1)

    def encode(self, x: Any) -> Any:
        x = F.relu(self.down(x))
        return F.relu(self.narrow(x))

    def decode(self, z: Any) -> Any:
        z = F.relu(self.wide(z))
        return torch.sigmoid(self.up(z))

    def forward(self, x: Any) -> Any:
        z = self.encode(x)
        return self.decode(z)


class Mixer(nn.Module):  # type: ignore[misc]
    """Convolutions, and layers on tokens whose activations are not in place."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, width, 3, 2, 1))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


class Latents(nn.Module):  # type: ignore[misc]
    """Learned queries that are repeated for each sample, and keys and values of one layer."""

    def __init__(self, width: int = 64, count: int = 24) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(count, width))
        self.to_q, self.to_kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        q = self.to_q(self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1))
        k, v = self.to_kv(x).chunk(2, dim=-1)
        y = torch.einsum("bid,bjd->bij", q, k).softmax(-1)
        y = torch.einsum("bij,bjd->bid", y, v)
        return self.head(y.mean(1))


class Upcast(nn.Module):  # type: ignore[misc]
    """Logits in float32, whatever the layers compute in."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, 200)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.body(x))
        return self.head(x).float()


class Distances(nn.Module):  # type: ignore[misc]
    """A graph of near points: `cdist`, of which the exporter of ONNX makes a matrix product, and a bound of a sum."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        near = torch.exp(-(torch.cdist(x, x) ** 2))
        total = near.sum(-1, keepdim=True).clamp(min=1)
        x = F.elu(torch.bmm(near / total, self.inner(x)))
        return self.head(x.mean(1))


def tokens(batch: int) -> tuple[Any, ...]:
    return (torch.randn(batch, 96, 64),)


def signal(batch: int) -> tuple[Any, ...]:
    return (torch.randn(batch, 3, 200),)


def image(batch: int) -> tuple[Any, ...]:
    return (torch.randn(batch, 3, 32, 32),)


# name -> the model, its input at a batch size
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "without_autocast": (lambda: Stack(WithoutAutocast), image),
    "with_autocast": (lambda: Stack(WithAutocast), image),
    "without_gradient": (lambda: Stack(WithoutGradient), image),
    "modulated": (lambda: Stack(Modulated), image),
    "weight_norm": (lambda: Causal(torch.nn.utils.weight_norm, 48), signal),
    "weight_norm_small": (lambda: Causal(torch.nn.utils.weight_norm, 8), signal),
    "weight_norm_parametrized": (lambda: Causal(torch.nn.utils.parametrizations.weight_norm, 8), signal),
    "swish": (lambda: Stack(lambda channels: Activated(channels, Swish())), image),
    "efficient_swish": (lambda: Stack(lambda channels: Activated(channels, EfficientSwish())), image),
    "sign": (lambda: Stack(lambda channels: Activated(channels, Sign())), image),
    "attends": (lambda: Tokens(Attends), tokens),
    "attends_in_lines": (lambda: Tokens(AttendsInLines), tokens),
    "coder": (Coder, image),
    "mixer": (Mixer, image),
    "latents": (Latents, tokens),
    "upcast": (Upcast, tokens),
    "distances": (Distances, tokens),
    "checkpoints_off": (lambda: Switched(False), image),
    "checkpoints_reentrant": (lambda: Switched(True, reentrant=True), image),
}
