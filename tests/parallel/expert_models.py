"""Models with routed experts, on one device and as a rank of expert parallelism runs them, and what a step holds.

A rank has its share of the experts of each layer. Tokens go to the experts' ranks and back as torchtitan's
`AllToAllTokenDispatcher` sends them (torchtitan/models/common/token_dispatcher.py at b5bcd76): counts are exchanged,
rows are exchanged, put in the order of experts, and the way back is the reverse. Blocks are sharded by one
`fully_shard` with two meshes, that of the experts and that of all else (`apply_fsdp_to_decoder` of
torchtitan/distributed/fsdp.py). The processes of the other ranks are not there (`rank_models`): counts, which they
would have sent, are those of a load that the test chooses.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import rank_models
import torch
import torch.distributed as dist
from rank_models import Live
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.nn import functional

WIDTH = rank_models.WIDTH
VOCABULARY, BLOCKS, HIDDEN, EXPERTS, CHOICES, LENGTH = 512, 3, 96, 8, 2, 32


class Ranks(NamedTuple):
    """The ranks that share the experts of a layer. `worst`: all tokens of all of them go to experts of this one."""

    group: Any
    size: int
    worst: bool


class Experts(nn.Module):  # type: ignore[misc]
    """Experts of one rank: weights of all of them in three tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(count, HIDDEN, WIDTH))
        self.up = nn.Parameter(torch.empty(count, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.empty(count, WIDTH, HIDDEN))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gated = functional.silu(torch._grouped_mm(rows, self.gate.transpose(-2, -1), offs=ends))
        gated = gated * torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(gated, self.down.transpose(-2, -1), offs=ends)


class Routed(nn.Module):  # type: ignore[misc]
    """The choice of experts, the way to them and back."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.ranks = ranks
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS // ranks.size if ranks else EXPERTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = functional.softmax(self.router(x), dim=-1)
        chosen, ids = torch.topk(scores, CHOICES, dim=-1)
        counts = torch.zeros_like(scores, dtype=torch.int64).scatter_(-1, ids, 1).sum(dim=0)
        order = torch.argsort(ids.view(-1), stable=True)
        weights = chosen.view(-1)[order]
        source = order // CHOICES
        rows = x[source]
        way = None
        if self.ranks is not None:
            rows, counts, way = there(rows, counts, self.ranks)
        rows = self.experts(rows, counts)
        if way is not None:
            rows = back(rows, way)
        rows = rows * weights.reshape(-1, 1)
        return torch.zeros_like(x).scatter_add(0, source.reshape(-1, 1).expand(-1, WIDTH), rows)


class Way(NamedTuple):
    """What the way back needs."""

    group: Any
    order: torch.Tensor
    shape: torch.Size
    sent: list[int]
    received: list[int]


def there(rows: torch.Tensor, counts: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, Way]:
    """The rows for the experts of this rank in the order of its experts, how many each has, and the way back."""
    with torch.no_grad():
        arriving = all_to_all_single(counts.view(ranks.size, -1), None, None, ranks.group)
        arriving = torch.ops._c10d_functional.wait_tensor(arriving).reshape(-1)
        _load(arriving, rows.shape[0], ranks)
        sent = counts.view(ranks.size, -1).sum(dim=1).cpu()
        received = arriving.view(ranks.size, -1).sum(dim=1).cpu()
        sends, receives = sent.tolist(), received.tolist()
        del sent, received
    moved = all_to_all_single(rows, receives, sends, ranks.group)
    shape, moved, order, counts = _by_expert(moved, arriving, ranks.size)
    return moved, counts, Way(ranks.group, order, shape, sends, receives)


def _load(arriving: torch.Tensor, rows: int, ranks: Ranks) -> None:
    """Writes the counts that other ranks would have sent."""
    own = arriving.numel() // ranks.size
    per_rank = rows // ranks.size
    if ranks.worst:
        per_rank = rows // CHOICES * min(CHOICES, own)
    filled = [per_rank // own + (i % own < per_rank % own) for i in range(arriving.numel())]
    arriving.copy_(torch.tensor(filled))


def _by_expert(
    rows: torch.Tensor, arriving: torch.Tensor, ranks: int
) -> tuple[torch.Size, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows by rank and expert, put in the order of experts and ranks."""
    experts = arriving.shape[0] // ranks
    counts = arriving.view(ranks, experts)
    starts = (arriving.cumsum(0) - arriving).view(ranks, experts)
    lengths = counts.t().reshape(-1)
    starts = starts.t().reshape(-1)
    part = torch.arange(lengths.shape[0]).repeat_interleave(lengths, output_size=rows.shape[0])
    begins = lengths.cumsum(0) - lengths
    order = starts[part] + torch.arange(part.shape[0]) - begins[part]
    each = counts.sum(0)
    return rows.shape, rows[order, :], order, each


def back(rows: torch.Tensor, way: Way) -> torch.Tensor:
    """The results of experts on the ranks whose tokens they are."""
    unordered = rows.new_empty(way.shape)
    unordered[way.order, :] = rows
    rows = unordered
    del unordered
    return all_to_all_single(rows, way.sent, way.received, way.group)


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = Routed(ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x).flatten(0, 1)).view(x.shape)


