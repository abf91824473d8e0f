"""Decoders as torchtune fine-tunes them, whose memory it publishes: networks of `docs/generated/hardware-readings.md`.

Written from what its code does (torchtune/modules/transformer.py, attention.py, rms_norm.py,
position_embeddings.py, feed_forward.py and loss/ce_chunked_output_loss.py at 1814feb, November 2024): products for
query, key and value; keys and values repeated for all heads of a group; the rotary embedding and the norm in
float32; the output head in one piece, whose result becomes float32, or on eight chunks of tokens. `forward` gives
the loss, as `_loss_step` of its recipes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNKS = 8  # `num_output_chunks` of CEWithChunkedOutputLoss


class Norm(nn.Module):
    """The root mean square norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of pairs of neighbours."""
    _, length, _, width = x.shape
    cache = torch.zeros(length, width // 2, 2, device=x.device).view(-1, length, 1, width // 2, 2)
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    out = torch.stack(
        [
            pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
            pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
        ],
        -1,
    )
    out = out.flatten(3)
    return out.type_as(x)


class Attention(nn.Module):
    """Causal attention of groups of heads."""

    def __init__(self, hidden: int, heads: int, groups: int, width: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, width
        self.q_proj = nn.Linear(hidden, heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, groups * width, bias=False)
        self.v_proj = nn.Linear(hidden, groups * width, bias=False)
        self.output_proj = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x)
        q = q.view(batch, length, self.heads, self.width)
        q = rotate(q)
        q = q.transpose(1, 2)
        k = self.k_proj(x)
        v = self.v_proj(x)
        k = k.view(batch, length, -1, self.width)
        v = v.view(batch, length, -1, self.width)
        k = rotate(k)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if self.groups != self.heads:
            repeated = (batch, self.groups, self.heads // self.groups, length, self.width)
            k = k.unsqueeze(2).expand(repeated).flatten(1, 2)
            v = v.unsqueeze(2).expand(repeated).flatten(1, 2)
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous().view(batch, length, -1)
        projected: Tensor = self.output_proj(output)
        return projected


class FeedForward(nn.Module):
    """Three linear layers and a gate."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return output


class Layer(nn.Module):
    """Attention and MLP, one after the other."""

    def __init__(self, hidden: int, inner: int, attention: Attention) -> None:
        super().__init__()
        self.sa_norm, self.attn, self.mlp_norm, self.mlp = (
            Norm(hidden),
            attention,
            Norm(hidden),
            FeedForward(hidden, inner),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.sa_norm(x)
        attn_out = self.attn(h)
        h = attn_out + x
        mlp_out = self.mlp(self.mlp_norm(h))
        out: Tensor = h + mlp_out
        return out


class FusedLoss(torch.autograd.Function):
    """What Inductor makes of the loss: two numbers of each row, and a gradient in the type of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(logits, labels, logits.new_zeros((logits.shape[0], 2), dtype=torch.float32))
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.empty_like(ctx.saved_tensors[0]), None


class Loss(nn.Module):
    """Cross entropy in float32, which recipes compile by itself (`compile_loss`); `fused`: as it is then."""

    def __init__(self, reduction: str, fused: bool) -> None:
        super().__init__()
        self.reduction, self.fused = reduction, fused

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.fused:
            loss: Tensor = FusedLoss.apply(logits, labels)  # type: ignore[no-untyped-call]
            return loss
        return functional.cross_entropy(logits.float(), labels, reduction=self.reduction)


class Head(nn.Module):
    """The output head and the loss, which recipes run outside of the context that offloads activations."""

    def __init__(self, hidden: int, vocabulary: int, tied: bool, chunked: bool, fused: bool) -> None:
        super().__init__()
        self.linear = None if tied else nn.Linear(hidden, vocabulary, bias=False)
        self.chunked, self.loss = chunked, Loss("sum" if chunked else "mean", fused)

    def logits(self, h: Tensor, table: Tensor) -> Tensor:
        logits: Tensor = functional.linear(h, table) if self.linear is None else self.linear(h)
        return logits

    def forward(self, h: Tensor, labels: Tensor, table: Tensor) -> Tensor:
        if not self.chunked:
            logits = self.logits(h, table).float()
            loss: Tensor = self.loss(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
            return loss
        chunks = [self.logits(chunk, table) for chunk in h.chunk(CHUNKS, dim=1)]
        chunks = [chunk.reshape(-1, chunk.shape[-1]) for chunk in chunks]
        total = torch.zeros((), device=h.device)
        for chunk, targets in zip(chunks, labels.chunk(CHUNKS, dim=1), strict=True):
            total = total + self.loss(chunk, targets.reshape(-1))
        return total / labels.numel()


class TuneDecoder(nn.Module):
    """A decoder of torchtune and its loss; `chunked` has the output head and the loss in chunks, `tied` one matrix for
    embedding and head."""

    def __init__(
        self, layers: int, hidden: int, heads: int, inner: int, vocabulary: int, groups: int = 0, width: int = 0,
        tied: bool = False, chunked: bool = False, fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, hidden)
        width, groups = width or hidden // heads, groups or heads
        self.layers = nn.ModuleList(
            Layer(hidden, inner, Attention(hidden, heads, groups, width)) for _ in range(layers)
        )
        self.norm = Norm(hidden)
        self.output = Head(hidden, vocabulary, tied, chunked, fused)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h)
        labels = torch.hstack((labels[..., 1:], labels[:, :1]))
        loss: Tensor = self.output(h, labels, self.tok_embeddings.weight)
        return loss


NETWORKS = {"TuneDecoder": TuneDecoder}


def example(name: str, sizes: dict[str, Any], shape: list[int]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network on the meta device in training mode, in bfloat16 or the `dtype` of its sizes, and a batch of token
    sequences with its labels."""
    rest = {key: value for key, value in sizes.items() if key != "dtype"}
    with torch.device("meta"):
        network: nn.Module = NETWORKS[name](**rest).to(getattr(torch, sizes.get("dtype", "bfloat16")))
        tokens = torch.empty(shape, dtype=torch.int64)
        return network.train(), (tokens, torch.empty(shape, dtype=torch.int64))
