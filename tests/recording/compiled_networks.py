"""Networks of layers as people combine them, for the memory of their compiled steps. Each gives ten numbers a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Rays(nn.Module):  # type: ignore[misc]
    """Samples along rays: densities and colours, and what is left of the light at each (a radiance field)."""

    sizes = ((1024, 32, 3),)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(6))
        widths = (39, 128, 128 + 39, 128)
        self.layers, self.out = nn.ModuleList(nn.Linear(width, 128) for width in widths), nn.Linear(128, 11)

    def forward(self, x: Any) -> Any:
        turns = (x[..., None] * self.frequencies).flatten(-2)
        encoded = torch.cat([x, turns.sin(), turns.cos()], -1)
        h = encoded
        for at, layer in enumerate(self.layers):
            h = F.relu(layer(torch.cat([h, encoded], -1) if at == 2 else h))
        out = self.out(h)
        alpha = 1 - torch.exp(-F.softplus(out[..., :1]) * 0.1)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return (alpha * left * torch.sigmoid(out[..., 1:])).sum(1)


class Towers(nn.Module):  # type: ignore[misc]
    """Images and words, each to a vector of length 1, and their products at a learned temperature."""

    sizes = ((32, 3, 64, 64), (32, 20))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.SiLU()]
        self.images = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 64))
        self.words, self.word = nn.Embedding(1000, 64), nn.Linear(64, 64)
        self.temperature, self.scales = nn.Parameter(torch.tensor(2.6)), nn.Linear(64, 128)

    def forward(self, images: Any, words: Any) -> Any:
        image, text = self.images(images), self.word(self.words(words)).amax(1)
        scale, shift = self.scales(text).chunk(2, -1)
        image = F.normalize(image * (1 + scale) + shift, dim=-1)
        return (self.temperature.exp() * image @ F.normalize(text, dim=-1).t())[:, :10]


class Routed(nn.Module):  # type: ignore[misc]
    """Experts of limited capacity: tokens are put into their rows by index, and taken from there."""

    sizes = ((256, 32, 32),)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(32, 64), nn.Linear(64, 8, bias=False), nn.Linear(64, 10)
        self.up, self.down = nn.Parameter(torch.randn(8, 64, 128)), nn.Parameter(torch.randn(8, 128, 64))

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        tokens = h.flatten(0, 1)
        count = tokens.shape[0]
        room = count // 4
        weights, experts = self.gate(tokens).float().softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = F.one_hot(experts, 8)
        places = ((chosen.flatten(0, 1).cumsum(0).view(count, 2, 8) - 1) * chosen).sum(-1)
        fits = places < room
        row = torch.where(fits, experts * room + places, 8 * room)
        rows = torch.zeros(8 * room + 1, 64, device=x.device, dtype=tokens.dtype)
        rows = rows.index_put((row.flatten(),), tokens[:, None].expand(count, 2, 64).reshape(-1, 64))
        rows = torch.bmm(F.gelu(torch.bmm(rows[:-1].view(8, room, 64), self.up)), self.down).view(8 * room, 64)
        back = torch.cat([rows, torch.zeros_like(rows[:1])])[row]
        return self.head((tokens + (back * (weights * fits)[..., None]).sum(1)).view_as(h).mean(1))


class Enlarged(nn.Module):  # type: ignore[misc]
    """Three ways to images of twice the size, after instance norms and reflected borders."""

    sizes = ((32, 3, 64, 64),)

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, size, stride in ((3, 32, 7, 1), (32, 64, 3, 2)):
            layers += [nn.ReflectionPad2d(size // 2), nn.Conv2d(before, after, size, stride)]
            layers += [nn.InstanceNorm2d(after, affine=True), nn.ReLU(True)]
        self.down = nn.Sequential(*layers)
        self.same = nn.Sequential(
            nn.Conv2d(64, 64, 3, padding=1), nn.InstanceNorm2d(64), nn.PReLU(), nn.Conv2d(64, 64, 3, padding=1)
        )
        self.nearest, self.shuffled = nn.Conv2d(64, 32, 3, padding=1), nn.Conv2d(64, 128, 3, padding=1)
        self.linear, self.out = nn.Conv2d(64, 32, 1), nn.Conv2d(96, 10, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = self.down(x)
        y = y + self.same(y)
        parts = [
            self.nearest(F.interpolate(y, scale_factor=2, mode="nearest")),
            F.pixel_shuffle(self.shuffled(y), 2),
            F.interpolate(self.linear(y), scale_factor=2, mode="bilinear", align_corners=False),
        ]
        return torch.tanh(self.out(torch.cat(parts, 1))).mean((2, 3))


class Ranked(nn.Module):  # type: ignore[misc]
    """The best rows in order, running sums of them, and sums of those by segment."""

    sizes = ((256, 96, 24), (256, 96))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.score, self.out = nn.Linear(24, 64), nn.Linear(64, 1), nn.Linear(64, 10)
        self.keys, self.values = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Any, segments: Any) -> Any:
        h = F.relu(self.first(x))
        best, places = self.score(h)[..., 0].sort(1, descending=True)
        h = h.gather(1, places[:, :48, None].expand(-1, -1, 64)) * torch.sigmoid(best[:, :48, None])
        keys = F.elu(self.keys(h)) + 1
        means = (keys * self.values(h)).cumsum(1) / (keys.cumsum(1) + 1e-6)
        of_best = segments.gather(1, places[:, :48])[..., None].expand(-1, -1, 64)
        sums = torch.zeros(x.shape[0], 8, 64, device=x.device, dtype=means.dtype).scatter_add(1, of_best, means)
        return self.out(torch.logsumexp(sums, 1))


class Filtered(nn.Module):  # type: ignore[misc]
    """Filters of frequencies: complex numbers between a Fourier transform and its inverse."""

    sizes = ((32, 3, 64, 64),)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 10)
        self.filters = nn.ParameterList(nn.Parameter(torch.randn(16, 9, 32, 2)) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = self.first(x).permute(0, 2, 3, 1)
        for weights, norm, mix in zip(self.filters, self.norms, self.mixes, strict=True):
            spectrum = torch.fft.rfft2(norm(x).float(), dim=(1, 2), norm="ortho")
            spectrum = spectrum * torch.view_as_complex(weights.float())
            x = x + mix(torch.fft.irfft2(spectrum, s=(16, 16), dim=(1, 2), norm="ortho"))
        return self.head(x.mean((1, 2)))


class Waves(nn.Module):  # type: ignore[misc]
    """Dilated convolutions whose weights are normed, and a linear layer with spectral norm, as in models of sound."""

    sizes = ((64, 1, 512),)

    def __init__(self) -> None:
        super().__init__()
        of_weights = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(
            of_weights(nn.Conv1d(32 if at else 1, 32, 5, padding=2 * 2**at, dilation=2**at)) for at in range(4)
        )
        self.mixed, self.out = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        total: Any = 0
        for at, layer in enumerate(self.layers):
            y = F.leaky_relu(layer(x), 0.1, inplace=True)
            x = x + y if at else y
            total = total + y
        return self.out(F.elu(self.mixed(total.mean(2))))


class ScaledSquares(nn.Module):  # type: ignore[misc]
    """Convolutions in channels last, and squares of ReLU with one learned factor and one learned shift."""

    sizes = ((16, 3, 128, 128),)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up = nn.Conv2d(3, 96, 4, 4), nn.Conv2d(96, 192, 1)
        self.factor, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(192, 10)

    def forward(self, x: Any) -> Any:
        x = self.factor * F.relu(self.up(self.stem(x))) ** 2 + self.shift
        return self.head(x.mean((2, 3)))


class Depthwise(nn.Module):  # type: ignore[misc]
    """Patches that are mixed by depthwise convolutions and by ones of one element (ConvMixer)."""

    sizes = ((16, 3, 128, 128),)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norms = nn.Conv2d(3, 96, 4, 4), nn.ModuleList(nn.BatchNorm2d(96) for _ in range(4))
        self.places = nn.ModuleList(nn.Conv2d(96, 96, 5, padding=2, groups=96) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Conv2d(96, 96, 1) for _ in range(2))
        self.head = nn.Linear(96, 10)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for at, (place, mix) in enumerate(zip(self.places, self.mixes, strict=True)):
            x = x + self.norms[2 * at](F.gelu(place(x)))
            x = self.norms[2 * at + 1](F.gelu(mix(x)))
        return self.head(x.mean((2, 3)))


class RowsAndPixels(nn.Module):  # type: ignore[misc]
    """Normed residual blocks over pixels, over rows of tokens, and over pixels again, as in windowed attention."""

    sizes = ((8, 3, 128, 128),)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 192, 4, 4)
        self.products = nn.ModuleList(nn.Linear(192, 192) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(192) for _ in range(4))
        self.head = nn.Linear(192, 10)

    def forward(self, x: Any) -> Any:
        x = self.stem(x).permute(0, 2, 3, 1)
        batch, high, wide, count = x.shape
        for at, (product, norm) in enumerate(zip(self.products, self.norms, strict=False)):
            x = x.reshape(batch, high * wide, count) if at == 1 else x.reshape(batch, high, wide, count)
            x = x + norm(product(x))
        return self.head(self.norms[-1](x).mean((1, 2)))


class ActivatedInPlace(nn.Module):  # type: ignore[misc]
    """Products over rows with an activation that writes over their result."""

    sizes = ((8, 256, 128),)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.ReLU(inplace=True), nn.Linear(512, 128)) for _ in range(3)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class GroupsOfPixels(nn.Module):  # type: ignore[misc]
    """Group norms of images whose channels are last in memory, behind layer norms over channels."""

    sizes = ((16, 3, 128, 128),)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 96, 4, 4), nn.Linear(96, 10)
        self.rows, self.groups = nn.LayerNorm(96), nn.ModuleList(nn.GroupNorm(1, 96) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = self.rows(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for group in self.groups:
            x = x + F.avg_pool2d(group(x), 3, 1, 1)
        return self.head(x.mean((2, 3)))


class NormedChannels(nn.Module):  # type: ignore[misc]
    """Layer norms over the channels of images, written out, behind convolutions with a bias."""

    sizes = ((16, 3, 112, 112),)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 256, 4, 4), nn.Linear(256, 10)
        self.mixes = nn.ModuleList(nn.Conv2d(256, 256, 1) for _ in range(2))
        self.scales = nn.ParameterList(torch.ones(256, 1, 1) for _ in range(3))

    def forward(self, x: Any) -> Any:
        layers = [self.stem, *self.mixes]
        for layer, scale in zip(layers, self.scales, strict=True):
            x = F.gelu(layer(x))
            centred = x - x.mean(1, keepdim=True)
            x = centred / torch.sqrt(centred.square().mean(1, keepdim=True) + 1e-6) * scale
        return self.head(x.mean((2, 3)))


class NormedPixels(nn.Module):  # type: ignore[misc]
    """Depthwise convolutions behind layer norms of images that are turned for it."""

    sizes = ((8, 3, 112, 112),)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 96, 8, 8), nn.Linear(96, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Conv2d(96, 96, 7, padding=3, groups=96) for _ in range(2))
        self.points = nn.ModuleList(nn.Conv2d(96, 96, 1) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for norm, mix, point in zip(self.norms, self.mixes, self.points, strict=True):
            x = x + F.gelu(mix(norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)), approximate="tanh")
            centred = x - x.mean(1, keepdim=True)
            x = x + F.gelu(point(centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + 1e-6)))
        return self.head(x.mean((2, 3)))


class NormedFilters(nn.Module):  # type: ignore[misc]
    """Weights with one norm for each input channel, and one for all."""

    sizes = ((8, 16, 512),)

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first, self.second = (norm(nn.Conv1d(i, 64, 5, padding=2), dim=dim) for i in (16, 64))
        self.wide, self.head = norm(nn.Linear(64, 256), dim=dim), nn.Linear(256, 10)

    def forward(self, x: Any) -> Any:
        x = F.leaky_relu(self.first(x), 0.1)
        x = x + F.leaky_relu(self.second(x), 0.1)
        return self.head(F.gelu(self.wide(x.transpose(1, 2)))).mean(1)