class Net(rank_models.Net):
    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__([Block(ranks) for _ in range(BLOCKS)], VOCABULARY)


def factory() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """What `staticmem export` takes: `tests/data/experts/moe_blocks.pt2`."""
    with torch.device("meta"):
        return Net().train(), (torch.zeros((2, LENGTH), dtype=torch.int64),)


def shard(
    model: nn.Module, blocks: list[nn.Module], experts: Callable[[nn.Module], list[nn.Parameter]], devices: int,
    ranks: int, mixed: bool,
) -> None:  # fmt: skip
    """`fully_shard` on every block, with its experts on a mesh of their own, and on the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    whole = init_device_mesh("cpu", (devices,))
    of_experts = init_device_mesh("cpu", (devices // ranks, ranks), mesh_dim_names=("efsdp", "ep"))["efsdp"]
    infos = FSDPMeshInfo(whole, shard_mesh_dim=0), FSDPMeshInfo(of_experts, shard_mesh_dim=0)
    words: dict[str, Any] = {"mesh": whole, "mp_policy": policy}
    for block in blocks:
        own = set(experts(block))
        count = next(iter(own)).shape[0] * ranks if own else 0

        def place(p: nn.Parameter, own: set[nn.Parameter] = own, dim: int = int(devices > count)) -> Any:
            return ShardPlacementResult(Shard(dim), infos[1]) if p in own else ShardPlacementResult(Shard(0), infos[0])

        fully_shard(block, **words, shard_placement_fn=place if ranks > 1 else None)
    fully_shard(model, **words)
    if ranks == 1:
        return
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    model.set_modules_to_backward_prefetch([blocks[-1]])


def peak(
    ranks: int = 1, devices: int = 1, *, worst: bool = False, mixed: bool = False, batch: int = 2, impl: str = "fused",
    accumulate: int = 1, outputs: str = "dropped",
) -> int:  # fmt: skip
    """The peak of the third step of AdamW on rank 0; one device where `devices` is 1."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
        try:
            of_experts = None
            if ranks > 1:
                group = dist.new_group(list(range(ranks)))
                of_experts = Ranks(group, ranks, worst)
            model = Net(of_experts).train()
            for p in model.parameters():
                nn.init.normal_(p, std=0.02)
            if devices > 1:
                experts = lambda block: list(block.moe.experts.parameters())  # noqa: E731
                shard(model, list(model.layers), experts, devices, ranks, mixed)
            return step_peak(model, batch, LENGTH, impl, accumulate, outputs)
        finally:
            dist.destroy_process_group()


def step_peak(
    model: nn.Module, batch: int, length: int, impl: str, accumulate: int, outputs: str = "dropped",
    logits: Callable[[Any], torch.Tensor] = lambda out: out,
) -> int:  # fmt: skip
    """The peak of the third step."""
    live = Live()
    with live:
        words = {"fused": impl == "fused", "foreach": impl == "foreach"}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **words)
        ids = torch.zeros((batch, length), dtype=torch.int64)
        target = torch.zeros((batch * length,), dtype=torch.int64)
        for value in (*model.parameters(), *model.buffers(), ids, target):
            live.see(value)
        loss = None
        for step in range(3):
            if impl != "fused":
                live.skipped |= {s["step"].untyped_storage()._cdata for s in optimizer.state.values()}
            if step == 2:
                live.peak = 0
            optimizer.zero_grad()
            for _ in range(accumulate):
                out = logits(model(ids))
                loss = functional.cross_entropy(out.flatten(0, 1), target)
                if outputs == "dropped":
                    del out
                loss.backward()
            optimizer.step()
    del loss
    assert live.peak > 0
    return math.ceil(live.peak)
