"""Validates predictions on the GPU at hand, in about ten minutes, and leaves records to send: docs/validate.md.

    pip install torch "staticmem[gpu]"          # torch for your CUDA: https://pytorch.org/get-started
    python scripts/readings/validate_on_gpu.py           # from a checkout, whose models it runs

Each model runs in a process of its own: steps with PyTorch, then inference with the ONNX Runtime where it is installed.
Records hold sizes, versions, the name of the card and of the driver; no paths, no names, no weights. With --device cpu
it is a rehearsal without a GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from staticmem.errors import StaticmemError  # noqa: E402
from staticmem.ort.options import SessionOptions  # noqa: E402 - from this checkout
from staticmem.ort.validation.validation import installed, validate_session  # noqa: E402
from staticmem.scenario.request import Request  # noqa: E402
from staticmem.validate import calibrate, summary  # noqa: E402
from staticmem.validate.pytorch.validation import validate_torch  # noqa: E402
from staticmem.validate.records import Record  # noqa: E402


@dataclass(frozen=True)
class Job:
    """A model and what is done with it; `words` are those of staticmem.analyze. `big` is for GPUs only."""

    runtime: str
    model: str
    words: dict[str, Any] = field(default_factory=dict)
    big: bool = True

    @property
    def name(self) -> str:
        words = "-".join(f"{key}-{value}" for key, value in self.words.items())
        return re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{self.runtime}-{Path(self.model).name}-{words}")[:150]


JOBS = (
    Job("torch", "tests/data/graphs/mlp_blocks.pt2", {"batch": 4, "optimizer": "adamw"}, big=False),
    Job("torch", "models/resnet18.pt2", {"batch": 2}, big=False),
    Job("torch", "models/resnet18.pt2", {"batch": 64, "optimizer": "adam"}),
    Job("torch", "models/resnet50.pt2", {"batch": 16, "optimizer": "sgd", "momentum": 0.9}),
    Job("torch", "models/resnet50.pt2", {"batch": 32, "optimizer": "adamw", "amp": "bf16"}),
    Job("torch", "models/mobilenet_v2.pt2", {"batch": 32, "optimizer": "rmsprop"}),
    Job("torch", "models/vgg16.pt2", {"batch": 16, "optimizer": "sgd", "momentum": 0.9}),
    Job("torch", "models/vgg16.pt2", {"batch": 16, "optimizer": "adamw", "amp": "fp16"}),
    Job("torch", "tests/data/graphs/vit_b_16.pt2", {"batch": 16, "optimizer": "adamw"}),
    Job("torch", "tests/data/graphs/bert-base.pt2", {"batch": 8, "optimizer": "adamw"}),
    Job("torch", "tests/data/graphs/gpt2.pt2", {"batch": 4, "optimizer": "adamw", "amp": "bf16"}),
    Job("torch", "tests/data/graphs/convnext_tiny.pt2", {"batch": 16, "optimizer": "adamw"}),
    Job("torch", "models/resnet50.pt2", {"batch": 64, "mode": "infer"}),
    Job("onnxruntime", "models/resnet18.onnx", {"batch": 2}, big=False),
    Job("onnxruntime", "models/resnet50.onnx", {"batch": 32}),
    Job("onnxruntime", "models/mobilenet_v2.onnx", {"batch": 32}),
    Job("onnxruntime", "models/vgg16.onnx", {"batch": 16}),
)


def chosen(args: argparse.Namespace) -> Iterator[Job]:
    """The jobs for this device: without a GPU only small ones."""
    for job in JOBS:
        if job.big and args.device == "cpu":
            continue
        if args.only and args.only not in job.name:
            continue
        if job.runtime == "onnxruntime" and not installed():
            continue
        yield job


def run(job: Job, args: argparse.Namespace, folder: Path) -> Record:
    """One record."""
    path, timeout = str(ROOT / job.model), float(args.timeout)
    if job.runtime == "torch":
        snapshot = str(folder / f"{job.name}.pickle") if args.snapshots else None
        return validate_torch(path, job.words, args.device, timeout=timeout, snapshot=snapshot)
    return validate_session(path, Request(batch=job.words.get("batch")), SessionOptions(), args.device, timeout)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="a new folder (default: records-DATE)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses with small models")
    parser.add_argument("--minutes", type=float, default=10.0, help="no run begins after so many (default 10)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for one model (default 300)")
    parser.add_argument("--only", metavar="TEXT", help="only runs with this in their name")
    parser.add_argument("--snapshots", action="store_true", help="keep PyTorch's memory snapshots too (large)")
    args = parser.parse_args()
    started = time.monotonic()
    folder = args.output or Path(f"records-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}")
    folder.mkdir(parents=True, exist_ok=False)
    records: list[tuple[str, Record]] = []
    for job in chosen(args):
        if time.monotonic() - started > 60 * args.minutes:
            print(f"skipped  {job.name}: the {args.minutes:g} minutes are over", flush=True)
            continue
        try:
            record = run(job, args, folder)
        except StaticmemError as error:
            print(f"failed   {job.name}: {error.what}. {error.why} [{error.code}]", flush=True)
            continue
        path = folder / f"{job.name}.json"
        path.write_text(record.dumps(), encoding="utf-8")
        records.append((str(path), record))
        print(f"{record.verdict:<8} {job.name}", flush=True)
    if not records:
        print("No record was made.")
        return 1
    print("\n" + summary.render(summary.summary(records)))
    if args.device == "cuda":
        _profile(records, folder)
    print(f"Records are in {folder}. docs/validate.md says how to send them.")
    return 0


def _profile(records: list[tuple[str, Record]], folder: Path) -> None:
    """The profile of this card, where there are readings enough."""
    try:
        text = calibrate.dumps(calibrate.calibrated(records))
        calibrate.check(text, folder / "profile.yaml")
        print(f"{folder / 'profile.yaml'} is this card's profile, for 'staticmem analyze --profile'.")
    except StaticmemError as error:
        print(f"No profile: {error.what}. {error.why} [{error.code}]")


if __name__ == "__main__":
    sys.exit(main())
