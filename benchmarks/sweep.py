"""How long a sweep of 1,000 configurations of ResNet-50 takes: 20 batches x 10 resolutions x 5 optimizers.

    python benchmarks/sweep.py

Seconds of processor time in one process after start-up, the median of five sweeps. A sample of the rows is run on its
own and has to be equal; tests/scenarios checks more of them.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import staticmem

MODELS = Path(__file__).parents[1] / "models"
WHAT_IF: dict[str, Any] = {
    "batch": list(range(4, 84, 4)),
    "resolution": list(range(160, 480, 32)),
    "optimizer": ["sgd", "adam", "adamw", "rmsprop", "adagrad"],
}
TARGET = 2.0  # seconds


def main() -> None:
    for name in ("resnet50_hw.pt2", "resnet50_hw.onnx"):
        times = []
        for _ in range(6):
            start = time.process_time()
            found = staticmem.sweep(MODELS / name, WHAT_IF)
            times.append(time.process_time() - start)
        for row in random.sample(found.rows, 5):
            words: dict[str, Any] = {key: row.settings[key] for key in ("batch", "resolution", "optimizer")}
            alone = staticmem.analyze(MODELS / name, **words)
            assert alone.peak.live_bytes == row.live_bytes, row
        median = statistics.median(times[1:])
        verdict = "pass" if median <= TARGET else "MISS"
        print(f"{name}: {len(found.rows):,} configurations in {median:.2f} s (target {TARGET:g} s): {verdict}")


if __name__ == "__main__":
    main()
