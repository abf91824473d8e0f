"""What the benchmarks measure, as processes of their own.

python benchmarks/child.py floor MODEL.onnx          # what any tool that reads ONNX pays: import, load, infer shapes
python benchmarks/child.py warm MODEL COUNT HOW      # staticmem.analyze(MODEL) COUNT times in a process; HOW: "again",
                                                    # "card" (another one each time), "step" (the same question, but
                                                    # the step is not known), "other" (batch and optimizer each time),
                                                    # "read" (the file is not known either)
python benchmarks/child.py once MODEL BATCH MODE     # staticmem.analyze(MODEL) of a fresh process, timed within it:
                                                    # a step of training with Adam ("train"), or as it is ("infer")
python benchmarks/child.py export HOW                # ResNet-50 to .pt2 in a process that has done it before, by
                                                    # "torch.export" with the same open sizes, by "staticmem.export"
                                                    # with its recording, or the "recording" alone; with PyTorch
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
    from staticmem.studies.steps import kept_steps

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


def export(how: str) -> None:
    for path in (SMALL.parent, SMALL.parents[1]):
        sys.path.insert(0, str(path))
    import io
    import tempfile

    import torch
    from architectures import resnet50  # type: ignore[import-not-found,unused-ignore]

    import staticmem
    from staticmem.recording.record import record

    taken = []
    for _ in range(4):
        with torch.device("meta"):
            model, inputs = resnet50().train(), (torch.empty(2, 3, 224, 224),)
        start = time.process_time()
        if how == "torch.export":
            sizes = (dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO),)
            program = torch.export.export(model, inputs, dynamic_shapes=sizes, strict=False)
            torch.export.save(program, io.BytesIO())
        elif how == "recording":
            record(model, inputs)
        else:
            with tempfile.TemporaryDirectory() as folder:
                staticmem.export(model, inputs, Path(folder) / "model.pt2")
        taken.append(time.process_time() - start)
    print(json.dumps({"seconds": median(taken[1:])}))


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    if verb == "floor":
        floor(arguments[0])
    elif verb == "warm":
        warm(arguments[0], int(arguments[1]), arguments[2])
    elif verb == "export":
        export(arguments[0])
    else:
        once(arguments[0], int(arguments[1]), *arguments[2:])
