"""Compares predictions with what was read on real cards, meter by meter.

    python scripts/compare_readings.py                                # the readings in tests/data/measured
    python scripts/compare_readings.py mine.json --all                # yours, and every single one

docs/readings.md describes the format. A reading names a model file, the words of `staticmem.analyze`, and the bytes of
each meter that was read. Exit code 0, however far off the predictions are: this reports, tests judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import staticmem  # noqa: E402 - from this checkout

METERS = ("live", "allocated", "reserved", "device", "context")
FOLDER = ROOT / "tests" / "data" / "measured"


@dataclass(frozen=True)
class Comparison:
    """One meter of one reading, in bytes."""

    what: str
    meter: str
    read: int
    predicted: int
    low: int
    high: int

    @property
    def error(self) -> float:
        return self.predicted / self.read - 1

    @property
    def in_band(self) -> bool:
        return self.low <= self.read <= self.high


def comparisons(path: Path) -> Iterator[Comparison]:
    """Every meter of every reading of a file. Models are looked up beside the file, then in the repository."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for reading in document["readings"]:
        words: dict[str, Any] = {**document.get("request", {}), **reading.get("request", {})}
        model = next(p for p in (path.parent / reading["model"], ROOT / reading["model"]) if p.exists())
        peak = staticmem.analyze(model, **words).peak
        for meter in METERS:
            read = reading.get(f"{meter}_bytes")
            if read is not None:
                band = peak.bands[meter]
                what = f"{model.stem} {' '.join(f'{k}={v}' for k, v in words.items())}"
                yield Comparison(what, meter, read, getattr(peak, f"{meter}_bytes"), band.low, band.high)


def summary(found: list[Comparison]) -> list[str]:
    """A line for each meter: how many, median and largest error, how many readings the band holds."""
    lines = [f"{'meter':<10} {'readings':>8} {'median':>8} {'largest':>8} {'in band':>8}"]
    for meter in METERS:
        errors = sorted(abs(c.error) for c in found if c.meter == meter)
        if errors:
            held = sum(c.in_band for c in found if c.meter == meter) / len(errors)
            lines.append(f"{meter:<10} {len(errors):>8} {median(errors):>8.2%} {errors[-1]:>8.2%} {held:>8.0%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readings", type=Path, nargs="*", help="files; default: tests/data/measured/readings-*.json")
    parser.add_argument("--all", action="store_true", help="every single comparison")
    given = parser.parse_args()
    files = given.readings or sorted(FOLDER.glob("readings-*.json"))
    found = [comparison for path in files for comparison in comparisons(path)]
    if given.all:
        for c in sorted(found, key=lambda c: -abs(c.error)):
            band = "" if c.in_band else f", outside of {c.low:,} to {c.high:,}"
            print(f"{c.error:+8.2%} {c.meter:<10} {c.read:>15,} read, {c.predicted:>15,} predicted{band}  {c.what}")
    print("\n".join(summary(found)))


if __name__ == "__main__":
    main()
