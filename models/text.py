"""BERT, whose training others measured on GPUs: a network of `docs/generated/hardware-readings.md`.

Written from the paper (arXiv 1810.04805): attention that is not fused, as transformers ran it before PyTorch 2.0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Scores of all pairs of positions, with a mask added to them, softmax and dropout."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.width).permute(0, 2, 1, 3)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query_layer = self.query(hidden)
        key_layer = self.split(self.key(hidden))
        value_layer = self.split(self.value(hidden))
        query_layer = self.split(query_layer)
        scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        scores = scores / self.width**0.5
        scores = scores + mask
        shares = functional.softmax(scores, dim=-1)
        shares = self.dropout(shares)
        context = torch.matmul(shares, value_layer)
        context = context.permute(0, 2, 1, 3).contiguous()
        return context.view(*context.shape[:2], self.heads * self.width)


class Output(nn.Module):
    """A linear layer, dropout, and the norm of the sum with what went in."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.dense, self.dropout = nn.Linear(inputs, hidden), nn.Dropout(0.1)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(x)
        x = self.dropout(x)
        output: Tensor = self.norm(x + residual)
        return output


class Layer(nn.Module):
    """Attention and two linear layers with GELU."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention, self.attended = SelfAttention(hidden, heads), Output(hidden, hidden)
        self.intermediate, self.output = nn.Linear(hidden, 4 * hidden), Output(4 * hidden, hidden)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        attention_output = self.attended(self.attention(hidden, mask), hidden)
        intermediate_output = functional.gelu(self.intermediate(attention_output))
        layer_output: Tensor = self.output(intermediate_output, attention_output)
        return layer_output


class Bert(nn.Module):
    """A classifier of token sequences. `forward` gives the loss."""

    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int = 30522, labels: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden, padding_idx=0), nn.Embedding(512, hidden)
        self.kinds = nn.Embedding(2, hidden)
        self.norm, self.dropout = nn.LayerNorm(hidden, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(hidden, hidden), nn.Linear(hidden, labels)
        self.register_buffer("positions", torch.arange(512).expand((1, -1)), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        batch, length = tokens.shape
        mask = torch.ones((batch, length), device=tokens.device)
        kinds = torch.zeros((batch, length), dtype=torch.long, device=tokens.device)
        mask = (1.0 - mask[:, None, None, :]) * -10000.0
        embeddings = self.words(tokens) + self.kinds(kinds)
        embeddings = embeddings + self.places(self.positions[:, :length])
        hidden = self.dropout(self.norm(embeddings))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        logits = self.classifier(self.dropout(pooled))
        return functional.cross_entropy(logits, labels)


class Logits(nn.Module):
    """A decoder of transformers as generation is predicted from it: token ids in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids, use_cache=False).logits
        return logits


NETWORKS = {"Bert": Bert}


def example(name: str, sizes: dict[str, int], shape: list[int]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network on the meta device in training mode, and a batch of token sequences of a shape with its labels."""
    with torch.device("meta"):
        network: nn.Module = NETWORKS[name](**sizes)
        tokens, labels = torch.empty(shape, dtype=torch.int64), torch.empty(shape[0], dtype=torch.int64)
        return network.train(), (tokens, labels)
