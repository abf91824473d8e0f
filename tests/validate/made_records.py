"""Records and readings as a CUDA machine would give them, made by hand."""

from __future__ import annotations

from typing import Any

from staticmem.validate.pytorch.reconcile import TorchReadings
from staticmem.validate.records import Meter, Nodes, Record

MIB = 2**20
GIB = 2**30
CARD = "NVIDIA GeForce RTX 4090"


def readings(**changed: Any) -> TorchReadings:
    """Of a step on a card of 24 GB."""
    values: dict[str, Any] = {
        "version": "2.13.0+cu130", "stand_ins": {}, "rows": (), "live_peak": None, "live_at": ("", ""),
        "forward_end": None, "scalars": 0, "allocated": 300 * MIB, "reserved": 360 * MIB, "reserved_now": 360 * MIB,
        "context": 380 * MIB, "process": 820 * MIB, "kept": 8519680, "cublas": 8519680, "cublaslt": 0, "cudnn": 92000,
        "device": {"name": CARD, "driver": "595.1", "total": 24 * GIB - 400 * MIB, "meter": "NVML, this process"},
    }  # fmt: skip
    return TorchReadings(**{**values, **changed})


def cuda_record(
    context: int = 380, libraries: int = 80, cublas: int = 8519680, lt: int = 0, kept: int = 8519680,
    card: str = CARD, version: str = "2.13.0+cu130", **meters: tuple[int, int, int],
) -> Record:  # fmt: skip
    """A record of a CUDA run: context and libraries in MiB; `meters` are (low, high, measured)."""
    return Record(
        created="2026-11-21T22:00:00+00:00",
        staticmem="0.1.0",
        runtime={"name": "torch", "version": version, "provider": "cuda", "options": {}},
        device={"kind": "cuda", "name": card, "driver": "595.1", "memory": 24 * GIB - 400 * MIB},
        host={"system": "Linux", "machine": "x86_64", "python": "3.11.9"},
        model={"name": "m.pt2", "sha256": "0" * 64, "format": "pt2"},
        scenario={"inputs": {"x": [2, 3]}, "symbols": {}, "runs": 3, "request": {"batch": 2}},
        meters=(
            Meter("context", None, None, context * MIB),
            Meter("libraries", None, None, libraries * MIB),
            Meter("cuBLAS workspace", None, None, cublas),
            Meter("cublasLt workspace", None, None, lt),
            Meter("workspaces kept", None, None, kept),
            *(Meter(name, *figures) for name, figures in meters.items()),
        ),
        nodes=Nodes(),
        verdict="agrees",
    )
