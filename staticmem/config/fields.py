"""The keys of a config, each with its kind, a sentence, and an example. Loader, JSON Schema and template read this.

Keys of a step are the fields of `Request`, under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from staticmem.config.document import Node
from staticmem.config.kinds import (
    Bytes,
    Either,
    Entry,
    Flag,
    Fraction,
    Kind,
    Named,
    Resolution,
    Several,
    Table,
    Text,
    Whole,
    Word,
    wrong,
)

VERSION = 1
METRICS = ("live", "allocated", "reserved", "device")
LEVELS = ("error", "warning")


def _optimizers() -> Sequence[str]:
    from staticmem.scenario.step import OPTIMIZERS

    return OPTIMIZERS


def _optimizers_or_none() -> Sequence[str]:
    return (*_optimizers(), "none")


def _implementations() -> Sequence[str]:
    from staticmem.scenario.step import IMPLEMENTATIONS

    return IMPLEMENTATIONS


def _losses() -> Sequence[str]:
    from staticmem.scenario.step import LOSSES

    return LOSSES


def _sdpa() -> Sequence[str]:
    from staticmem.scenario.step import SDPA_KERNELS

    return SDPA_KERNELS


def modes() -> Sequence[str]:
    from staticmem.scenario.step import MODES

    return MODES


def _strategies() -> Sequence[str]:
    from staticmem.scenario.parallel import STRATEGIES

    return ("none", *STRATEGIES)


def _in_place() -> Sequence[str]:
    from staticmem.scenario.step import INPLACE_ACTIVATIONS

    return INPLACE_ACTIVATIONS


_TYPES = ("none", "fp32", "fp16", "bf16")


def _precisions() -> Sequence[str]:
    return (*_TYPES, "float32", "float16", "bfloat16")


class Segments:
    """A number of segments, or sqrt."""

    def read(self, node: Node) -> Any:
        return "sqrt" if node.value == "sqrt" else Whole(least=0, example=4).read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"const": "sqrt"}, {"type": "integer", "minimum": 0}]}


PRECISION = Word(_precisions, shown=_TYPES)
DIMS = Named(Whole(example=512))
ALLOCATOR = Text("expandable_segments:True")

SIZES: Mapping[str, Entry] = {
    "batch": Entry(Whole(), "Size of axis 0 of every input.", "32"),
    "resolution": Entry(Resolution(), "Height and width of 4-D image inputs.", "224"),
    "dims": Entry(DIMS, "Sizes of other open dimensions, by name.", "{seq: 512}"),
}
COMMON: Mapping[str, Entry] = {
    "dtype": Entry(PRECISION, "Casts the whole model, as model.to(dtype).", "bf16"),
    "amp": Entry(PRECISION, "Mixed precision, as torch.autocast around the forward.", "bf16"),
    "sdpa": Entry(Word(_sdpa), "Kernel of scaled_dot_product_attention.", "auto"),
    "unfold_batchnorm": Entry(Flag(), "Puts a batch norm behind every convolution with a bias.", "false"),
    "inplace_activations": Entry(Word(_in_place), "What ran in place, where the file does not say (ONNX).", "auto"),
}
TRAINING: Mapping[str, Entry] = {
    "optimizer": Entry(Word(_optimizers), "Optimizer of the step; without one, forward and backward only.", "adam"),
    "optimizer_impl": Entry(Word(_implementations), "PyTorch's implementation of it.", "foreach"),
    "momentum": Entry(Fraction(), "Momentum of sgd.", "0.9"),
    "weight_decay": Entry(Fraction(high=1e6), "Of the optimizer.", "0.01"),
    "nesterov": Entry(Flag(), "Of sgd with momentum.", "false"),
    "dampening": Entry(Fraction(high=1e6), "Of sgd with momentum.", "0"),
    "amsgrad": Entry(Flag(), "Of adam and adamw.", "false"),
    "centered": Entry(Flag(), "Of rmsprop.", "false"),
    "loss": Entry(Word(_losses), "The loss; auto chooses by the output's shape.", "auto"),
    "checkpoint": Entry(Several(Text("Bottleneck")), "Modules under torch.utils.checkpoint.", "[Bottleneck]"),
    "checkpoint_every": Entry(Whole(example=2), "So many of them share one checkpoint.", "2"),
    "checkpoint_segments": Entry(Segments(), "Segments of checkpoint_sequential: a number, or sqrt.", "sqrt"),
    "checkpoint_sequential": Entry(Text("layers"), "Path of the Sequential that is divided.", "layers"),
    "accumulate": Entry(Whole(example=4), "Micro-batches a step; batch is the size of one.", "4"),
    "freeze": Entry(Text("'^(?!fc)'"), "Regular expression of parameter names that are not trained.", "'^(?!fc)'"),
    "offload_optimizer": Entry(Flag(), "Optimizer state and its update on the CPU.", "false"),
    "grad_scaler": Entry(Flag(), "torch.amp.GradScaler around loss and step.", "false"),
    "set_to_none": Entry(Flag(), "What zero_grad does.", "true"),
    "clip_grad_norm": Entry(Flag(), "clip_grad_norm_ before the step.", "false"),
    "parallel": Entry(Word(_strategies), "Strategy of several GPUs: what one of them holds.", "zero3"),
    "devices": Entry(Whole(example=8), "GPUs that share the work of parallel.", "8"),
}  # fmt: skip
# Of the device. A key is there where `Request` has the field.
SOFTWARE: Mapping[str, Entry] = {
    "torch_version": Entry(Text("2.9"), "PyTorch that runs the step.", "2.9"),
    "module_loading": Entry(Word(lambda: ("lazy", "eager")), "When kernels come to the card.", "lazy"),
    "tf32": Entry(Flag(), "TF32 in convolutions and products.", "true"),
    "channels_last": Entry(Flag(), "Convolutions in channels_last.", "false"),
    "cudnn_benchmark": Entry(Flag(), "torch.backends.cudnn.benchmark.", "false"),
    "cudnn": Entry(Word(lambda: ("tables", "library")), "Where workspaces of cuDNN are from.", "tables"),
    "profile": Entry(Text("profile.yaml"), "File of measured contexts and libraries.", "profile.yaml"),
    "gpus_file": Entry(Text("gpus.yaml"), "File with cards of your own.", "gpus.yaml"),
}
STEP = {**SIZES, **COMMON, **TRAINING}

MODEL = Either(
    Text("model.pt2"),
    Table(
        lambda: {
            "path": Entry(Text("model.pt2"), "An .onnx or .pt2 file, from the config's folder.", "model.pt2"),
            "dims": Entry(DIMS, "Sizes of open dimensions of this model, by name.", "{seq: 512}"),
        },
        required=("path",),
    ),
)


def _train() -> Mapping[str, Entry]:
    return STEP


def _infer() -> Mapping[str, Entry]:
    return {**SIZES, **COMMON}


_INFER_HINTS = dict.fromkeys(TRAINING, "It is a word of training: write it under train.")


def axes() -> Mapping[str, Entry]:
    listed: dict[str, Entry] = {}
    for name, entry in {**STEP, **SOFTWARE}.items():
        kind: Kind = entry.kind
        if name == "dims":
            listed[name] = Entry(Named(Several(Whole(example=512))), "Sizes to try, by name.", "{seq: [512, 1024]}")
            continue
        if name == "checkpoint":
            kind = _Choice()
        elif name == "optimizer":
            kind = Word(_optimizers_or_none)
        listed[name] = Entry(Several(kind), f"To try: {entry.about[0].lower()}{entry.about[1:]}", f"[{entry.example}]")
    listed["mode"] = Entry(Several(Word(modes)), "To try: training and inference.", "[train, infer]")
    listed["model"] = Entry(Several(Text("model.pt2")), "Models to try, from the config's folder.", "[a.pt2, b.pt2]")
    listed["alloc_conf"] = Entry(Several(ALLOCATOR), "To try: settings of the allocator.", f"[{ALLOCATOR.example}]")
    return listed


class _Choice:
    """One setting of checkpointing in a list of them: `none`, a class or path, or a list of these."""

    def read(self, node: Node) -> Any:
        if node.value in (None, False, "none"):
            return ()
        return Several(Text("Bottleneck")).read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}


def _scenario() -> Mapping[str, Entry]:
    named: dict[str, Entry] = {"name": Entry(Text("large batch"), "What it is called in the table.", "large batch")}
    return {
        **named, **STEP, **SOFTWARE,
        "mode": Entry(Word(modes), "train or infer.", "train"),
        "model": Entry(Text("model.pt2"), "Another model, from the config's folder.", "other.pt2"),
        "alloc_conf": Entry(ALLOCATOR, "Settings of the allocator.", ALLOCATOR.example),
    }  # fmt: skip


BUDGET = Table(
    lambda: {
        "metric": Entry(Word(lambda: METRICS), "The meter that is limited (docs/meters.md).", "device"),
        "limit": Entry(Bytes(), "The most that it may be: a size with a unit.", "40 GiB"),
        "level": Entry(Word(lambda: LEVELS), "What happens above it: an error, or a warning.", "error"),
    },
    required=("metric", "limit"),
)


def _root() -> Mapping[str, Entry]:
    return {
        "version": Entry(_Version(), f"Version of this format: {VERSION}.", str(VERSION)),
        "model": Entry(MODEL, "The model: a path, or path and dims.", "model.pt2"),
        "train": Entry(Table(_train), "A training step."),
        "infer": Entry(Table(_infer, hints=_INFER_HINTS), "An inference, in place of train."),
        "gpus": Entry(Several(Text("h100-sxm-80gb")), "Cards by name or size.", "[h100-sxm-80gb, 24GB]"),
        "device": Entry(Table(lambda: SOFTWARE), "Software and settings of the card."),
        "allocator": Entry(
            Table(lambda: {"conf": Entry(ALLOCATOR, "PYTORCH_ALLOC_CONF.", ALLOCATOR.example)}),
            "Settings of PyTorch's caching allocator.",
        ),
        "what_if": Entry(Table(axes), "Lists of values: a sweep takes their cross product."),
        "scenarios": Entry(Several(Table(_scenario), bare=False), "Configurations one by one, in place of what_if."),
        "budgets": Entry(Several(BUDGET, bare=False), "Limits of memory, for gates."),
    }  # fmt: skip


class _Version:
    def read(self, node: Node) -> int:
        if node.value == VERSION and not isinstance(node.value, bool):
            return VERSION
        raise wrong(node, f"This staticmem reads version {VERSION}.", f"Write `version: {VERSION}`.")

    def schema(self) -> dict[str, Any]:
        return {"const": VERSION}


ROOT = Table(_root)


def schema() -> dict[str, Any]:
    """The JSON Schema (draft-07) of a config. A table of pyproject.toml is the same without `version`."""
    title = f"staticmem config {VERSION}"
    draft = "http://json-schema.org/draft-07/schema#"
    return {"$schema": draft, "title": title, **ROOT.schema(), "required": ["version"]}
