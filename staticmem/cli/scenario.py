"""Flags that say what is analysed: sizes, the step, the device. One flag means one thing in every verb.

A flag that is not given is None, so that a config file can fill it and `Request` has the last word on defaults.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from staticmem.cli.values import dimension, one_of, positive, resolution, segments
from staticmem.errors import UsageError

if TYPE_CHECKING:
    from staticmem.config.config import Config
    from staticmem.studies import Request


def add_model(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """The model; `optional` where a config may name it (`model_of` resolves that)."""
    text = "an .onnx or .pt2 file, or - for stdin"
    if optional:
        parser.add_argument(
            "model", metavar="MODEL", nargs="?", help=f"{text}; may be left out where a config names it"
        )
    else:
        parser.add_argument("model", metavar="MODEL", help=text)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Flags of the config file, which flags override."""
    config = parser.add_argument_group("settings")
    config.add_argument(
        "--config", metavar="FILE", help="a config (default: staticmem.yaml from here up to the repository's root)"
    )
    config.add_argument("--no-config", action="store_true", help="no config file but that of --config")


def add_scenario(parser: argparse.ArgumentParser, many_gpus: bool = False) -> None:
    """The groups "settings", "sizes", "the step" and "the device"."""
    add_config(parser)
    _add_sizes(parser)
    _add_step(parser)
    _add_device(parser, many_gpus)


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
    step.add_argument("--momentum", type=float, metavar="M", help="momentum of sgd or rmsprop (default 0)")
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
    _add_levers(parser)
    step.add_argument(
        "--method", type=one_of("--method", ("liveness", "textbook")), metavar="METHOD",
        help="liveness (default); textbook shows the textbook estimate beside it",
    )  # fmt: skip


def _add_levers(parser: argparse.ArgumentParser) -> None:
    levers = parser.add_argument_group("levers of the step")
    levers.add_argument(
        "--checkpoint", action="append", metavar="CLASS|PATH",
        help="modules that run under torch.utils.checkpoint, by class (Bottleneck) or path (layer1.*); repeatable",
    )  # fmt: skip
    levers.add_argument(
        "--checkpoint-every", type=positive("--checkpoint-every"), metavar="K",
        help="so many of them that follow each other share one checkpoint (default 1)",
    )  # fmt: skip
    levers.add_argument(
        "--checkpoint-segments", type=segments, metavar="N|sqrt",
        help="segments of checkpoint_sequential over the largest Sequential, or that of --checkpoint-sequential",
    )  # fmt: skip
    levers.add_argument("--checkpoint-sequential", metavar="PATH", help="the Sequential that is divided into segments")
    levers.add_argument(
        "--accumulate", type=positive("--accumulate"), metavar="N",
        help="micro-batches a step; --batch is the size of one (default 1)",
    )  # fmt: skip
    levers.add_argument(
        "--parallel", metavar="STRATEGY",
        help="what one of --devices GPUs holds under ddp, zero1, zero2, zero3, fsdp, tp or pp",
    )  # fmt: skip
    levers.add_argument(
        "--devices", type=positive("--devices"), metavar="N", help="GPUs that share the work of --parallel"
    )
    levers.add_argument("--freeze", metavar="REGEX", help="parameters whose name matches are not trained")
    levers.add_argument("--weight-decay", type=float, metavar="W", help="of the optimizer (default 0)")
    levers.add_argument("--dampening", type=float, metavar="D", help="of sgd with momentum (default 0)")
    for flag, text in _SWITCHES.items():
        levers.add_argument(flag, action="store_true", default=None, help=text)
    levers.add_argument(
        "--no-set-to-none", dest="set_to_none", action="store_false", default=None,
        help="zero_grad(set_to_none=False): gradients stay, zeroed",
    )  # fmt: skip


_SWITCHES = {
    "--nesterov": "of sgd with momentum",
    "--amsgrad": "of adam and adamw",
    "--centered": "of rmsprop",
    "--offload-optimizer": "optimizer state and update on the CPU",
    "--grad-scaler": "torch.amp.GradScaler around loss and step",
    "--clip-grad-norm": "clip_grad_norm_ before the step",
}


