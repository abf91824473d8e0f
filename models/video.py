"""Networks for video whose training others measured on GPUs: the ones of `docs/generated/hardware-readings.md`.

Written from the papers: C3D (arXiv 1412.0767), I3D (1705.07750), SlowFast and its slow path alone (1812.03982), TSM
(1811.08383), R(2+1)D (1711.11248), ir-CSN (1904.02811). Videos are [batch, channels, frames, height, width]; TSM has
[batch, frames, channels, height, width].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

DEPTHS = {34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
WIDTHS = (64, 128, 256, 512)


class Convolution(nn.Sequential):
    """3-D convolution that keeps the size where its stride is 1, batch norm, and relu in place if asked."""

    def __init__(
        self, channels: int, width: int, kernel: tuple[int, int, int], stride: tuple[int, int, int] = (1, 1, 1),
        relu: bool = True, groups: int = 1,
    ) -> None:  # fmt: skip
        padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
        layers: list[nn.Module] = [
            nn.Conv3d(channels, width, kernel, stride, padding, groups=groups, bias=False),
            nn.BatchNorm3d(width),
        ]
        super().__init__(*layers, *([nn.ReLU(inplace=True)] if relu else []))


class Residual(nn.Module):
    """A bottleneck: 1x1x1 (or 3x1x1 over time), 1x3x3 (or depthwise 3x3x3), 1x1x1."""

    def __init__(self, channels: int, width: int, stride: int, time: int = 1, depthwise: bool = False) -> None:
        super().__init__()
        first, out = (1, stride, stride), 4 * width
        spatial = (3, 3, 3) if depthwise else (1, 3, 3)
        if depthwise:
            first = (stride, stride, stride)
        self.conv1 = Convolution(channels, width, (time, 1, 1))
        self.conv2 = Convolution(width, width, spatial, first, groups=width if depthwise else 1)
        self.conv3 = Convolution(width, out, (1, 1, 1), relu=False)
        project = channels != out or stride > 1
        self.downsample = Convolution(channels, out, (1, 1, 1), first, relu=False) if project else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv3(self.conv2(self.conv1(x)))
        identity = x if self.downsample is None else self.downsample(x)
        out = out + identity
        output: Tensor = self.relu(out)
        return output


class Classifier(nn.Module):
    """Mean over time and place, dropout, linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.pool, self.dropout = nn.AdaptiveAvgPool3d((1, 1, 1)), nn.Dropout(0.5)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.pool(x))
        x = x.view(x.shape[0], -1)
        output: Tensor = self.fc(x)
        return output


