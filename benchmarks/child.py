"""What the benchmarks measure, as processes of their own.

python benchmarks/child.py floor MODEL.onnx          # what any tool that reads ONNX pays: import, load, infer shapes
python benchmarks/child.py warm MODEL COUNT HOW      # staticmem.analyze(MODEL) COUNT times in a process; HOW: "again",
                                                    # "card" (another one each time), "step" (the same question, but
                                                    # the step is not known), "other" (batch and optimizer each time),
                                                    # "read" (the file is not known either)
python benchmarks/child.py once MODEL BATCH MODE     # staticmem.analyze(MODEL) of a fresh process, timed within it:
                                                    # a step of training with Adam ("train"), or as it is ("infer")
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

OPTIMIZERS = ("adamw", "sgd", "adam", "rmsprop")
CARDS = ("h200", "a100-sxm-40gb", "l4", "t4")
SMALL = Path(__file__).parents[1] / "models" / "seed.onnx"


def floor(path: str) -> None:
    import onnx

    onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False))


def warm(path: str, count: int, how: str) -> None:
    import staticmem
    from staticmem.frontends import recent
    from staticmem.studies.study import kept_steps

    staticmem.analyze(path, optimizer="adam")
    taken = []
    for number in range(count):
        batch, optimizer = (2 + number, OPTIMIZERS[number % len(OPTIMIZERS)]) if how == "other" else (None, "adam")
        gpu = CARDS[number % len(CARDS)] if how == "card" else None
        if how == "read":
            recent.models.clear()
        if how == "step":
            kept_steps.clear()
        start = time.process_time()
        staticmem.analyze(path, optimizer=optimizer, batch=batch, gpu=gpu)
        taken.append(time.process_time() - start)
    print(json.dumps({"seconds": median(taken)}))


def once(path: str, batch: int, mode: str = "train") -> None:
    import staticmem

    optimizer = "adam" if mode == "train" else None
    staticmem.analyze(SMALL, optimizer=optimizer)  # imports
    start = time.process_time()
    report = staticmem.analyze(path, optimizer=optimizer, batch=batch)
    seconds = time.process_time() - start
    print(json.dumps({"seconds": seconds, "ops": report.model.ops, "live_bytes": report.peak.live_bytes}))


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "floor":
        floor(arguments[0])
    elif verb == "warm":
        warm(arguments[0], int(arguments[1]), arguments[2])
    else:
        once(arguments[0], int(arguments[1]), *arguments[2:])
