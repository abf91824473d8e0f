"""The rules of an engine, as a file of this folder has them, and the version that was asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from staticmem.devices.documents import read_yaml
from staticmem.devices.gpus import Gpu
from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.units import GIB, MIB, Band

ENGINES = ("vllm",)
NOT_COVERED = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "tensorrt-llm": "TensorRT-LLM", "tgi": "TGI"}
_NAME = re.compile(r"([a-z][a-z-]{0,19})(?:@v?(\d{1,4}(?:\.\d{1,4}){1,3}))?", re.ASCII)


@record(frozen=True)
class Rules:
    """An engine's rules: `data` as in its file, the version that was asked for, and whether the files of that version
    were read."""

    name: str
    data: Mapping[str, Any]
    version: str
    was_read: bool

    def defaults(self, card: Gpu) -> tuple[int, int]:
        """Tokens and sequences of a batch on a card, where neither is given."""
        for row in self.data["batches"]:
            if card.nvml >= row["least_gib"] * GIB and not (row["but"] and row["but"] in card.name.lower()):
                return row["tokens"], row["sequences"]
        raise AssertionError("the last row holds for every card")

    @property
    def fewest_tokens(self) -> int:
        """The fewest tokens of a step that are a default of a card."""
        return min(int(row["tokens"]) for row in self.data["batches"])

    def of_chip(self, name: str, card: Gpu) -> int:
        """Bytes of a figure of the profile run that is known by the chip's generation."""
        figures = self.data["profile"][name]
        return int(figures.get(card.architecture, figures["other"]) * MIB)

    def padding_of_mxfp4(self, card: Gpu) -> tuple[tuple[int, int], tuple[int, int]]:
        """What the hidden size and the width of experts are multiples of, as inputs and as outputs."""
        row = self.data["mxfp4"].get(card.architecture, self.data["mxfp4"]["other"])
        return tuple(row["hidden"]), tuple(row["width"])

    def outside(self, way: str, when: str) -> Band:
        """Bytes that are not PyTorch's: of a rank alone, or of ranks that share layers or have some of them."""
        low, expected, high = (int(gib * GIB) for gib in self.data["outside"][way][when])
        return Band(low, expected, high)

    def says(self, message: str, **values: object) -> str:
        text: str = self.data["says"][message]
        return text.format(**values)


def rules_of(text: str) -> Rules:
    """The rules of `vllm` or `vllm@0.19.1`.

    Raises:
        UsageError: an engine or a version that is not known (SM602).
    """
    match = _NAME.fullmatch(text.strip().lower())
    name = match[1] if match is not None else ""
    if name in NOT_COVERED:
        why = f"Neither files of {NOT_COVERED[name]} nor readings of it were at hand."
        raise UsageError(f"the engine {text} is not covered", why, "Use --engine vllm.", "SM602")
    if match is None or name not in ENGINES:
        why = f"Engines: {', '.join(ENGINES)}, each with a version or without one."
        raise UsageError(f"unknown engine '{text[:40]}'", why, "Example: --engine vllm@0.19", "SM602")
    data = _data(name)
    version = match[2] or data["read"]
    return Rules(name, data, version, ".".join(version.split(".")[:2]) in data["releases"])


@lru_cache(maxsize=4)
def _data(name: str) -> Mapping[str, Any]:
    return read_yaml(Path(__file__).with_name(f"{name}.yaml"))
