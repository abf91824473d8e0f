"""The memory of the host against real processes, and its parts by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from staticmem.devices import host
from staticmem.devices.host import HostNeeds, Offload
from staticmem.scenario.device import BUILT, GATHERED, MAPPED, ON_GPU, PRETRAINED, READ, HostOptions
from staticmem.units import NOTHING, Band, exactly

MEASURED = json.loads((Path(__file__).parents[1] / "data" / "host_processes.json").read_text("utf-8"))
KIB, MIB = 1 << 10, 1 << 20
MATRIX = 16 * MIB  # float32[2048, 2048], as in scripts/host/host_case.py
SAMPLE = 3 * 224 * 224 * 4
ALONE = {"imports": host.IMPORTS}
LLAMA = 4 * (2 * 16384 * 1024 + 5 * (4 * 1024**2 + 3 * 1024 * 2816))  # bytes of its large tensors


def needs(**more: Any) -> HostNeeds:
    """A process without a GPU."""
    return HostNeeds(**{"base": ALONE, "context": NOTHING, "training": False, **more})


def loads(how: str, layers: int = 24, **more: Any) -> tuple[HostNeeds, HostOptions]:
    return needs(stored=[MATRIX] * layers, **more), HostOptions(loading=how)


def batches(batch: int, workers: int, prefetch: int = 2) -> tuple[HostNeeds, HostOptions]:
    return needs(batch=[batch * SAMPLE]), HostOptions(workers=workers, prefetch=prefetch)


def trains(layers: int, tensors: int, states: int, update: int = 0, **more: Any) -> HostNeeds:
    """Tensors of each matrix that the process holds, and the optimizer's; AdamW has four temporaries of one."""
    offload = Offload(states * layers * MATRIX, 0, update * MATRIX)
    return needs(own=exactly(tensors * layers * MATRIX), offload=offload, training=True, **more)


CASES: Mapping[str, tuple[HostNeeds, HostOptions]] = {
    "imports": (needs(), HostOptions()),
    "imports transformers": (needs(base={**ALONE, "transformers": host.TRANSFORMERS}), HostOptions()),
    "torch.load": loads(READ),
    "torch.load mmap": loads(MAPPED),
    "torch.load into an empty model": loads(BUILT),
    "torch.load mmap into an empty model": loads(ON_GPU),  # no page of the file is read
    "safetensors": loads(MAPPED),
    "safetensors in shards": loads(MAPPED, shard=6 * MATRIX),
    "from_pretrained": (
        needs(base={**ALONE, "transformers": host.TRANSFORMERS}, stored=[LLAMA]),
        HostOptions(loading=PRETRAINED),
    ),
    "batches of 64, no workers": batches(64, 0),
    "batches of 32, 2 workers": batches(32, 2),
    "batches of 64, 2 workers, prefetch 4": batches(64, 2, 4),
    "batches of 4, 4 workers": batches(4, 4),
    "batches of 128, 4 workers": batches(128, 4),
    "state of adamw": (trains(24, 2, 2, 4), HostOptions()),
    "state of sgd": (trains(24, 2, 0), HostOptions()),
    "activations": (needs(own=exactly(12 * MATRIX + 2 * MATRIX), activations=24 * MATRIX), HostOptions()),
    "save": (trains(16, 2, 2, 4), HostOptions()),
    "save, gathered": (trains(16, 1, 2, 0, state=48 * MATRIX), HostOptions(saving=GATHERED)),
    "save to memory": (needs(own=exactly(24 * MATRIX), state=24 * MATRIX), HostOptions(saving=GATHERED)),
}
# loaded in order, transformers lets go of pages or copies of half of the tensors, and which is not known
MISSED = {"from_pretrained"}


def predicted(case: str) -> Band:
    """The largest moment, with the pages of a mapped file, which count as resident."""
    found = [moment.total.plus(exactly(moment.mapped)) for moment in host.moments(*CASES[case])]
    return max(found, key=lambda band: band.expected)


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: row["case"])
def test_real_processes_need_what_is_expected(row: dict[str, Any]) -> None:
    real = row.get("kib", row["peak_resident_kib"]) * KIB
    band = predicted(row["case"])
    assert band.low <= real <= band.high
    assert abs(band.expected / real - 1) <= (0.2 if row["case"] in MISSED else 0.1)


def test_every_process_is_compared() -> None:
    assert {row["case"] for row in MEASURED["rows"]} == set(CASES)
    assert len(MEASURED["rows"]) - len(MISSED) >= 0.9 * len(MEASURED["rows"])


@pytest.mark.parametrize(("nbytes", "block"), [(0, 0), (1, 1), (5 * MIB, 8 * MIB), (8 * MIB, 8 * MIB)])
def test_pinned_blocks_are_powers_of_two(nbytes: int, block: int) -> None:
    assert host.pinned(nbytes) == block


def test_batches_that_are_pinned() -> None:
    parts, pinned = host.data_loader([5 * MIB], HostOptions(workers=2, prefetch=2, pin_memory=True))
    assert pinned == 5 * 8 * MIB  # four wait, and one is with the loop
    assert parts["batches"].expected == 5 * 8 * MIB + 5 * MIB  # one is being copied
    assert host.data_loader([5 * MIB], HostOptions(pin_memory=True))[1] == 2 * 8 * MIB


def test_the_partition_of_deepspeed() -> None:
    """1,000,000 elements in bfloat16 with AdamW's two states: 4 MB need a block of 2^22 bytes, 2 MB one of 2^21."""
    offload = host.deepspeed_offload(1_000_000, 2, 250_000, 2, 2)
    assert offload.pageable == 8_000_000
    assert offload.pinned == 2 * 2**22 + 2**21 + 2**19
    assert host.deepspeed_offload(1_000_000, 2, 250_000, 2, 3) == Offload(12_000_000, 2**22 + 2**21, 4_000_000)


def test_the_optimizer_of_torchao() -> None:
    assert host.torchao_offload([3 * MIB, MIB], 8 * MIB) == Offload(8 * MIB, 2 * 5 * MIB, 12 * MIB)
    # shards of both are pinned, 4 and 1 MiB, and the gradient of the first
    assert host.fsdp_offload([3 * MIB, MIB], [3 * MIB], 6 * MIB) == Offload(6 * MIB, 9 * MIB, 12 * MIB)


def test_a_limit_holds_with_its_confidence() -> None:
    band = Band(0, 100, 200)
    assert host.limit(band, 0.5) == 100
    assert host.limit(band, 0.95) == 200
    assert host.limit(band, 0.99) == 241  # 2.326 / 1.645 standard deviations
