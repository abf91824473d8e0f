"""Signs that an export is not the model as it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from staticmem.graph.ir import Note, Op
from staticmem.recover.nodes import Net

_NORMS = ("aten::batch_norm", "aten::layer_norm", "aten::group_norm", "aten::instance_norm", "aten::rms_norm")
MIN_CONVOLUTIONS = 3


def folded_norms(net: Net, ops: Sequence[Op]) -> list[Note]:
    """A warning where every convolution has a bias and nothing is normalised: BatchNorm is usually folded then.

    Networks that never had one (AlexNet, VGG, SqueezeNet) look the same unless module names show it: a convolution
    whose next module in the same container is the activation has no BatchNorm between them.
    """
    if not net.producer.startswith("pytorch") or net.aliases:
        return []  # a dynamo export names its parameters: a norm would be among them
    convs = [op for op in ops if op.base in ("aten::conv2d", "aten::conv1d", "aten::conv3d")]
    if len(convs) < MIN_CONVOLUTIONS:
        return []
    if any(op.base in _NORMS for op in ops):
        return []
    if any(len(op.args) < 3 or op.args[2] is None for op in convs):
        return []
    if _neighbours(ops):
        return []
    text = (
        "every convolution has a bias and nothing is normalised: if this model had BatchNorm, the export folded it, "
        "and training memory is underestimated (export with training=TrainingMode.TRAINING and "
        "do_constant_folding=False, or with optimize=False)"
    )
    return [Note("warning", "SM261", text)]


def _neighbours(ops: Sequence[Op]) -> bool:
    """Whether activations directly follow convolutions in numbered containers: `features.0`, then `features.1`."""
    hits = total = 0
    for conv, after in pairwise(ops):
        if not conv.base.startswith("aten::conv") or after.base not in ("aten::relu", "aten::hardtanh", "aten::silu"):
            continue
        if not conv.modules or not after.modules:
            continue
        a, b = conv.modules[-1].path, after.modules[-1].path
        head, _, number = a.rpartition(".")
        total += 1
        if number.isdigit():
            hits += b == (f"{head}." if head else "") + str(int(number) + 1)
        else:  # named modules, as in SqueezeNet: squeeze, squeeze_activation
            hits += b.startswith(a)
    return total > 0 and hits * 2 > total
