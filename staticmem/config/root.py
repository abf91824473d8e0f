"""The keys at the top of a config, and its JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticmem.config.fields import (
    ALLOCATOR,
    DECODING,
    GENERATION,
    HOST,
    INFER_HINTS,
    INFERENCE,
    MODE,
    MODEL,
    SERVED,
    SERVING,
    SOFTWARE,
    STEP,
    TRAINING,
    Entry,
    Table,
    axes,
)
from staticmem.config.plan import PLAN
from staticmem.documents import Node
from staticmem.report.model import METERS
from staticmem.scenario.kinds import Bytes, Choice, ListOf, Text, wrong

VERSION = 1
LEVELS = ("error", "warning")


def _scenario() -> Mapping[str, Entry]:
    return {
        "name": Entry(Text("large batch"), "What it is called in the table.", "large batch"),
        **STEP,
        **GENERATION,
        **SERVING,
        **SOFTWARE,
        "mode": MODE,
        "model": Entry(Text("model.pt2"), "Another model, from the config's folder.", "other.pt2"),
        "alloc_conf": ALLOCATOR,
    }


def _budget() -> Mapping[str, Entry]:
    return {
        "metric": Entry(Choice(METERS), "The meter that is limited (docs/meters.md).", "device"),
        "limit": Entry(Bytes(limit=True), "The most that it may be: a size with a unit.", "40 GiB"),
        "level": Entry(Choice(LEVELS), "What happens above it: an error, or a warning.", "error"),
    }


def _root() -> Mapping[str, Entry]:
    scenarios = ListOf(Table(_scenario), bare=False)
    budgets = ListOf(Table(_budget, required=("metric", "limit")), bare=False)
    return {
        "version": Entry(_Version(), f"Version of this format: {VERSION}.", str(VERSION)),
        "model": Entry(MODEL, "The model: a path, or path and dims.", "model.pt2"),
        "train": Entry(Table(lambda: STEP, lists=True), "A training step."),
        "infer": Entry(Table(lambda: INFERENCE, hints=INFER_HINTS, lists=True), "An inference instead of train."),
        "generate": Entry(
            Table(lambda: DECODING, hints=INFER_HINTS, lists=True), "Generation with a decoder instead of train."
        ),
        "serve": Entry(Table(lambda: SERVED, lists=True), "An engine that serves a decoder instead of train."),
        "gpus": Entry(ListOf(Text("h100-sxm-80gb")), "GPUs by name or size.", "[h100-sxm-80gb, 24GB]"),
        "device": Entry(Table(lambda: SOFTWARE), "Software and settings of the GPU."),
        "host": Entry(Table(lambda: HOST), "What the process does in the host's memory (docs/host.md)."),
        "allocator": Entry(Table(lambda: {"conf": ALLOCATOR}), "Settings of PyTorch's caching allocator."),
        "what_if": Entry(Table(axes), "Lists of values: a sweep takes their cross product."),
        "scenarios": Entry(scenarios, "Configurations one by one instead of what_if."),
        "budgets": Entry(budgets, "Limits of memory, for gates."),
        "plan": PLAN,
    }


class _Version:
    def read(self, node: Node) -> int:
        if node.value == VERSION and not isinstance(node.value, bool):
            return VERSION
        raise wrong(node, f"This staticmem reads version {VERSION}.", f"Write `version: {VERSION}`.")

    def schema(self) -> dict[str, Any]:
        return {"const": VERSION}


_ROOT_HINTS = {
    **dict.fromkeys(SERVING, "It is an option of the engine: write it under serve."),
    **dict.fromkeys((*DECODING, *TRAINING), "It is an option of the step: write it under train, infer or generate."),
    **dict.fromkeys(SOFTWARE, "It is an option of the device: write it under device."),
    "gpu": "Write `gpus: [NAME]`.",
    "dim": "Write `dims: {NAME: N}` under train, infer or generate.",
}
ROOT = Table(_root, hints=_ROOT_HINTS)


def schema() -> dict[str, Any]:
    """The JSON Schema (draft-07) of a config. A table of pyproject.toml is the same without `version`."""
    title = f"staticmem config {VERSION}"
    draft = "http://json-schema.org/draft-07/schema#"
    return {"$schema": draft, "title": title, **ROOT.schema(), "required": ["version"]}
