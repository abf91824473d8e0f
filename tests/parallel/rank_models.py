"""A model of repeated blocks without attention, its export, and what a step of it holds in PyTorch on one rank.

The processes of the other ranks are not there: PyTorch's fake process group answers collectives at once, with memory
as they would have it. Every storage that any call of the step sees is counted, rounded up to 512 bytes.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VOCABULARY, WIDTH, BLOCKS, HIDDEN, LENGTH = 1000, 64, 4, 200, 16


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, blocks: Iterable[nn.Module] = (), vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(list(blocks) or [Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """A product with a packed weight, which is unpacked for each: `MatMul4Bit` of bitsandbytes."""

    @staticmethod
    def forward(ctx: Any, x: Any, packed: Any, bias: Any, shape: tuple[int, int]) -> Any:
        ctx.packed, ctx.shape = packed, shape
        return nn.functional.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad @ grad.new_empty(ctx.shape), None, None, None


class Packed(nn.Module):  # type: ignore[misc]
    """`Linear4bit` of bitsandbytes in this type: two numbers a byte, and statistics that are no buffers."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((inputs * outputs // 2, 1), dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype), requires_grad=False)
        self.statistics = torch.zeros(-(-inputs * outputs // 64)), torch.zeros(16)
        self.shape, self.dtype = (outputs, inputs), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _Product.apply(x.to(self.dtype), self.weight, self.bias.to(self.dtype), self.shape)
        return out.to(x.dtype)


class Adapted(nn.Module):  # type: ignore[misc]
    """Beside it an adapter of rank 8 in float32, as `LoraLayer` of PEFT."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = Packed(base.in_features, base.out_features, dtype)
        self.down, self.up = nn.Linear(base.in_features, 8, bias=False), nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, kept = self.base(x), x.dtype
        return (out + self.up(self.down(x.to(self.down.weight.dtype))) * 2.0).to(kept)


def export(path: Path) -> None:
    """`tests/data/graphs/mlp_blocks.pt2`, without weights."""
    with torch.device("meta"):
        model, ids = Net().train(), torch.zeros((2, LENGTH), dtype=torch.int64)
    made = torch.export.export(model, (ids,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False)
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)
    torch.export.save(made, path)


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of live storages, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.skipped: set[int] = set()
        self.peak = 0

    def see(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = getattr(value, "_local_tensor", value)
            value = getattr(value, "elem", value)  # AsyncCollectiveTensor: a wrapper has no memory of its own
            storage = value.untyped_storage()
            if storage._cdata not in self.skipped:
                self.storages[storage._cdata] = weakref.ref(storage)

    def now(self) -> int:
        alive = [storage for ref in self.storages.values() if (storage := ref()) is not None]
        return sum(-(-s.nbytes() // 512) * 512 for s in alive if s._cdata not in self.skipped)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            self.see(value)
        self.peak = max(self.peak, self.now())
        return out


class Host:
    """The CPU beside a device that is the CPU too: copies that FSDP2's offloading asks for are made, and what is theirs
    on the host is not counted. All of it is held, so that no address is another tensor's later."""

    def __init__(self, live: Live) -> None:
        self.live, self.held, self.to = live, list[Any](), torch.Tensor.to

    def take(self, value: Any) -> None:
        value = getattr(value, "_local_tensor", value)
        storage = value.untyped_storage()
        self.held.append(storage)
        self.live.skipped.add(storage._cdata)

    def copy(self, value: Any, *words: Any, **more: Any) -> Any:
        """`Tensor.to`; with `non_blocking` it is a copy to the other side."""
        if "non_blocking" not in more or not (words and isinstance(words[0], torch.device)):
            return self.to(value, *words, **more)
        if value.untyped_storage()._cdata in self.live.skipped:
            return value.clone()
        self.live.__exit__(None, None, None)
        made = value.clone()
        self.take(made)
        self.live.__enter__()
        return made


def shard(model: nn.Module, ranks: int, mixed: bool, replicas: int = 1, offload: bool = False) -> None:
    """`fully_shard` on every block and on the model; `mixed`: parameters in bfloat16, reduction in float32. `replicas`
    groups of the ranks have the whole model each; `offload`: parameters, gradients and states are on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sizes = (replicas, ranks // replicas) if replicas > 1 else (ranks,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    words: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": policy} if mixed else {})
    words |= {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    assert isinstance(model, Net)
    for layer in model.layers:
        fully_shard(layer, **words)
    fully_shard(model, **words)


def peak(
    strategy: str, ranks: int, *, mixed: bool = False, fused: bool = False, batch: int = 2, outputs: str = "dropped",
    accumulate: int = 1, set_to_none: bool = True, frozen: bool = False, half: bool = False, packed: bool = False,
    replicas: int = 1, offload: bool = False,
) -> int:  # fmt: skip
    """The peak of the third step of AdamW on rank 0. Each of the micro-batches reduces its gradients. `frozen`: only
    the norms are trained; `half`: the model is in bfloat16 before it is divided; `packed`: adapters are trained beside
    packed weights."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ddp = strategy == "ddp"
    backend, store = ("gloo", dist.HashStore()) if ddp else ("fake", FakeStore())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(backend, store=store, rank=0, world_size=1 if ddp else ranks)
        try:
            return _step_peak(
                strategy,
                ranks,
                mixed,
                fused,
                batch,
                outputs,
                accumulate,
                set_to_none,
                frozen,
                half,
                packed,
                replicas,
                offload,
            )
        finally:
            dist.destroy_process_group()


def _step_peak(
    strategy: str, ranks: int, mixed: bool, fused: bool, batch: int, outputs: str, accumulate: int, set_to_none: bool,
    frozen: bool, half: bool, packed: bool, replicas: int, offload: bool,
) -> int:  # fmt: skip
    model: nn.Module = Net().train().to(torch.bfloat16 if half else torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not packed and (not frozen or "norm" in name))
    live = Live()
    host = Host(live)
    for layer in model.layers if packed else ():
        for name in ("up", "down"):
            adapted = Adapted(getattr(layer, name), torch.bfloat16 if half or mixed else torch.float32)
            setattr(layer, name, adapted)
            for value in adapted.base.statistics:
                live.see(value)
    copies = mock.patch.object(torch.Tensor, "to", lambda value, *words, **more: host.copy(value, *words, **more))
    with live, copies if offload else contextlib.nullcontext():
        if strategy == "fsdp":
            live.__exit__(None, None, None)
            shard(model, ranks, mixed, replicas, offload)
            for parameter in model.parameters() if offload else ():
                host.take(parameter)
            live.__enter__()
        elif strategy == "ddp":  # its buckets are made here; they do not depend on the number of ranks
            model = nn.parallel.DistributedDataParallel(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, foreach=not fused, fused=fused)
        ids = torch.zeros((batch, LENGTH), dtype=torch.int64)
        target = torch.zeros((batch * LENGTH,), dtype=torch.int64)
        for value in (*model.parameters(), ids, target):
            live.see(value)
        loss = None
        for step in range(3):
            if not fused:  # the counters of steps are on the CPU there too
                live.skipped |= {s["step"].untyped_storage()._cdata for s in optimizer.state.values()}
            if step == 2:
                live.peak = 0
            optimizer.zero_grad(set_to_none)
            for _ in range(accumulate):
                out = model(ids)
                loss = nn.functional.cross_entropy(out.flatten(0, 1), target)
                if outputs == "dropped":
                    del out
                loss.backward()
            if offload:
                live.__exit__(None, None, None)
            optimizer.step()
            if offload:
                live.__enter__()
    del loss
    return live.peak