def stages(
    depth: int, channels: int, base: int = 64, time: tuple[tuple[int, ...], ...] = ((1,),) * 4, extra: int = 0,
    depthwise: bool = False,
) -> list[nn.Sequential]:  # fmt: skip
    """The four stages of a bottleneck network. `time`: the temporal kernels of a stage's blocks, in turns; `extra`:
    channels that a lateral connection adds before each stage, as a share of them."""
    made = []
    for stage, blocks in enumerate(DEPTHS[depth]):
        width, rows = base << stage, []
        for block in range(blocks):
            inputs = channels + (channels * extra // 8 if block == 0 else 0)
            kernel = time[stage][block % len(time[stage])]
            rows.append(Residual(inputs, width, 2 if stage and not block else 1, kernel, depthwise))
            channels = 4 * width
        made.append(nn.Sequential(*rows))
    return made


class Inflated(nn.Module):
    """I3D over ResNet, or the slow path of SlowFast alone, or ir-CSN."""

    def __init__(self, kind: str, classes: int, channels: int = 3, depth: int = 50) -> None:
        super().__init__()
        first, step, pool = {"i3d": (5, 2, 2), "slow": (1, 1, 1), "csn": (3, 1, 1)}[kind]
        time: tuple[tuple[int, ...], ...] = {
            "i3d": ((3,), (3, 1), (3, 1), (1, 3)), "slow": ((1,), (1,), (3,), (3,)), "csn": ((1,),) * 4,
        }[kind]  # fmt: skip
        self.stem = Convolution(channels, 64, (first, 7, 7), (step, 2, 2))
        self.pool = nn.MaxPool3d((1, 3, 3), (pool, 2, 2), (0, 1, 1))
        self.layers = nn.ModuleList(stages(depth, 64, time=time, depthwise=kind == "csn"))
        self.pool2 = nn.MaxPool3d((2, 1, 1), (2, 1, 1)) if kind == "i3d" else None
        self.head = Classifier(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 0 and self.pool2 is not None:
                x = self.pool2(x)
        output: Tensor = self.head(x)
        return output


class SlowFast(nn.Module):
    """Two paths: every `ratio`th frame with all channels, all frames with an eighth of them, and lateral convolutions.

    `resample`: frames are chosen by interpolation, which copies them, as mmaction2 does before 0.20.
    """

    def __init__(self, classes: int, depth: int = 50, ratio: int = 8, resample: bool = False) -> None:
        super().__init__()
        self.ratio, self.resample = ratio, resample
        self.slow_stem = Convolution(3, 64, (1, 7, 7), (1, 2, 2))
        self.fast_stem = Convolution(3, 8, (5, 7, 7), (1, 2, 2))
        self.pool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1))
        self.slow = nn.ModuleList(stages(depth, 64, time=((1,), (1,), (3,), (3,)), extra=2))
        self.fast = nn.ModuleList(stages(50, 8, base=8, time=((3,),) * 4))
        reach = 2 if ratio == 8 else 3
        self.lateral = nn.ModuleList(
            nn.Conv3d(width, 2 * width, (2 * reach + 1, 1, 1), (ratio, 1, 1), (reach, 0, 0), bias=False)
            for width in (8, 32, 64, 128)
        )
        self.pool_slow, self.pool_fast = nn.AdaptiveAvgPool3d((1, 1, 1)), nn.AdaptiveAvgPool3d((1, 1, 1))
        self.dropout, self.fc = nn.Dropout(0.5), nn.Linear(2048 + 256, classes)

    def frames(self, x: Tensor, share: float) -> Tensor:
        """A share of the frames."""
        if self.resample:
            return nn.functional.interpolate(x, mode="nearest", scale_factor=(share, 1.0, 1.0))
        return x[:, :, :: round(1 / share)]

    def forward(self, x: Tensor) -> Tensor:
        few = self.frames(x, 1 / self.ratio)
        slow = self.pool(self.slow_stem(few))
        x = self.frames(x, 1.0)
        fast = self.pool(self.fast_stem(x))
        for slow_stage, fast_stage, lateral in zip(self.slow, self.fast, self.lateral, strict=True):
            slow = slow_stage(torch.cat((slow, lateral(fast)), dim=1))
            fast = fast_stage(fast)
        x = torch.cat((self.pool_slow(slow), self.pool_fast(fast)), dim=1)
        x = self.dropout(x)
        output: Tensor = self.fc(x.view(x.shape[0], -1))
        return output


class Shifted(nn.Module):
    """A convolution of frames, of whose input an eighth of the channels comes from the next frame and an eighth from
    the one before."""

    def __init__(self, convolution: nn.Module, frames: int) -> None:
        super().__init__()
        self.convolution, self.frames = convolution, frames

    def forward(self, x: Tensor) -> Tensor:
        rows, channels, height, width = x.shape
        x = x.view(-1, self.frames, channels, height * width)
        fold = channels // 8
        left, right, rest = x[:, :, :fold], x[:, :, fold : 2 * fold], x[:, :, 2 * fold :]
        zeros = left - left
        blank = zeros[:, :1]
        left = torch.cat((left[:, 1:], blank), 1)
        zeros = right - right
        blank = zeros[:, :1]
        right = torch.cat((blank, right[:, :-1]), 1)
        x = torch.cat((left, right, rest), dim=2)
        output: Tensor = self.convolution(x.view(rows, channels, height, width))
        return output


