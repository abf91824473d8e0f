"""The words for strategies. They import nothing, so that flags and reports can know them."""

from __future__ import annotations

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "tp", "pp")
TITLES = {
    "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP2", "tp": "tensor parallel",
    "pp": "pipeline parallel",
}  # fmt: skip
