"""Layers and losses whose memory others measured on GPUs: the networks of `docs/generated/hardware-readings.md`.

Each is written here from its formula; nothing of the projects that measured them is copied. The measured runs do not
update weights: they run a forward and a backward of one layer, and its input keeps a gradient from call to call. So the
input `x` is a parameter of these modules. A benchmark that compares two implementations has the weights of both on the
GPU: `Layer(..., twins=1)` holds a copy of the weights that nothing reads.

Build them on the meta device. `example(name, sizes)` gives a module and its other inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """A layer with its input as the parameter `x`; `twins` is how many more copies of its weights the process holds."""

    def __init__(self, x: Tensor, layer: nn.Module | None = None, twins: int = 0) -> None:
        super().__init__()
        self.x = nn.Parameter(x)
        self.layer = layer
        weights = list(layer.parameters()) if layer is not None else []
        for index, weight in enumerate(weights * twins):
            self.register_buffer(f"twin_{index}", torch.empty_like(weight))

    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments of `forward` beside `x`."""
        return ()

    def forward(self) -> Tensor:
        assert self.layer is not None
        output: Tensor = self.layer(self.x)
        return output


def _floats(*sizes: int, dtype: str = "float32") -> Tensor:
    return torch.empty(sizes, dtype=getattr(torch, dtype))


# -- losses over a vocabulary -------------------------------------------------------------------------------------


class CrossEntropy(Layer):
    """Mean cross entropy of logits [rows, classes]."""

    def __init__(self, rows: int, classes: int) -> None:
        super().__init__(_floats(rows, classes))

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.empty(len(self.x), dtype=torch.int64),)

    def forward(self, target: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(self.x, target)


class LinearCrossEntropy(CrossEntropy):
    """A linear layer without bias, and the cross entropy of its result."""

    def __init__(self, rows: int, hidden: int, classes: int, dtype: str, twins: int = 0) -> None:
        weight = nn.Linear(hidden, classes, bias=False, dtype=getattr(torch, dtype))
        Layer.__init__(self, _floats(rows, hidden, dtype=dtype), weight, twins)

    def forward(self, target: Tensor) -> Tensor:  # type: ignore[override]
        assert self.layer is not None
        return functional.cross_entropy(self.layer(self.x), target)


class KlDivergence(Layer):
    """KL divergence of log_softmax(x) from a given distribution, divided by the rows."""

    def __init__(self, rows: int, classes: int) -> None:
        super().__init__(_floats(rows, classes))

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.empty_like(self.x),)

    def forward(self, target: Tensor) -> Tensor:  # type: ignore[override]
        return functional.kl_div(functional.log_softmax(self.x, -1), target, reduction="batchmean")


class TotalVariation(KlDivergence):
    """Half of the summed absolute difference of softmax(x) and a given distribution, divided by the rows."""

    def forward(self, target: Tensor) -> Tensor:
        return ((functional.softmax(self.x, -1) - target).abs() / 2.0).sum() / len(self.x)


def _jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Of two distributions given as logarithms: each one's KL divergence from their mean."""
    p, q = p.flatten(0, -2), q.flatten(0, -2)
    mean = torch.lerp(p.exp(), q.exp(), 0.5)
    loss = functional.kl_div(mean.log(), p, reduction="sum", log_target=True) / len(p) * 0.5
    return loss + functional.kl_div(mean.log(), q, reduction="sum", log_target=True) / len(p) * 0.5


class JensenShannon(KlDivergence):
    """Jensen-Shannon divergence of log_softmax(x) and given logarithms of a distribution."""

    def forward(self, target: Tensor) -> Tensor:
        return _jensen_shannon(target, functional.log_softmax(self.x, -1))


class LinearJensenShannon(Layer):
    """The divergence of what two linear layers make of two inputs, of which one is trained."""

    def __init__(self, rows: int, hidden: int, classes: int, dtype: str) -> None:
        kind = getattr(torch, dtype)
        super().__init__(_floats(rows, hidden, dtype=dtype), nn.Linear(hidden, classes, bias=False, dtype=kind))
        self.teacher = nn.Linear(hidden, classes, bias=False, dtype=kind)

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.empty_like(self.x),)

    def forward(self, teacher_input: Tensor) -> Tensor:  # type: ignore[override]
        assert self.layer is not None
        student, teacher = self.layer(self.x), self.teacher(teacher_input)
        of_student = torch.log_softmax(student / 1.0, -1).float()
        of_teacher = torch.log_softmax(teacher / 1.0, -1).float()
        return _jensen_shannon(of_teacher, of_student).to(student.dtype)


