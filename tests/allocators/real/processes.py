"""Runs three steps of the example networks in PyTorch on a stub of CUDA, and writes its memory after every phase.

PyTorch's Python, its dispatcher, autograd and caching allocator are the real ones and decide every allocation; kernels
do nothing. cuDNN is a stub that needs no workspace, so a convolution's is not in these figures. In an environment with
a CUDA build of PyTorch (2.15.0 made the file that is here):

    tests/allocators/real/build.sh /tmp/stub
    STUB=/tmp/stub python tests/allocators/real/processes.py

The result is tests/data/allocator/processes.json.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

CASES: list[dict[str, Any]] = [
    {"model": "seed", "batch": 1, "optimizer": "sgd", "loss": "mean"},
    {"model": "resnet18", "batch": 32, "optimizer": "adam"},
    {"model": "resnet18", "batch": 16, "optimizer": "sgd"},
    {"model": "resnet18", "batch": 64, "optimizer": "adagrad"},
    {"model": "resnet18", "batch": 32, "optimizer": "adamw", "impl": "fused"},
    {"model": "resnet18", "batch": 32, "optimizer": "adam", "impl": "for-loop"},
    {"model": "resnet18", "batch": 64, "optimizer": "adamw", "amp": "bfloat16"},
    {"model": "resnet18", "batch": 32, "optimizer": "adam", "data": "each-step"},
    {"model": "resnet18", "batch": 32, "optimizer": "adam", "data": "handed-over"},
    {"model": "resnet18", "batch": 32},
    {"model": "resnet50", "batch": 32, "optimizer": "adam"},
    {"model": "resnet50", "batch": 16, "optimizer": "sgd", "momentum": 0.9},
    {"model": "resnet50", "batch": 1, "optimizer": "adam"},
    {"model": "resnet50", "batch": 32},
    {"model": "vgg16", "batch": 32, "optimizer": "sgd", "momentum": 0.9},
    {"model": "vgg16", "batch": 32, "optimizer": "adam", "settings": "expandable_segments:True"},
    {"model": "vgg16", "batch": 32, "optimizer": "adam", "settings": "roundup_power2_divisions:8"},
    {"model": "vgg16", "batch": 32, "optimizer": "adam", "capacity": 5_000 * 2**20},
    {"model": "vgg16", "batch": 32, "optimizer": "adam", "capacity": 3_000 * 2**20},
    {"model": "vgg19", "batch": 8, "optimizer": "rmsprop"},
    {"model": "mobilenet_v2", "batch": 32, "optimizer": "adam"},
    {"model": "mobilenet_v2", "batch": 16, "optimizer": "rmsprop"},
]
RESOLUTION = {"seed": (682, 700)}
TOTAL = 140 * 2**30


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Three steps; [phase, max_memory_allocated, max_memory_reserved] since the start, after each phase."""
    import torch
    from torch.nn import functional

    sys.path.insert(0, str(ROOT / "models"))
    architectures = importlib.import_module("architectures")
    torch.cuda.init()
    training = "optimizer" in case
    with torch.device("meta"):
        model = getattr(architectures, case["model"])()
    model.to_empty(device="cpu").to("cuda").train(training)
    height, width = RESOLUTION.get(case["model"], (224, 224))
    data = case.get("data", "resident")

    def batch() -> tuple[Any, Any]:
        x = torch.empty(case["batch"], 3, height, width).to("cuda")
        wants_target = training and case.get("loss") != "mean"
        return x, torch.zeros(case["batch"], dtype=torch.int64).to("cuda") if wants_target else None

    x = y = None
    if data == "resident":
        x, y = batch()
    optimizer = None
    if training:
        name = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
        impl = {"fused": {"fused": True}, "for-loop": {"foreach": False}}.get(case.get("impl", ""), {})
        rest = {"momentum": case["momentum"]} if "momentum" in case else {}
        optimizer = getattr(torch.optim, name[case["optimizer"]])(model.parameters(), lr=0.1, **impl, **rest)
    amp = torch.autocast("cuda", dtype=torch.bfloat16) if case.get("amp") else contextlib.nullcontext()
    phases: list[tuple[str, int, int]] = []

    def mark(phase: str) -> None:
        phases.append((phase, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))

    mark("setup")
    oom, step = None, 0
    try:
        while step < 3:
            step += 1
            if data == "each-step":
                x = y = None
                x, y = batch()
            elif data == "handed-over":
                x = torch.empty(case["batch"], 3, height, width).to("cuda")
                y = torch.zeros(case["batch"], dtype=torch.int64).to("cuda")
            if not training:
                with torch.no_grad():
                    out = model(x)
                del out
                mark("forward")
                continue
            assert optimizer is not None
            optimizer.zero_grad()
            with amp:
                out = model(x)
                loss = out.mean() if y is None else functional.cross_entropy(out, y)
                del out
            mark("forward")
            loss.backward()
            mark("backward")
            optimizer.step()
            mark("optimizer")
    except torch.OutOfMemoryError:
        oom = step
    stats = torch.cuda.memory_stats()
    return {**case, "torch": torch.__version__, "phases": phases, "oom": oom, "retries": stats["num_alloc_retries"]}


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(run(json.load(sys.stdin))))
        return
    sys.path.insert(0, str(HERE))
    from record import OUT, under_stub

    rows = []
    for case in CASES:
        sizes = {"STUB_TOTAL": str(TOTAL), "STUB_CAPACITY": str(case.get("capacity", TOTAL))}
        row = under_stub("processes.py", case, PYTORCH_CUDA_ALLOC_CONF=case.get("settings", ""), **sizes)
        rows.append(row)
        _, allocated, reserved = row["phases"][-1]
        print(f"{case} allocated {allocated / 2**20:.2f} MiB, reserved {reserved / 2**20:.0f} MiB, oom {row['oom']}")
    text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (OUT / "processes.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