def _add_device(parser: argparse.ArgumentParser, many_gpus: bool) -> None:
    device = parser.add_argument_group("the device")
    text = "a card (h100-sxm-80gb, rtx-4090, 24GB), and whether the step fits it"
    device.add_argument(
        "--gpu", metavar="NAME|SIZE", action="append" if many_gpus else "store",
        help=f"{text}; repeatable" if many_gpus else f"{text} (default: an H100 is assumed)",
    )  # fmt: skip
    device.add_argument("--gpus-file", metavar="FILE", help="YAML with cards of your own, over those of the package")
    device.add_argument(
        "--alloc-conf", metavar="CONF",
        help="settings of the allocator, as PYTORCH_ALLOC_CONF: expandable_segments:True,...",
    )  # fmt: skip
    device.add_argument("--torch-version", metavar="V", help="the PyTorch that runs, e.g. 2.13 (default)")
    device.add_argument(
        "--module-loading", metavar="WHEN",
        help="when kernels come to the card: lazy, or eager (default: as --torch-version does, eager before 1.13)",
    )  # fmt: skip
    device.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=None,
        help="float32 convolutions on tensor cores, as PyTorch does by default",
    )  # fmt: skip
    device.add_argument(
        "--channels-last", action="store_true", default=None, help="model and inputs are in torch.channels_last"
    )
    device.add_argument(
        "--cudnn-benchmark", action="store_true", default=None, help="torch.backends.cudnn.benchmark is on"
    )
    device.add_argument(
        "--cudnn", metavar="SOURCE",
        help="who is asked for workspaces of convolutions: tables (default), or an installed library",
    )  # fmt: skip
    device.add_argument("--profile", metavar="FILE", help="YAML with your own figures of context, libraries and cuBLAS")


def request(args: argparse.Namespace, **more: Any) -> Request:
    """The request of parsed flags over the config's settings; `more` has what other flags of the verb decide.

    Raises:
        UsageError: flags that contradict each other.
        ConfigError: the config has what is not known.
    """
    from staticmem.scenario.request import request_of

    words = {**flags(args), **{name: value for name, value in more.items() if value is not None}}
    config = settings(args)
    if config is not None:
        from staticmem.config.discover import combined

        below = dict(config.words)
        if getattr(args, "model", None) not in (None, config.model):
            below.pop("dims", None)  # dimensions have the names of a model
        words = combined(below, words)
        if config.gpus:
            words.setdefault("gpu", config.gpus[0])
    return request_of(words)


def flags(args: argparse.Namespace) -> dict[str, Any]:
    """The words that flags give, by the names of `Request`; those that are not given are not in it."""
    from staticmem.scenario.request import FIELDS

    words = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    words["dims"] = _dims(args.dim or []) or None
    words["checkpoint"] = tuple(args.checkpoint) if args.checkpoint else None
    return {name: value for name, value in words.items() if value is not None}


def settings(args: argparse.Namespace) -> Config | None:
    """The config that holds, and variables of the environment over it; None where there is neither."""
    if not hasattr(args, "settings"):
        args.settings = _settings(args)
    found: Config | None = args.settings
    return found


def config_of(args: argparse.Namespace) -> Config:
    """The config of a verb that takes CONFIG|MODEL; `args.model` is None afterwards where it is a config.

    Raises:
        UsageError: a config is given twice.
    """
    from staticmem.config.config import Config
    from staticmem.studies.sweeps.sweep import is_config

    if args.model is not None and is_config(args.model):
        if args.config is not None:
            raise UsageError(
                "two configs are given", f"{args.model} and --config {args.config}.", "Give one of them.", "SM197"
            )
        args.config, args.model = args.model, None
    return settings(args) or Config()


def _settings(args: argparse.Namespace) -> Config | None:
    from staticmem.config import locate

    if args.config is None and not locate.anything(search=not args.no_config):
        return None
    from staticmem.config.discover import settings as read

    found = read(args.config, not args.no_config)
    if found.file is not None and args.config is None and not getattr(args, "quiet", False):
        sys.stderr.write(f"Using {found.file}\n")
    return found


def model_of(args: argparse.Namespace) -> str:
    """The model of the command line, else that of the config.

    Raises:
        UsageError: neither names one.
    """
    config = settings(args)
    if args.model is not None:
        return str(args.model)
    if config is not None and config.model is not None:
        return config.model
    raise UsageError(
        "no model to analyse",
        "Neither the command line nor a config names one.",
        "Example: staticmem analyze model.pt2; 'staticmem init' writes a config.",
        code="SM198",
    )


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