# -- norms --------------------------------------------------------------------------------------------------------


class LayerNorm(Layer):
    """torch.nn.LayerNorm over the last axis."""

    def __init__(self, rows: int, hidden: int, twins: int = 0) -> None:
        super().__init__(_floats(rows, hidden), nn.LayerNorm(hidden), twins)


class GroupNorm(Layer):
    """torch.nn.GroupNorm of [batch, channels, length]."""

    def __init__(self, batch: int, channels: int, channels_per_group: int, length: int, twins: int = 0) -> None:
        norm = nn.GroupNorm(channels // channels_per_group, channels)
        super().__init__(_floats(batch, channels, length), norm, twins)


class _RootMeanSquare(nn.Module):
    """RMS norm in float32, as decoders of transformers write it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_floats(hidden))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(kind)


class RmsNorm(Layer):
    """RMS norm as decoders write it.

    Its result is float32 for a half input, as the weight is. The gradient that the measured backward is given has the
    input's dtype: it stays, and autograd casts it.
    """

    def __init__(self, rows: int, hidden: int, dtype: str, twins: int = 0) -> None:
        super().__init__(_floats(rows, hidden, dtype=dtype), _RootMeanSquare(hidden), twins)
        if dtype != "float32":
            self.register_buffer("given_gradient", _floats(rows, hidden, dtype=dtype))


class AddRmsNorm(Layer):
    """The sum of two inputs, and its norm: both are results, and both get a gradient."""

    def __init__(self, rows: int, hidden: int, twins: int = 0) -> None:
        super().__init__(_floats(rows, hidden), _RootMeanSquare(hidden), twins)
        self.residual = nn.Parameter(_floats(rows, hidden))

    def forward(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert self.layer is not None
        residual = self.x + self.residual
        return self.layer(residual), residual


class Rotary(Layer):
    """Rotary position embedding of queries and keys. Sines and cosines are made without gradients, by a product."""

    def __init__(self, tokens: int, hidden: int, queries: int, keys: int, dtype: str) -> None:
        width = hidden // queries
        super().__init__(_floats(1, tokens, queries, width, dtype=dtype))
        self.key = nn.Parameter(_floats(1, tokens, keys, width, dtype=dtype))
        self.tokens = tokens
        self.register_buffer("frequencies", _floats(width // 2))

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.empty((1, self.tokens), dtype=torch.int64),)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        query, key = self.x.transpose(1, 2), self.key.transpose(1, 2)
        cos, sin = self.turns(positions)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin

    @torch.no_grad()
    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (self.frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self.x.dtype), angles.sin().to(self.x.dtype)


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((-second, first), dim=-1)


class FunctionalRmsNorm(Layer):
    """torch.nn.functional.rms_norm."""

    def __init__(self, rows: int, batch: int, hidden: int, dtype: str) -> None:
        norm = nn.RMSNorm(hidden, eps=1e-6, dtype=getattr(torch, dtype))
        super().__init__(_floats(rows, batch, hidden, dtype=dtype), norm)


# -- activations and attention --------------------------------------------------------------------------------------


class Softmax(Layer):
    """torch.softmax of one row."""

    def __init__(self, columns: int, dtype: str) -> None:
        super().__init__(_floats(columns, dtype=dtype))

    def forward(self) -> Tensor:
        return torch.softmax(self.x, -1)


class ReluSquared(Softmax):
    """The square of relu of one row."""

    def forward(self) -> Tensor:
        return functional.relu(self.x).square()


class Sparsemax(Layer):
    """Sparsemax over the last axis: the projection on the simplex."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(_floats(rows, columns))

    def forward(self) -> Tensor:
        ordered, _ = torch.sort(self.x, dim=1, descending=True)
        sums = torch.cumsum(ordered, dim=1)
        ranks = torch.arange(1, self.x.shape[1] + 1, device=self.x.device, dtype=self.x.dtype).view(1, -1)
        support = (ranks * ordered + 1) > sums
        count = support.sum(dim=1, keepdim=True).clamp(min=1)
        threshold = ((ordered * support).sum(dim=1, keepdim=True) - 1) / count
        return torch.clamp(self.x - threshold, min=0)


class _Gated(nn.Module):
    def __init__(self, hidden: int, intermediate: int, activation: str, dtype: str) -> None:
        super().__init__()
        kind = getattr(torch, dtype)
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, dtype=kind)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, dtype=kind)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, dtype=kind)
        self.activation = nn.SiLU() if activation == "silu" else nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return output


