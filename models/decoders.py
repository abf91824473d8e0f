"""Decoders as litgpt trains them, whose memory it publishes: networks of `docs/generated/hardware-readings.md`.

Written from what its code does (litgpt/model.py, lora.py, utils.py and finetune/lora.py at 00af8b0; lit_gpt/ at
8641822, but for the norm in float32, which came a week later at 6178c7c and which the readings fit): one product
makes query, key and value; a value is a view of it; adapters of query and value are padded to its width, and
autograd saves what is copied in; the output head runs on 128 tokens at a time; and Lightning's Fabric gives what
the model returns the type float32 (`HalfPrecision.convert_output`). `forward` gives the loss. The loop has the
logits in a variable until it has those of the next step: so do these modules, but for the first step of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 128  # tokens of the output head and of the loss


class RmsNorm(nn.Module):
    """In float32, or in the type of the input, as until October 2023."""

    def __init__(self, size: int, wide: bool = True, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.wide, self.offset = wide, offset

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if self.wide:
            x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-6)
        weight = (1 + self.weight) if self.offset else self.weight
        if not self.wide:
            return weight * normed
        return (normed * weight.float()).to(dtype)


class FirstProduct(torch.autograd.Function):
    """A product with a weight of 4 bits, in the first step of all: no loss of a step before it holds anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, packed)
        ctx.shape = shape
        return functional.linear(x, _unpacked(packed, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _, packed = ctx.saved_tensors
        return torch.matmul(gradient, _unpacked(packed, ctx.shape, gradient.dtype)), None, None, None


class PackedProduct(torch.autograd.Function):
    """The same as bitsandbytes made it before 0.43.2 (autograd/_functions.py, `MatMul4Bit`): the input stays an
    attribute of `ctx`, which lives until the loss is assigned again (its pull request 1270)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:  # type: ignore[override]
        ctx.tensors, ctx.shape = (x, packed), shape
        return functional.linear(x, _unpacked(packed, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _, packed = ctx.tensors
        return torch.matmul(gradient, _unpacked(packed, ctx.shape, gradient.dtype)), None, None, None


def _unpacked(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Fabric packs what it has cast to float16 (`BitsandbytesPrecision`), which is what unpacking gives."""
    return torch.empty(shape, dtype=torch.float16, device=packed.device).to(dtype)


class PackedLinear(nn.Module):
    """A linear layer whose weight has 4 bits a number and an absmax for 64; doubly quantised, of 8 bits each."""

    def __init__(self, inputs: int, outputs: int, bias: bool, double: bool, first: bool) -> None:
        super().__init__()
        self.product = FirstProduct if first else PackedProduct
        self.shape, self.in_features, self.out_features = (outputs, inputs), inputs, outputs
        count = inputs * outputs
        # int32 stands for float32, which `.to(torch.bfloat16)` would change
        self.register_buffer("absmax", torch.zeros(count // 64, dtype=torch.uint8 if double else torch.int32))
        self.register_buffer("blocks", torch.zeros(count // 64 // 256 if double else 0, dtype=torch.int32))
        self.register_buffer("packed", torch.zeros(count // 2, 1, dtype=torch.uint8))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.product.apply(x, self.packed, self.bias, self.shape)  # type: ignore[no-untyped-call]
        return result


def linear_layer(inputs: int, outputs: int, bias: bool, packed: str) -> nn.Module:
    """`packed`: nf4, nf4-dq, or none; with "first" behind it, as the first step runs it."""
    kind, _, first = packed.partition(" ")
    if kind:
        return PackedLinear(inputs, outputs, bias, kind.endswith("-dq"), bool(first))
    return nn.Linear(inputs, outputs, bias=bias)


class Linear(nn.Module):
    """A linear layer, with an adapter of a rank beside it."""

    def __init__(self, inputs: int, outputs: int, bias: bool, rank: int, dropout: float, packed: str) -> None:
        super().__init__()
        self.linear = linear_layer(inputs, outputs, bias, packed)
        self.rank = rank
        if rank:
            self.dropout = nn.Dropout(dropout)
            self.lora_a, self.lora_b = (nn.Parameter(torch.zeros(s)) for s in ((rank, inputs), (outputs, rank)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        if not self.rank:
            return result
        update = (self.dropout(x) @ self.lora_a.transpose(0, 1) @ self.lora_b.transpose(0, 1)) * 2.0
        return result + update


class Projection(nn.Module):
    """Query, key and value of all heads in one product; adapters for those of `targets`, grouped as a convolution."""

    def __init__(self, hidden: int, widths: tuple[int, int, int], bias: bool, rank: int, targets: str, dropout: float,
                 packed: str):  # fmt: skip
        super().__init__()
        self.linear = linear_layer(hidden, sum(widths), bias, packed)
        self.outputs = sum(widths)
        self.widths = [width for name, width in zip("qkv", widths, strict=True) if name in targets]
        self.all, self.alike, self.rank = len(self.widths) == 3, len(set(widths)) == 1, rank
        if rank:
            self.dropout = nn.Dropout(dropout)
            self.lora_a = nn.Parameter(torch.zeros(rank * len(self.widths), hidden))
            self.lora_b = nn.Parameter(torch.zeros(sum(self.widths), rank))
            self.register_buffer("columns", torch.zeros(sum(self.widths), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        if not self.rank:
            return result
        after_a = functional.linear(self.dropout(x), self.lora_a)
        after_b = self.convolve(after_a.transpose(-2, -1), self.lora_b.unsqueeze(-1)).transpose(-2, -1)
        update = self.pad(after_b) * 2.0
        return result + update

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.alike:
            return functional.conv1d(x, weight, groups=len(self.widths))
        parts = zip(x.chunk(len(self.widths), dim=1), weight.split(self.widths), strict=True)
        return torch.cat([functional.conv1d(a, b) for a, b in parts], dim=1)

    def pad(self, x: Tensor) -> Tensor:
        if self.all:
            return x
        result = x.new_zeros((*x.shape[:-1], self.outputs))
        return result.index_copy_(-1, self.columns, x)  # type: ignore[arg-type]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of what is to be rotated."""
    half = x.shape[-1] // 2
    first = x[..., :half]
    second = x[..., half:]
    rotated = torch.cat((-second, first), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.to(x.dtype)


class Attention(nn.Module):
    """Causal attention of groups of heads; with `cap` the scores are computed and capped by a tanh, as in Gemma 2."""

    def __init__(self, hidden: int, heads: int, groups: int, width: int, rope: int, bias: bool, cap: float,
                 adapters: dict[str, Any], cache: int = 0):  # fmt: skip
        super().__init__()
        rank, targets, dropout, packed = _adapter(adapters)
        self.cached = bool(cache)
        if cache:  # `KVCache`: of all heads, but where there is one group
            shape = (1, 1 if groups == 1 else heads, cache, width)
            self.register_buffer("k", torch.zeros(shape), persistent=False)
            self.register_buffer("v", torch.zeros(shape), persistent=False)
        self.heads, self.groups, self.width, self.rope, self.cap = heads, groups, width, rope, cap
        widths = (heads * width, groups * width, groups * width)
        self.attn = Projection(hidden, widths, bias, rank, targets, dropout, packed)
        self.proj = Linear(heads * width, hidden, bias, rank if "o" in targets else 0, dropout, packed)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.attn(x)
        share = self.heads // self.groups
        qkv = qkv.view(batch, length, self.groups, share + 2, self.width)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((share, 1, 1), dim=2)
        if self.groups != self.heads:
            k = k.expand(batch, self.groups, share, length, self.width)
            v = v.expand(batch, self.groups, share, length, self.width)
        q = q.reshape(batch, -1, length, self.width)
        k = k.reshape(batch, -1, length, self.width)
        v = v.reshape(batch, -1, length, self.width)
        q_roped = rotate(q[..., : self.rope], cos, sin)
        k_roped = rotate(k[..., : self.rope], cos, sin)
        q = torch.cat((q_roped, q[..., self.rope :]), dim=-1)
        k = torch.cat((k_roped, k[..., self.rope :]), dim=-1)
        if self.cached:
            places = torch.zeros(length, dtype=torch.int64, device=x.device)
            k = self.k.index_copy_(2, places, k)
            v = self.v.index_copy_(2, places, v)
        y = self.attend(q, k, v, mask)
        y = y.reshape(batch, length, self.heads * self.width)
        output: Tensor = self.proj(y)
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if not self.cap:
            causal = mask is None
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)
        scores = q @ k.mT * 0.0625
        scores = torch.tanh(scores / self.cap) * self.cap
        mask = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype, device=q.device).triu(diagonal=1)
        mask.masked_fill_(mask.bool(), -1e30)
        scores = scores + mask
        scores = functional.softmax(scores, dim=-1, dtype=torch.float).to(q.dtype)
        y = scores @ v
        return y.transpose(1, 2)


class Mlp(nn.Module):
    """Two linear layers and GELU, or three and a gate (SiLU; GELU in Gemma)."""

    def __init__(self, hidden: int, inner: int, kind: str, bias: bool, adapters: dict[str, Any]) -> None:
        super().__init__()
        rank, targets, dropout, packed = _adapter(adapters)
        rank = rank if "m" in targets else 0
        self.kind = kind
        self.fc_1 = Linear(hidden, inner, bias, rank, dropout, packed)
        self.fc_2 = None if kind == "gelu" else Linear(hidden, inner, bias, rank, dropout, packed)
        self.proj = Linear(inner, hidden, bias, rank, dropout, packed)

    def forward(self, x: Tensor) -> Tensor:
        if self.fc_2 is None:
            x = self.fc_1(x)
            x = functional.gelu(x)
        else:
            x_fc_1 = self.fc_1(x)
            x_fc_2 = self.fc_2(x)
            x = (functional.silu(x_fc_1) if self.kind == "silu" else functional.gelu(x_fc_1)) * x_fc_2
        output: Tensor = self.proj(x)
        return output


def _adapter(adapters: dict[str, Any]) -> tuple[int, str, float, str]:
    """Rank, the layers that have one (letters of q, k, v, o, m for the MLP, h for the head), dropout, and how weights
    are packed."""
    packed = adapters.get("packed", "") + " first" * adapters.get("first", False)
    return adapters.get("rank", 0), adapters.get("targets", ""), adapters.get("dropout", 0), packed


class Block(nn.Module):
    """Attention and MLP, one after the other or side by side (`parallel`), with a norm for each or one for both."""

    def __init__(self, sizes: dict[str, Any], attention: Attention, mlp: Mlp, norms: list[nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.attn, self.mlp = norms[0], attention, mlp
        self.parallel, self.shared = bool(sizes.get("parallel")), bool(sizes.get("shared"))
        self.norm_2 = None if self.shared else norms[1]
        self.after_attention, self.after_mlp = norms[2:] if len(norms) > 2 else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x_normed = self.norm_1(x)
        attention_output = self.attn(x_normed, cos, sin, mask)
        attention_output = self.after_attention(attention_output)
        if self.parallel:
            if self.norm_2 is not None:
                x_normed = self.norm_2(x)
            x = self.mlp(x_normed) + attention_output + x
        else:
            assert self.norm_2 is not None
            x = attention_output + x
            x = self.after_mlp(self.mlp(self.norm_2(x))) + x
        return x


class LitDecoder(nn.Module):
    """A decoder of litgpt and its loss. `adapters` has rank, targets, dropout, how weights are packed, and whether
    the step is the first of all; without them all weights train. `cache`: it generates, in the first of its calls, with
    keys and values of so many tokens."""

    def __init__(
        self, layers: int, hidden: int, heads: int, inner: int, vocabulary: int, groups: int = 0, width: int = 0,
        rotary: float = 1.0, norm: str = "rms", mlp: str = "silu", bias: bool = False, head_bias: bool = False,
        adapters: dict[str, Any] | None = None, cap: float = 0, cache: int = 0, **kind: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        width, given = width or hidden // heads, adapters or {}
        rank, targets, dropout, packed = _adapter(given)
        gemma, count = mlp == "gelu-gate", 4 if cap else 2

        def norms(number: int) -> list[nn.Module]:
            if norm == "layer":
                return [nn.LayerNorm(hidden) for _ in range(number)]
            return [RmsNorm(hidden, norm == "rms", gemma) for _ in range(number)]

        self.first, self.variable = bool(given.get("first")), list[Tensor]()
        self.scaled, self.cap, self.rope, self.cache = gemma, cap, int(width * rotary), cache
        if cache:
            self.register_buffer("mask_cache", torch.ones(1, 1, cache, cache, dtype=torch.bool), persistent=False)
        self.wte = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            Block(
                kind,
                Attention(hidden, heads, groups or heads, width, self.rope, bias, cap, given, cache),
                Mlp(hidden, inner, mlp, bias, given),
                norms(count),
            )
            for _ in range(layers)
        )
        self.ln_f = norms(1)[0]
        self.lm_head = Linear(hidden, vocabulary, head_bias, rank if "h" in targets else 0, dropout, packed)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not rank or "lora_" in name)

    def logits(self, tokens: Tensor, chunks: bool) -> list[Tensor] | Tensor:
        table = torch.zeros(2, tokens.shape[1], self.rope, device=tokens.device)
        cos, sin = table[0], table[1]
        x = self.wte(tokens)
        if self.scaled:
            x = x * 45.0
        mask = self.mask_cache[:, :, : tokens.shape[1]].clone() if self.cache else None
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = self.ln_f(x)
        if chunks:
            return [self.lm_head(part) for part in x.split(CHUNK, dim=1)]
        x = self.lm_head(x)
        if self.cap:
            x = torch.tanh(x / 30.0) * 30.0
        return x

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.cache:
            return self.generated(tokens)
        if self.first:
            self.variable = []
        logits = self.logits(tokens, chunks=not self.wte.weight.requires_grad)
        if isinstance(logits, list):
            logits = [part.float() for part in logits]
            self.variable = logits
            logits[-1] = logits[-1][..., :-1, :]
            flat = [part.reshape(-1, part.shape[-1]) for part in logits]
            targets = [part.reshape(-1) for part in labels[..., 1:].split(CHUNK, dim=1)]
        else:
            logits = logits.float()
            self.variable = [logits]
            whole = logits[..., :-1, :]
            whole = whole.reshape(-1, whole.shape[-1])
            flat, targets = list(whole.split(CHUNK)), list(labels[..., 1:].reshape(-1).split(CHUNK))
        losses = [functional.cross_entropy(a, b, reduction="none") for a, b in zip(flat, targets, strict=True)]
        return torch.cat(losses).mean()

    def generated(self, tokens: Tensor) -> Tensor:
        """The next token of a prompt (generate/base.py)."""
        logits = self.logits(tokens, chunks=False)
        assert isinstance(logits, Tensor)
        logits = logits.float()
        last = logits[0, -1] / 0.8
        best, _ = torch.topk(last, 200)
        last = torch.where(last < best[[-1]], -float("inf"), last)
        probabilities = functional.softmax(last, dim=-1)
        return torch.multinomial(probabilities, num_samples=1)


NETWORKS = {"LitDecoder": LitDecoder}


def example(name: str, sizes: dict[str, Any], shape: list[int]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network on the meta device in bfloat16 and training mode, and a batch of token sequences with its labels."""
    with torch.device("meta"):
        network: nn.Module = NETWORKS[name](**sizes).to(torch.bfloat16)  # type: ignore[arg-type]
        tokens = torch.empty(shape, dtype=torch.int64)
        return network.train(), (tokens, torch.empty(shape, dtype=torch.int64))
