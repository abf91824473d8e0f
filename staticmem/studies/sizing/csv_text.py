"""The sizing report as CSV: a header and a row a card; bytes are integers."""

from __future__ import annotations

import csv
import io

from staticmem.studies.sizing.model import CardRow, Sizing

FIELDS = (
    "slug", "name", "vendor", "form", "architecture", "nominal_bytes", "nvml_bytes", "usable_bytes", "device_low_bytes",
    "device_bytes", "device_high_bytes", "fit", "headroom_bytes", "missing_bytes", "fit_with_checkpointing",
    "max_batch", "max_batch_with_checkpointing", "bandwidth_gb_s", "tdp_w", "link", "year", "price_class",
)  # fmt: skip
TYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")


def render(found: Sizing) -> str:
    """The table as text. Names of cards cannot begin a formula of a spreadsheet."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    counts = [f"devices_{name}" for name in found.strategies] + [f"checkpointing_{name}" for name in found.strategies]
    writer.writerow([*FIELDS, *counts, *(f"tflops_{name}" for name in TYPES), "price_buy", "price_hour", "currency"])
    for row in found.cards:
        writer.writerow(_cells(row))
    return out.getvalue()


def _cells(row: CardRow) -> list[object]:
    cells: list[object] = [_plain(getattr(row, name)) for name in FIELDS]
    cells += [count.devices for count in row.counts] + [int(count.checkpointing) for count in row.counts]
    cells += [row.tflops.get(name) for name in TYPES]
    price = row.price
    return cells + ([None] * 3 if price is None else [price.buy, price.hour, _plain(price.currency)])


def _plain(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
