"""Exports the models of the comparison: a vision transformer and decoders of 1 and 70 billion parameters.

    pip install torch==2.13.0 torchvision transformers
    python benchmarks/exports.py FOLDER [vit-b16 decoder-1b decoder-70b]

They are built on the meta device, so no weight is ever made: the 70B file has 14 MB. The comparison with PyTorch's
MemTracker (child.py) builds the same networks under fake tensors.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

SEQUENCE = 512


class Logits(nn.Module):
    """A decoder that takes token ids and gives logits, without a key-value cache."""

    def __init__(self, hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=key_heads, vocab_size=vocabulary, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(input_ids=input_ids).logits
        return result


def vit() -> nn.Module:
    from torchvision.models import vit_b_16

    made: nn.Module = vit_b_16()
    return made


def decoder_1b() -> nn.Module:
    """The sizes of Llama 3.2 1B: 1.24 billion parameters (with a table of its own for the output 1.50)."""
    return Logits(2048, 8192, 16, 32, 8, 128_256)


def decoder_70b() -> nn.Module:
    """The sizes of Llama 3.1 70B: 70.55 billion parameters."""
    return Logits(8192, 28_672, 80, 64, 8, 128_256)


MODELS: dict[str, Callable[[], nn.Module]] = {"vit-b16": vit, "decoder-1b": decoder_1b, "decoder-70b": decoder_70b}


def example(name: str, device: Any, batch: int = 2) -> torch.Tensor:
    """An input of the model: images of 224 x 224, or 512 token ids."""
    if name.startswith("decoder"):
        return torch.zeros((batch, SEQUENCE), dtype=torch.int64, device=device)
    return torch.empty((batch, 3, 224, 224), device=device)


def export(name: str, folder: Path) -> Path:
    """Writes NAME.pt2 in training mode with a symbolic batch."""
    with torch.device("meta"):
        model = MODELS[name]().train()
    program = torch.export.export(
        model, (example(name, "meta"),), dynamic_shapes=({0: Dim("batch")},), strict=False
    )  # fmt: skip
    path = folder / f"{name}.pt2"
    torch.export.save(program, path)
    return path


def main() -> None:
    folder, *names = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in names or MODELS:
        path = export(name, Path(folder))
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
