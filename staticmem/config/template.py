"""The commented config that `staticmem init` writes: every key is in it, with its sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from staticmem.config.fields import GENERATION, HOST, INFERENCE, SERVING, SOFTWARE, TRAINING, Entry
from staticmem.config.plan import WORDS

_IN_USE = {"batch": "32", "optimizer": "adam"}
_WIDTH = 44  # column of the comments


def plan_template(model: str, schema: str) -> str:
    """The text of a config with a plan: a run of one model, with the other words of a plan as comments."""
    lines = [
        *_head(model, schema),
        "train: {batch: 32, optimizer: adamw}        # Options of every `step`.",
        "infer: {batch: 64}                          # Options of every `evaluate`.",
        "",
        _line(0, "gpus", "[24GB]", "Does the run fit it?"),
        "",
        "plan:                                       # What the process does, in this order (docs/plan.md).",
        "  instants:",
        "    - step",
        "    - evaluate: {times: 10, gather: list}   # Outputs of all batches stay on the GPU.",
        "    - save: {copies: none}",
        "    - step",
        *_commented(),
    ]
    return "\n".join(lines) + "\n"


def _commented() -> Iterable[str]:
    """Every word of a plan as a comment, with its sentence."""
    for word, meaning in WORDS.items():
        yield _line(0, f"    # - {word}", "{...}" if meaning.keys_of() else "", meaning.about)


def _head(model: str, schema: str) -> list[str]:
    quoted = model if model.isascii() and all(c.isalnum() or c in "._-/" for c in model) else json.dumps(model)
    return [
        f"# yaml-language-server: $schema={schema}",
        "# What staticmem analyses. Flags of the command line override this file; every key is in docs/config.md.",
        "version: 1",
        "",
        _line(0, "model", quoted, "An .onnx or .pt2 file, from this file's folder."),
        "",
    ]


def template(model: str, schema: str) -> str:
    """The text of a config for a model; `schema` is where the editor finds the JSON Schema."""
    lines = [
        *_head(model, schema),
        "train:                                      # or infer: an inference",
        *_entries({**INFERENCE, **TRAINING}),
        "",
        "# generate:                                 # Generation with a decoder instead of train.",
        *_entries(GENERATION, commented=True),
        "# serve:                                    # An engine that serves a decoder instead of train.",
        *_entries(SERVING, commented=True),
        "",
        _line(0, "gpus", "[h100-sxm-80gb, 24GB]", "GPUs by name or size: does it fit?"),
        "",
        "# device:                                   # Software and settings of the GPU.",
        *_entries(SOFTWARE, commented=True),
        "# host:                                     # What the process does in the memory of the host.",
        *_entries(HOST, commented=True),
        "# allocator:                                # Settings of PyTorch's caching allocator.",
        '#   conf: "expandable_segments:True"',
        "",
        "what_if:                                    # `staticmem sweep` takes the cross product of these lists.",
        "  batch: [16, 32, 64]",
        "  optimizer: [sgd, adam]",
        "  # resolution: [224, 320]",
        "  # dims: {seq: [512, 1024]}",
        "  # amp: [none, bf16]",
        "  # checkpoint: [none, Bottleneck]",
        "",
        "# scenarios:                                # Configurations one by one instead of what_if.",
        "#   - {name: small, batch: 8}",
        "#   - {name: large, batch: 64, amp: bf16}",
        "",
        "# budgets:                                  # Limits of memory, for gates.",
        "#   - {metric: device, limit: 40 GiB, level: error}",
        "",
        "# plan:                                     # A run of several instants: `staticmem init --plan`.",
    ]
    return "\n".join(lines) + "\n"


def _entries(entries: Mapping[str, Entry], commented: bool = False) -> Iterable[str]:
    for name, entry in entries.items():
        if commented:
            yield _line(0, f"#   {name}", entry.example, entry.about)
        elif name in _IN_USE:
            yield _line(2, name, _IN_USE[name], entry.about)
        else:
            yield _line(2, f"# {name}", entry.example, entry.about)


def _line(indent: int, name: str, value: str, about: str) -> str:
    text = f"{' ' * indent}{name}: {value}"
    return f"{text:<{_WIDTH - 1}} # {about}"
