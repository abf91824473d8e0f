"""The example networks, written plainly: what the exports in this folder were made from.

They are the image classifiers that people measure tools with, with the module names, the in-place operators and the
parameter counts of the torchvision models of the same name, so a report on these files speaks of `layer1.0.conv1`
as a user's own export does. Nothing here sets weights: `export.py` builds every network on the meta device.

Sources: He et al. 2015 (ResNet; the stride of a bottleneck sits on its 3x3 convolution), Simonyan and Zisserman 2014
(VGG, configurations D and E), Sandler et al. 2018 (MobileNetV2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def seed() -> nn.Sequential:
    """The worked example: three convolutions, 112,576 parameters; made for an input of 1x3x682x700."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(64, 128, 3, padding=1),
    )


# ---------------------------------------------------------------------------------------------------------- VGG

VGG_16: tuple[int | str, ...] = (
    64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool",
)  # fmt: skip
VGG_19: tuple[int | str, ...] = (
    64, 64, "pool", 128, 128, "pool", 256, 256, 256, 256, "pool",
    512, 512, 512, 512, "pool", 512, 512, 512, 512, "pool",
)  # fmt: skip


class VGG(nn.Module):
    """Stacks of 3x3 convolutions and three linear layers. Images [N, 3, H, W] to scores [N, classes]."""

    def __init__(self, plan: Sequence[int | str], classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for step in plan:
            if isinstance(step, int):
                layers += [nn.Conv2d(channels, step, 3, padding=1), nn.ReLU(inplace=True)]
                channels = step
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


def vgg16() -> VGG:
    """Configuration D: 13 convolutions, 138,357,544 parameters."""
    return VGG(VGG_16)


def vgg19() -> VGG:
    """Configuration E: 16 convolutions, 143,667,240 parameters."""
    return VGG(VGG_19)


# ------------------------------------------------------------------------------------------------------- ResNet


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. The sum is written in place into the branch, as its users' code does."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the last widens by four."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, one linear layer. Images [N, 3, H, W] to scores [N, classes]."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], classes: int = 1000) -> None:
        super().__init__()
        self.channels = 64
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(block, 64, depths[0], 1)
        self.layer2 = self._stage(block, 128, depths[1], 2)
        self.layer3 = self._stage(block, 256, depths[2], 2)
        self.layer4 = self._stage(block, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, classes)

    def _stage(self, block: type[BasicBlock] | type[Bottleneck], width: int, depth: int, stride: int) -> nn.Sequential:
        blocks: list[nn.Module] = []
        for index in range(depth):
            step = stride if index == 0 else 1
            out = width * block.expansion
            downsample = None
            if step != 1 or self.channels != out:
                downsample = nn.Sequential(
                    nn.Conv2d(self.channels, out, 1, stride=step, bias=False), nn.BatchNorm2d(out)
                )
            blocks.append(block(self.channels, width, step, downsample))
            self.channels = out
        return nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


def resnet18() -> ResNet:
    """Basic blocks 2-2-2-2: 11,689,512 parameters."""
    return ResNet(BasicBlock, (2, 2, 2, 2))


def resnet50() -> ResNet:
    """Bottlenecks 3-4-6-3: 25,557,032 parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3))


# -------------------------------------------------------------------------------------------------- MobileNetV2


def _conv_norm_relu6(inside: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inside, out, kernel, stride, padding=(kernel - 1) // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Widen with 1x1, filter depthwise with 3x3, narrow with 1x1; a shortcut where the shape allows one."""

    def __init__(self, inside: int, out: int, stride: int, widen: int) -> None:
        super().__init__()
        hidden = inside * widen
        layers: list[nn.Module] = [_conv_norm_relu6(inside, hidden, 1)] if widen != 1 else []
        layers.append(_conv_norm_relu6(hidden, hidden, 3, stride, groups=hidden))
        layers += [nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.conv = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inside == out

    def forward(self, x: Tensor) -> Tensor:
        if self.shortcut:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    """Inverted residuals between two plain convolutions. Images [N, 3, H, W] to scores [N, classes]."""

    # widening, channels, blocks, stride of the first block
    plan = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_norm_relu6(3, 32, 3, stride=2)]
        channels = 32
        for widen, out, blocks, stride in self.plan:
            for index in range(blocks):
                layers.append(InvertedResidual(channels, out, stride if index == 0 else 1, widen))
                channels = out
        layers.append(_conv_norm_relu6(channels, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = functional.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        return self.classifier(x)


def mobilenet_v2() -> MobileNetV2:
    """Width 1.0: 3,504,872 parameters."""
    return MobileNetV2()


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": mobilenet_v2,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "seed": seed,
    "vgg16": vgg16,
    "vgg19": vgg19,
}
