"""A small decoder with causal attention, of which `tests/data/context/decoder.pt2` is the export."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH = 512, 128, 4, 3, 1024


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = [t.view(b, s, HEADS, w // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, w))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def factory() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """What `staticmem export` takes."""
    with torch.device("meta"):
        return Decoder().train(), (torch.zeros((2, LENGTH), dtype=torch.int64),)
