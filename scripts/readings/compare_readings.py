"""Compares predictions with what was read on real cards, meter by meter.

    python scripts/readings/compare_readings.py                  # the readings in tests/data/measured
    python scripts/readings/compare_readings.py mine.json --all  # yours, and every single one
    python scripts/readings/compare_readings.py --page FILE      # docs/generated/hardware-readings.md

docs/internals/readings.md describes the format. A reading names a model file or a network of `models/`, the keywords of
`staticmem.analyze`, and the bytes of each meter that was read. The page needs transformers and timm. Exit code 0,
however far off the predictions are: this reports, tests judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from readings_models import predictions
from readings_page import Comparison, page

ROOT = Path(__file__).parents[2]
METERS = ("live", "allocated", "reserved", "device", "context")
OF_ALL = ("whole", "moment")  # a document may say them for all of its readings
NAMED = ("model", "network", "sizes", "input", "whole", "moment", "cards")  # that decide a prediction
FOLDER = ROOT / "tests" / "data" / "measured"


def comparisons(path: Path, known: dict[str, Any], state: Path | None = None) -> Iterator[Comparison]:
    """Every meter of every reading of a file. `known`: predictions that are there already, kept in the file `state`."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for reading in _readings(document):
        words: dict[str, Any] = {**document.get("request", {}), **reading.get("request", {})}
        reading = {**{name: document[name] for name in OF_ALL if name in document}, **reading}
        asked = {name: reading[name] for name in NAMED if name in reading}
        key = json.dumps([asked, document.get("architectures", {}).get(reading.get("architecture")), words])
        if key not in known:
            known[key] = predictions(reading, document, words, path.parent)
            if state:
                state.write_text(json.dumps(known), encoding="utf-8")
        network, settings, peak = known[key]
        for meter in METERS:
            read = reading.get(f"{meter}_bytes")
            if read is not None:
                predicted, low, high = peak[meter]
                yield Comparison(
                    reading.get("source", document["source"]), network, _text({**settings, **words}),
                    reading.get("gpu", document.get("gpu", "")), words.get("torch_version", "assumed"), meter,
                    read, predicted, low, high,
                    max(document.get("precision_bytes", 1), int(read * document.get("precision_share", 0))),
                    reading.get("held_out", False), _explanation(reading, document),
                )  # fmt: skip


def _explanation(reading: dict[str, Any], document: dict[str, Any]) -> str:
    """What the document says of a reading that is off: its own text, or one that several share, by its name."""
    text = str(reading.get("explained", ""))
    return str(document.get("explanations", {}).get(text, text))


def _absent(path: Path) -> str:
    """The package that the networks of a file need and that is not installed; "" where there is none."""
    needs = json.loads(path.read_text(encoding="utf-8")).get("needs", ())
    return next((name for name in needs if find_spec(name) is None), "")


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


def _not_tried(files: Sequence[Path]) -> Iterator[tuple[str, str, int, str]]:
    """Readings of the same sources that have no prediction: source, rows, how many, and why."""
    for path in files:
        document = json.loads(path.read_text(encoding="utf-8"))
        for rows in document.get("not_tried", ()):
            yield document["source"], rows["rows"], rows["count"], rows["why"]


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
    parser.add_argument("--state", type=Path, metavar="FILE", help="go on after a stop; no prediction is made again")
    given = parser.parse_args()
    files = given.readings or sorted(FOLDER.glob("readings-*.json"))
    for path in files:
        if absent := _absent(path):
            print(f"{path.name} is left out: it needs {absent}", file=sys.stderr)
    files = [path for path in files if not _absent(path)]
    known = json.loads(given.state.read_text(encoding="utf-8")) if given.state and given.state.exists() else {}
    compared = [comparison for path in files for comparison in comparisons(path, known, given.state)]
    if given.all:
        for c in sorted(compared, key=lambda c: -abs(c.error)):
            band = "" if c.in_band else f", outside of {c.low:,} to {c.high:,}"
            what = f"{c.network} {c.settings} ({c.gpu}, PyTorch {c.torch})"
            print(f"{c.error:+8.2%} {c.meter:<10} {c.read:>15,} read, {c.predicted:>15,} predicted{band}  {what}")
    if given.page:
        given.page.write_text(page(compared, list(_not_tried(files))), encoding="utf-8")
    print("\n".join(summary(compared)))


if __name__ == "__main__":
    main()