class GatedMlp(Layer):
    """The feed-forward part of Llama (silu) and Gemma (gelu)."""

    def __init__(
        self, batch: int, tokens: int, hidden: int, intermediate: int, activation: str, dtype: str, twins: int = 0
    ) -> None:
        mlp = _Gated(hidden, intermediate, activation, dtype)
        super().__init__(_floats(batch, tokens, hidden, dtype=dtype), mlp, twins)


class SwiGlu(Layer):
    """The activation alone: silu of one half of the channels, times the other half."""

    def __init__(self, tokens: int, batch: int, intermediate: int, dtype: str) -> None:
        super().__init__(_floats(tokens, batch, 2 * intermediate, dtype=dtype))

    def forward(self) -> Tensor:
        gate, up = self.x.chunk(2, dim=-1)
        return functional.silu(gate) * up


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.q_proj, self.k_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.v_proj, self.out_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        split = (batch, tokens, self.heads, self.width)
        query, key, value = (p(x).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.width**-0.5
        near = torch.zeros(tokens, tokens, dtype=torch.bool, device=x.device)
        scores = scores.masked_fill(~near, float("-inf"))
        result = torch.matmul(functional.softmax(scores, dim=-1), value).transpose(1, 2).contiguous()
        output: Tensor = self.out_proj(result.view(batch, tokens, hidden))
        return output


class MaskedAttention(Layer):
    """Attention that is not fused, with a mask over all pairs of positions."""

    def __init__(self, batch: int, tokens: int, hidden: int, heads: int, twins: int = 0) -> None:
        super().__init__(_floats(batch, tokens, hidden), _Attention(hidden, heads), twins)


class MultiTokenAttention(Layer):
    """Softmax over earlier positions, and a convolution of the shares of neighbours, masked again."""

    def __init__(self, batch: int, heads: int, tokens: int, kernel: int, dtype: str, twins: int = 0) -> None:
        mix = nn.Conv2d(heads, heads, kernel, padding=kernel // 2, dtype=getattr(torch, dtype))
        super().__init__(_floats(batch, heads, tokens, tokens, dtype=dtype), mix, twins)

    def forward(self) -> Tensor:
        assert self.layer is not None
        tokens = self.x.shape[-1]
        earlier = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool, device=self.x.device)).view(1, 1, tokens, -1)
        nothing = torch.full((), -1e9, dtype=self.x.dtype, device=self.x.device)
        zero = torch.full((), 0.0, dtype=self.x.dtype, device=self.x.device)
        scores = self.x.masked_fill(~earlier, nothing)
        shares = torch.softmax(scores, dim=-1)
        mixed: Tensor = self.layer(shares)
        return mixed.masked_fill(~earlier, zero)


NETWORKS = {
    kind.__name__: kind
    for kind in (
        CrossEntropy, LinearCrossEntropy, KlDivergence, TotalVariation, JensenShannon, LinearJensenShannon, LayerNorm,
        GroupNorm, RmsNorm, AddRmsNorm, FunctionalRmsNorm, Rotary, Softmax, ReluSquared, Sparsemax, GatedMlp, SwiGlu,
        MaskedAttention, MultiTokenAttention,
    )
}  # fmt: skip


def example(name: str, sizes: dict[str, int | str]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network on the meta device in training mode, and its inputs."""
    with torch.device("meta"):
        network: Layer = NETWORKS[name](**sizes)
        return network.train(), network.inputs()
