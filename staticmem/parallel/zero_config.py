"""What of DeepSpeed's configuration decides the memory of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroConfig:
    """`zero_optimization` of DeepSpeed's JSON, in elements; the defaults are DeepSpeed's."""

    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
