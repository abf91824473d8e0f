"""Compares predictions with what was read on real cards, meter by meter.

    python scripts/compare_readings.py                                # the readings in tests/data/measured
    python scripts/compare_readings.py mine.json --all                # yours, and every single one
    python scripts/compare_readings.py --page docs/hardware-readings.md   # writes that page anew; needs PyTorch

docs/readings.md describes the format. A reading names a model file or a network of `models/`, the keywords of
`staticmem.analyze`, and the bytes of each meter that was read. Exit code 0, however far off the predictions are: this
reports, tests judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
    """One meter of one reading, in bytes. `precision`: what the source rounds to; a smaller difference is none."""

    source: str
    network: str
    settings: str
    gpu: str
    torch: str
    meter: str
    read: int
    predicted: int
    low: int
    high: int
    precision: int = 1
    held_out: bool = False

    @property
    def error(self) -> float:
        """The prediction's error as a share of the reading; 0 where the source's rounding explains it."""
        return 0.0 if self.exact else self.predicted / self.read - 1

    @property
    def exact(self) -> bool:
        return abs(self.predicted - self.read) <= self.precision

    @property
    def in_band(self) -> bool:
        return self.low - self.precision <= self.read <= self.high + self.precision


def comparisons(path: Path) -> Iterator[Comparison]:
    """Every meter of every reading of a file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for reading in _readings(document):
        words: dict[str, Any] = {**document.get("request", {}), **reading.get("request", {})}
        network, settings, model = _model_of(reading, path.parent)
        peak = staticmem.analyze(model, **words).peak
        for meter in METERS:
            read = reading.get(f"{meter}_bytes")
            if read is not None:
                band = peak.bands[meter]
                yield Comparison(
                    reading.get("source", document["source"]), network, _text({**settings, **words}),
                    reading.get("gpu", document.get("gpu", "")), words.get("torch_version", "assumed"), meter,
                    read, getattr(peak, f"{meter}_bytes"), band.low, band.high,
                    max(document.get("precision_bytes", 1), int(read * document.get("precision_share", 0))),
                    reading.get("held_out", False),
                )  # fmt: skip


def _readings(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The readings of a document, and those of its series: one network at several sizes."""
    yield from document.get("readings", ())
    for series in document.get("series", ()):
        common = {key: value for key, value in series.items() if not isinstance(value, dict) or key == "request"}
        for meter in METERS:
            for size, read in series.get(f"{meter}_bytes", {}).items():
                sizes = {**series["sizes"], series["over"]: int(size)}
                held = int(size) in series.get("held_out", ())
                yield {**common, "sizes": sizes, f"{meter}_bytes": read, "held_out": held}


def _model_of(reading: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any], Any]:
    """Name, sizes and model of a reading: an export beside the file or in the repository, or a network that PyTorch
    exports now."""
    if "model" in reading:
        path = next(p for p in (folder / reading["model"], ROOT / reading["model"]) if p.exists())
        return path.stem, {}, path
    sizes = reading["sizes"]
    shown = {**sizes, "input": "x".join(map(str, reading["input"]))} if "input" in reading else sizes
    return reading["network"], shown, _exported(json.dumps([reading["network"], sizes, reading.get("input")]))


@lru_cache(maxsize=1)  # sources list a network several times in a row
def _exported(described: str) -> Any:
    """The exported program of a network of `models/`, from its name, sizes and shape of the input as JSON."""
    import torch

    sys.path.insert(0, str(ROOT / "models"))
    import layers
    import text
    import video

    name, sizes, shape = json.loads(described)
    for module in (layers, text, video):
        if name in module.NETWORKS:
            network, inputs = module.example(name, sizes, *([] if shape is None else [shape]))
            return torch.export.export(network, inputs, strict=False)
    names = sorted({*layers.NETWORKS, *text.NETWORKS, *video.NETWORKS})
    sys.exit(f"models/ has no network '{name}'; it has {', '.join(names)}")


def _text(settings: dict[str, Any]) -> str:
    """Settings as a user writes them, without those that a page has columns for."""
    shown = {key: value for key, value in settings.items() if key not in ("gpu", "torch_version", "mode")}
    return ", ".join(f"{key.replace('_', ' ')} {str(value).lower()}" for key, value in shown.items())


def summary(compared: Sequence[Comparison]) -> list[str]:
    """A line for each meter: how many, median and largest error, how many readings the band holds."""
    lines = [f"{'meter':<10} {'readings':>8} {'median':>8} {'largest':>8} {'in band':>8}"]
    for meter in METERS:
        of_meter = [c for c in compared if c.meter == meter]
        if of_meter:
            errors = sorted(abs(c.error) for c in of_meter)
            held = sum(c.in_band for c in of_meter) / len(errors)
            lines.append(f"{meter:<10} {len(errors):>8} {median(errors):>8.2%} {errors[-1]:>8.2%} {held:>8.0%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readings", type=Path, nargs="*", help="files; default: tests/data/measured/readings-*.json")
    parser.add_argument("--all", action="store_true", help="every single comparison")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write all of them as a page of Markdown")
    given = parser.parse_args()
    files = given.readings or sorted(FOLDER.glob("readings-*.json"))
    compared = [comparison for path in files for comparison in comparisons(path)]
    if given.all:
        for c in sorted(compared, key=lambda c: -abs(c.error)):
            band = "" if c.in_band else f", outside of {c.low:,} to {c.high:,}"
            what = f"{c.network} {c.settings} ({c.gpu}, PyTorch {c.torch})"
            print(f"{c.error:+8.2%} {c.meter:<10} {c.read:>15,} read, {c.predicted:>15,} predicted{band}  {what}")
    if given.page:
        from readings_page import page

        given.page.write_text(page(compared), encoding="utf-8")
    print("\n".join(summary(compared)))


if __name__ == "__main__":
    main()
