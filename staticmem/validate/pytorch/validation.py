"""`validate --runtime torch`: the steps of a graph predicted, run in a process of its own, and compared."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from staticmem import child
from staticmem.child import Failure, RunError
from staticmem.files import temporary_folder
from staticmem.ir.graph import Note
from staticmem.validate.pytorch import reconcile
from staticmem.validate.pytorch.prediction import Predicted, device_meters, predicted
from staticmem.validate.pytorch.reconcile import Row, TorchReadings
from staticmem.validate.records import Nodes, Record, new_record

RUNS = 3  # steps: what a prediction of device memory has
TIMEOUT = 600.0  # seconds
FAILURES: child.Failures = {
    "import": Failure(
        "PyTorch cannot be imported", "{message}.", "Install it again: https://pytorch.org/get-started.", "SM220"
    ),
    "run": Failure(
        "PyTorch cannot run this graph",
        "{message}.",
        "Check the sizes (--batch, --dim); values here are random, and some ops need particular ones.",
        "SM221",
    ),
    "memory": Failure(
        "not enough memory to run the model",
        "{message}.",
        "Choose a smaller batch or smaller dimensions; 'staticmem analyze' needs no memory for tensors.",
        "SM222",
    ),
    "crash": Failure(
        "the process that ran the model crashed",
        "{message}.",
        "Try another version of PyTorch; if staticmem itself failed, report it.",
        "SM223",
    ),
    "timeout": Failure(
        "the steps took longer than {timeout} seconds",
        "The process was ended.",
        "Choose smaller dimensions, or a larger --timeout.",
        "SM224",
    ),
    "device": Failure(
        "there is no CUDA device for PyTorch",
        "{message}.",
        "Check nvidia-smi and that this PyTorch is built for CUDA, or use --device cpu.",
        "SM225",
    ),
}


def require_torch() -> None:
    """Raises:
    RunError: PyTorch is not installed (SM220).
    """
    if importlib.util.find_spec("torch") is None:
        raise RunError(
            "PyTorch is not installed",
            "The model is run with it.",
            "pip install torch, as https://pytorch.org/get-started says for your device.",
            code="SM220",
        )


def validate_torch(
    path: str,
    options: Mapping[str, Any],
    device: str = "auto",
    runs: int = RUNS,
    timeout: float = TIMEOUT,
    memory_limit: int | None = None,
    snapshot: str | None = None,
    threads: int | None = None,
    debug: bool = False,
) -> Record:
    """Runs the steps of a model with PyTorch and compares memory with the prediction.

    Args:
        path: an .onnx or a .pt2 file.
        words: the fields of a `Request` that were given: sizes, the step, the device.
        device: "cpu"; "cuda", an error where there is none; "auto", CUDA where there is one.
        runs: steps; the last one is compared on the CPU, all of them on CUDA.
        timeout: seconds until the process is ended.
        memory_limit: bytes of main memory for the process, None for what is available.
        snapshot: where PyTorch's own memory snapshot goes, on CUDA.
        threads: of PyTorch on the CPU.
        debug: whether a failure of the child is shown with its traceback.

    Raises:
        RunError: SM220 to SM225.
        UsageError: a lever that a run of a graph cannot have (SM226).
        StaticmemError: the file or the scenario cannot be analysed.
    """
    require_torch()
    options = {name: value for name, value in options.items() if value is not None}
    job = {"model": os.path.abspath(path), "options": options, "runs": runs, "threads": threads, "debug": debug}
    notes: list[Note] = []
    if device in ("auto", "cuda"):
        target = os.path.abspath(snapshot) if snapshot is not None else None
        on_cuda = {**job, "device": "cuda", "memory_limit": None, "snapshot": target}
        try:
            return _validated(path, on_cuda, timeout, notes)
        except RunError as error:
            if device == "cuda" or error.code != "SM225":
                raise
            notes.append(Note("warning", "SM227", "this ran on the CPU: PyTorch sees no CUDA device here"))
    limit = memory_limit or child.available_memory()
    return _validated(path, {**job, "device": "cpu", "memory_limit": limit, "snapshot": None}, timeout, notes)


def _validated(path: str, job: Mapping[str, Any], timeout: float, notes: Sequence[Note]) -> Record:
    asked, device = job["options"], job["device"]
    prediction = predicted(path, asked, device)
    if device == "cpu":
        child.check_memory(prediction.lifetimes.peak_bytes, job["memory_limit"], FAILURES)
    shapes = prediction.result.output_shapes
    with temporary_folder() as folder:
        read = measure({**job, "output_shape": list(shapes[0]) if shapes else []}, folder, timeout)
    rows, compared = reconcile.Alignment((), (), ()), Nodes()
    if device == "cpu":
        rows = reconcile.align(reconcile.predicted_rows(prediction.lifetimes), read.rows)
        compared = reconcile.nodes(rows)
        meters = reconcile.cpu_meters(prediction, read)
        verdict = reconcile.cpu_verdict(meters, compared)
    else:
        name, total = str(read.device.get("name", "")), int(read.device.get("total", 0))
        meters = reconcile.cuda_meters(device_meters(prediction, name, total, read.version), read)
        verdict = reconcile.cuda_verdict(meters)
    study = prediction.study
    options = {"cudnn": read.cudnn} if read.cudnn is not None else {}
    return new_record(
        path,
        study.model.format,
        device,
        read.device,
        [*notes, *_notes(prediction, read, device)],
        runtime={"name": "torch", "version": read.version, "provider": device, "options": options},
        scenario={
            "inputs": {name: list(shape) for name, shape in study.binding.shapes.items()},
            "symbols": dict(study.binding.symbols),
            "runs": job["runs"],
            "request": {k: list(v) if isinstance(v, tuple) else v for k, v in asked.items()},
        },
        meters=meters,
        nodes=compared,
        verdict=verdict,
        explanations=tuple(reconcile.explanations(rows, meters)),
    )


def measure(job: Mapping[str, Any], folder: str, timeout: float) -> TorchReadings:
    """Runs a job in a process of its own; `folder` is a temporary one of the caller's.

    Raises:
        RunError: SM220 to SM225, by what went wrong.
    """
    job = {**job, "answer": os.path.join(folder, "answer.json")}
    answer = child.run("staticmem.validate.pytorch.child", job, folder, timeout, FAILURES)
    answer["rows"] = tuple(Row(r[0], r[1], r[2], tuple(r[3]), r[4], r[5]) for r in answer.get("rows", ()))
    return TorchReadings(**answer)


def _notes(prediction: Predicted, read: TorchReadings, device: str) -> list[Note]:
    """What a reader of the record has to know of how both sides came about."""
    text = "the graph ran op by op: values go after their last use on both sides, as there are no module calls"
    notes = [Note("assumption", "SM228", text)]
    if device == "cpu":
        if read.stand_ins.get("dropout"):
            text = "dropout ran as native_dropout with its mask of bytes, as on CUDA; the CPU has a float mask"
            notes.append(Note("assumption", "SM229", text, read.stand_ins["dropout"]))
        if read.stand_ins.get("attention"):
            text = "attention is the math kernel without dropout on both sides: the CPU does not have those of CUDA"
            notes.append(Note("assumption", "SM229", text))
        if prediction.scenario.amp is not None:
            text = "autocast of the CPU has its own lists of ops: casts can differ from those on CUDA"
            notes.append(Note("warning", "SM229", text))
        if read.scalars:
            text = "numbers of the optimizer that are the CPU's on a machine with a GPU too were not counted"
            notes.append(Note("assumption", "SM229", text, read.scalars))
    elif "nvml" in read.device:
        text = f"memory of the process was {read.device['nvml']} (pip install nvidia-ml-py)"
        notes.append(Note("warning", "SM227", text))
    unknown = prediction.result.unknown
    if unknown:
        notes.append(Note("warning", "SM201", f"no rule for {', '.join(sorted(unknown)[:5])}", sum(unknown.values())))
    return notes
