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
    "checkpoints_off": (lambda: Switched(False), image),
    "checkpoints_reentrant": (lambda: Switched(True, reentrant=True), image),
}
