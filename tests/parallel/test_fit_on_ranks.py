"""The step that `fit` writes for several devices holds on a rank of PyTorch what is told of it, to the byte."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest

import staticmem

BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"
RANKS = 4


def peak(text: str, batch: int, accumulate: int, backend: str) -> int:
    """The peak of the third step on rank 0. The other ranks are not there, as in `rank_models`."""
    import torch
    import torch.distributed as dist
    from rank_models import LENGTH, Live, Net
    from torch.testing._internal.distributed.fake_pg import FakeStore

    on_cpu = {"torch.cuda.set_device(rank)": "pass", "device_ids=[rank]": "", '"cuda"': '"cpu"'}
    for of_cuda, instead in on_cpu.items():
        text = text.replace(of_cuda, instead)
    names: dict[str, Any] = {}
    exec(compile(text, "train_step.py", "exec"), names)
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=RANKS if backend == "fake" else 1)
    try:
        live = Live()
        with live if backend == "gloo" else contextlib.nullcontext():  # DDP makes its buckets here
            model, _ = names["prepare"](Net().train())
        with live:
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # the default on CUDA
            ids = torch.zeros((batch, LENGTH), dtype=torch.int64)
            target = torch.zeros((batch * LENGTH,), dtype=torch.int64)
            for value in (*model.parameters(), ids, target):
                live.see(value)
            for step in range(3):
                live.skipped |= {s["step"].untyped_storage()._cdata for s in optimizer.state.values()}
                if step == 2:
                    live.peak = 0
                names["train_step"](model, optimizer, loss_of, [(ids, target)] * accumulate)
        return int(live.peak)
    finally:
        dist.destroy_process_group()


def loss_of(outputs: Any, target: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.flatten(0, 1), target)


@pytest.mark.torch
@pytest.mark.parametrize(
    "asked",
    [{"batch": 8, "amp": "bf16"}, {"batch": 2, "accumulate": 2}, {"batch": 64, "checkpoint": "Block"}],
    ids=lambda asked: "-".join(asked),
)
def test_fsdp(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    result = staticmem.fit(BLOCKS, "l4", optimizer="adamw", devices=RANKS, parallel="fsdp", **asked)
    one = result.settings[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert peak(one.text, result.way.batch, result.way.accumulate, "fake") == one.live_bytes


@pytest.mark.torch
def test_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buckets do not depend on the number of ranks."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    result = staticmem.fit(BLOCKS, "l4", optimizer="adamw", devices=RANKS, batch=8, accumulate=2)
    one = result.settings[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert peak(one.text, 8, 2, "gloo") == one.live_bytes
