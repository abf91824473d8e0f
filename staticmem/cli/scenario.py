"""Flags that say what is analysed: sizes, the step, the device. One flag means one thing in every verb.

A flag that is not given is None, so that a config file can fill it and `Request` has the last word on defaults.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from staticmem.cli.values import dimension, one_of, positive, resolution
from staticmem.errors import UsageError

if TYPE_CHECKING:
    from staticmem.analysis import Request


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an .onnx or .pt2 file, or - for stdin")


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """The groups "sizes", "the step" and "the device"."""
    _add_sizes(parser)
    _add_step(parser)
    _add_device(parser)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("-b", "--batch", type=positive("--batch"), metavar="N", help="batch size (axis 0 of the inputs)")
    sizes.add_argument("--resolution", type=resolution, metavar="N|HxW", help="height and width of image inputs")
    sizes.add_argument(
        "--dim", type=dimension, action="append", metavar="NAME=N",
        help="size of an open dimension; repeatable",
    )  # fmt: skip


def _add_step(parser: argparse.ArgumentParser) -> None:
    step = parser.add_argument_group("the step")
    step.add_argument("--optimizer", metavar="NAME", help="sgd, adam, adamw, rmsprop, adagrad; makes it training")
    step.add_argument("--optimizer-impl", metavar="IMPL", help="foreach (default, as on CUDA), fused, for-loop")
    step.add_argument("--momentum", type=float, metavar="M", help="momentum of sgd (default 0)")
    step.add_argument("--mode", metavar="MODE", help="train or infer (default: train if an optimizer is given)")
    step.add_argument(
        "--loss", metavar="LOSS",
        help="auto (default, by the output's shape), cross-entropy, mse, mean, none",
    )  # fmt: skip
    step.add_argument("--dtype", metavar="TYPE", help="cast the whole model: fp32, fp16, bf16")
    step.add_argument("--amp", metavar="TYPE", help="mixed precision as torch.autocast: fp16, bf16, none")
    step.add_argument(
        "--sdpa", metavar="KERNEL",
        help="attention kernel: auto (default, as PyTorch chooses on an sm_90 GPU), cudnn, flash, efficient, math",
    )  # fmt: skip
    step.add_argument(
        "--unfold-batchnorm", action="store_true", default=None,
        help="put a batch norm behind every convolution with a bias, for files whose norms were folded",
    )  # fmt: skip
    step.add_argument(
        "--inplace-activations", metavar="POLICY",
        help="what ran in place, where the file does not say (ONNX): auto (default), none, all",
    )  # fmt: skip
    step.add_argument(
        "--method", type=one_of("--method", ("liveness", "textbook")), metavar="METHOD",
        help="liveness (default); textbook shows the textbook estimate beside it",
    )  # fmt: skip


def _add_device(parser: argparse.ArgumentParser) -> None:
    device = parser.add_argument_group("the device")
    device.add_argument(
        "--gpu", metavar="NAME|SIZE",
        help="a card (h100-sxm-80gb, rtx-4090, 24GB): adds allocated, reserved and device memory, and whether it fits",
    )  # fmt: skip


def request(args: argparse.Namespace, **more: Any) -> Request:
    """The request of parsed flags; `more` has what other flags of the verb decide.

    Raises:
        UsageError: flags that contradict each other.
    """
    from staticmem.analysis.request import FIELDS, request_of

    words = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    words["dims"] = _dims(args.dim or [])
    return request_of(words | more)


def _dims(pairs: list[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in pairs:
        if found.setdefault(name, size) != size:
            raise UsageError(
                f"--dim {name} is given twice",
                f"Once as {found[name]} and once as {size}.",
                "Give one size for it.",
                code="SM113",
            )
    return found
