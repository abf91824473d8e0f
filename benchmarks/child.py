"""What the benchmarks measure, as processes of their own.

python benchmarks/child.py floor MODEL.onnx          # what any tool that reads ONNX pays: import, load, infer shapes
python benchmarks/child.py warm MODEL COUNT          # staticmem.analyze(MODEL) COUNT times in one process
python benchmarks/child.py once MODEL BATCH          # staticmem.analyze(MODEL) of a fresh process, timed within it
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

SMALL = Path(__file__).parents[1] / "models" / "seed.onnx"


def floor(path: str) -> None:
    import onnx

    onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False))


def warm(path: str, count: int) -> None:
    import staticmem

    staticmem.analyze(path, optimizer="adam")
    taken = []
    for _ in range(count):
        start = time.process_time()
        staticmem.analyze(path, optimizer="adam")
        taken.append(time.process_time() - start)
    print(json.dumps({"seconds": median(taken)}))


def once(path: str, batch: int) -> None:
    import staticmem

    staticmem.analyze(SMALL, optimizer="adam")  # imports
    start = time.process_time()
    report = staticmem.analyze(path, optimizer="adam", batch=batch)
    seconds = time.process_time() - start
    print(json.dumps({"seconds": seconds, "ops": report.model.ops, "live_bytes": report.peak.live_bytes}))


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "floor":
        floor(arguments[0])
    elif verb == "warm":
        warm(arguments[0], int(arguments[1]))
    else:
        once(arguments[0], int(arguments[1]))