class FrameConvolution(nn.Sequential):
    """2-D convolution, batch norm, and relu in place if asked."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int = 1, relu: bool = True, frames: int = 0):
        convolution: nn.Module = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
        layers = [Shifted(convolution, frames) if frames else convolution, nn.BatchNorm2d(width)]
        super().__init__(*layers, *([nn.ReLU(inplace=True)] if relu else []))


class FrameBlock(nn.Module):
    """A bottleneck of ResNet whose first convolution is shifted in time."""

    def __init__(self, channels: int, width: int, stride: int, frames: int) -> None:
        super().__init__()
        self.conv1 = FrameConvolution(channels, width, 1, frames=frames)
        self.conv2 = FrameConvolution(width, width, 3, stride)
        self.conv3 = FrameConvolution(width, 4 * width, 1, relu=False)
        project = channels != 4 * width
        self.downsample = FrameConvolution(channels, 4 * width, 1, stride, relu=False) if project else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv3(self.conv2(self.conv1(x)))
        if self.downsample is not None:
            identity = self.downsample(x)
        out = out + identity
        output: Tensor = self.relu(out)
        return output


class TemporalShift(nn.Module):
    """TSM over ResNet: videos are frames of one large batch, and the classes of a video are the mean of its frames'."""

    def __init__(self, classes: int, frames: int = 8, depth: int = 50) -> None:
        super().__init__()
        self.frames = frames
        self.stem, self.pool = FrameConvolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], 64
        for stage, count in enumerate(DEPTHS[depth]):
            for block in range(count):
                width, stride = WIDTHS[stage], 2 if stage and not block else 1
                shifts = depth == 50 or block % 2 == 0  # every second block where stage 3 has 23 of them
                blocks.append(FrameBlock(channels, width, stride, frames if shifts else 0))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.mean, self.dropout = nn.AdaptiveAvgPool2d((1, 1)), nn.Dropout(0.5)
        self.fc = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, *x.shape[2:])
        x = self.blocks(self.pool(self.stem(x)))
        x = torch.flatten(self.mean(x), 1)
        x = self.dropout(x)
        classes = self.fc(x)
        classes = classes.view(-1, self.frames, classes.shape[-1])
        output: Tensor = classes.mean(dim=1, keepdim=True).squeeze(1)
        return output


class FactoredConvolution(nn.Module):
    """A 3x3x3 convolution as one over the place and one over time, with as many weights together."""

    def __init__(self, channels: int, width: int, size: int, stride: tuple[int, int, int], time: int) -> None:
        super().__init__()
        # the paper's formula for a kernel of 3 frames, which mmaction2 takes for shortcuts of one frame too
        middle = 3 * size * size * channels * width // (size * size * channels + 3 * width)
        step, place = stride[0], stride[1]
        self.spatial = Convolution(channels, middle, (1, size, size), (1, place, place))
        self.temporal = nn.Conv3d(middle, width, (time, 1, 1), (step, 1, 1), (time // 2, 0, 0), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.temporal(self.spatial(x))
        return output


class FactoredBlock(nn.Module):
    """A basic block of ResNet with factored convolutions."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        step = (stride, stride, stride)
        self.conv1 = FactoredConvolution(channels, width, 3, step, 3)
        self.norm1, self.norm2 = nn.BatchNorm3d(width), nn.BatchNorm3d(width)
        self.conv2 = FactoredConvolution(width, width, 3, (1, 1, 1), 3)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if channels != width:
            shortcut = FactoredConvolution(channels, width, 1, step, 1)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm3d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        identity = x if self.downsample is None else self.downsample(x)
        out = out + identity
        output: Tensor = self.relu(out)
        return output


class Factored(nn.Module):
    """R(2+1)D over ResNet-34."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        stem = FactoredConvolution(3, 64, 7, (1, 2, 2), 3)
        self.stem = nn.Sequential(stem, nn.BatchNorm3d(64), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1))
        blocks, channels = [], 64
        for stage, count in enumerate(DEPTHS[34]):
            for block in range(count):
                blocks.append(FactoredBlock(channels, WIDTHS[stage], 2 if stage and not block else 1))
                channels = WIDTHS[stage]
        self.blocks, self.head = nn.Sequential(*blocks), Classifier(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(self.pool(self.stem(x))))
        return output


class C3d(nn.Module):
    """Eight 3x3x3 convolutions with biases, and three linear layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count, pool in ((64, 1, 1), (128, 1, 2), (256, 2, 2), (512, 2, 2), (512, 2, 2)):
            for _ in range(count):
                layers += [nn.Conv3d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            last = len(layers) == 16 + 5 - 1
            layers.append(nn.MaxPool3d((pool, 2, 2), (pool, 2, 2), (0, 1, 1) if last else 0))
        self.features = nn.Sequential(*layers)
        self.fc6, self.fc7, self.fc8 = nn.Linear(8192, 4096), nn.Linear(4096, 4096), nn.Linear(4096, classes)
        self.relu, self.dropout = nn.ReLU(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(start_dim=1)
        x = self.dropout(self.relu(self.fc6(x)))
        x = self.dropout(self.relu(self.fc7(x)))
        output: Tensor = self.fc8(x)
        return output


NETWORKS = {kind.__name__: kind for kind in (C3d, Factored, Inflated, SlowFast, TemporalShift)}


def example(name: str, sizes: dict[str, Any], shape: list[int]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network on the meta device in training mode, and a batch of videos of a shape."""
    with torch.device("meta"):
        network: nn.Module = NETWORKS[name](**sizes)
        return network.train(), (torch.empty(shape),)
