"""`validate --runtime torch`: predict, run, read, reconcile."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from staticmem.devices.meters import DeviceMeters, on_device
from staticmem.files import temporary_folder
from staticmem.ir.graph import Note
from staticmem.studies.device import device_of
from staticmem.validate import torch_reconcile, torch_run
from staticmem.validate.record import Meter, Nodes, Record, sha256
from staticmem.validate.torch_cards import gpu_word
from staticmem.validate.torch_predict import Predicted, predicted
from staticmem.version import __version__


def validate_torch(
    path: str,
    words: Mapping[str, Any],
    device: str = "auto",
    runs: int = torch_run.RUNS,
    timeout: float = torch_run.TIMEOUT,
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
        timeout: seconds for all of them.
        memory_limit: bytes of main memory for the process, None for what is available.
        snapshot: where PyTorch's own memory snapshot goes, on CUDA.

    Raises:
        TorchRunError: SM220 to SM225.
        UsageError: a lever that a run of a graph cannot have (SM226).
        StaticmemError: the file or the scenario cannot be analysed.
    """
    torch_run.require_torch()
    words = {name: value for name, value in words.items() if value is not None}
    fallback = None
    if device in ("auto", "cuda"):
        try:
            return _validated(path, words, "cuda", runs, timeout, None, snapshot, threads, debug, None)
        except torch_run.TorchRunError as error:
            if device == "cuda" or error.code != "SM225":
                raise
            fallback = Note("warning", "SM227", "this ran on the CPU: PyTorch sees no CUDA device here")
    return _validated(path, words, "cpu", runs, timeout, memory_limit, None, threads, debug, fallback)


def _validated(
    path: str, words: Mapping[str, Any], device: str, runs: int, timeout: float, memory_limit: int | None,
    snapshot: str | None, threads: int | None, debug: bool, fallback: Note | None,
) -> Record:  # fmt: skip
    found = predicted(path, words, device)
    if device == "cpu":
        _check_memory(found, memory_limit)
    shapes = found.result.output_shapes
    with temporary_folder() as folder:
        read = torch_run.run(
            path, words, device, shapes[0] if shapes else (), folder, runs, timeout, memory_limit or _available(),
            snapshot, threads, debug,
        )  # fmt: skip
    notes = [*([fallback] if fallback is not None else []), *_notes(found, read, device)]
    if device == "cpu":
        rows = torch_reconcile.align(
            torch_reconcile.predicted_rows(found.lifetimes), torch_reconcile.measured_rows(read.rows)
        )
        compared = torch_reconcile.nodes(rows)
        meters = torch_reconcile.cpu_meters(found, read)
        verdict = torch_reconcile.cpu_verdict(meters, compared)
        explained = torch_reconcile.explanations(rows, meters)
    else:
        compared, rows = Nodes(), torch_reconcile.Alignment((), (), ())
        name, total = str(read.device.get("name", "")), int(read.device.get("total", 0))
        meters = torch_reconcile.cuda_meters(device_meters(found, name, total, read.version), read)
        verdict = torch_reconcile.cuda_verdict(meters)
        explained = torch_reconcile.explanations(rows, meters)
    return _record(path, words, found, read, device, runs, meters, compared, verdict, explained, notes)


def device_meters(found: Predicted, name: str, total: int, version: str) -> DeviceMeters:
    """The prediction for a card by the driver's name and with `total` bytes, and for a version of PyTorch.

    What the request says of the device counts more.
    """
    request = found.study.request
    if request.gpu is None:
        request = replace(request, gpu=gpu_word(name, total))
    if request.torch_version is None:
        request = replace(request, torch_version=version)
    return on_device(found.result, device_of(request))


def _notes(found: Predicted, read: torch_run.TorchReadings, device: str) -> list[Note]:
    """What a reader of the record has to know of how both sides were made."""
    text = "the graph ran op by op: values go after their last use on both sides, as there are no module calls"
    notes = [Note("assumption", "SM228", text)]
    if device == "cpu":
        if read.stand_ins.get("dropout"):
            text = "dropout ran as native_dropout with its mask of bytes, as on CUDA; the CPU has a float mask"
            notes.append(Note("assumption", "SM229", text, read.stand_ins["dropout"]))
        if read.stand_ins.get("attention"):
            text = "attention is the math kernel without dropout on both sides: the CPU does not have those of CUDA"
            notes.append(Note("assumption", "SM229", text))
        if found.scenario.amp is not None:
            text = "autocast of the CPU has lists of ops of its own: casts can differ from those on CUDA"
            notes.append(Note("warning", "SM229", text))
        if read.scalars:
            text = "numbers of the optimizer that are the CPU's on a machine with a GPU too were not counted"
            notes.append(Note("assumption", "SM229", text, read.scalars))
    elif "nvml" in read.device:
        text = f"memory of the process was {read.device['nvml']} (pip install nvidia-ml-py)"
        notes.append(Note("warning", "SM227", text))
    unknown = sum(found.result.unknown.values())
    if unknown:
        notes.append(Note("warning", "SM201", f"no rule for {', '.join(sorted(found.result.unknown)[:5])}", unknown))
    return notes


def _check_memory(found: Predicted, limit: int | None) -> None:
    """Refuses before the machine is brought down."""
    available = limit if limit is not None else _available()
    needed = found.lifetimes.peak_bytes
    if available is not None and needed > available:
        raise torch_run.out_of_memory(f"it needs about {needed:,} bytes and {available:,} are available")


def _available() -> int | None:
    """Bytes of main memory that the system can give, None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _record(
    path: str, words: Mapping[str, Any], found: Predicted, read: torch_run.TorchReadings, device: str, runs: int,
    meters: tuple[Meter, ...], compared: Nodes, verdict: str, explained: list[str], notes: list[Note],
) -> Record:  # fmt: skip
    study = found.study
    about: dict[str, Any] = {"kind": device, "name": str(read.device.get("name") or _processor())}
    for key, name in (("driver", "driver"), ("total", "memory")):
        if key in read.device:
            about[name] = read.device[key]
    options = {"cudnn": read.cudnn} if read.cudnn is not None else {}
    return Record(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        staticmem=__version__,
        runtime={"name": "torch", "version": read.version, "provider": device, "options": options},
        device=about,
        host={"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()},
        model={"name": os.path.basename(path), "sha256": sha256(path), "format": study.model.format},
        scenario={
            "inputs": {name: list(shape) for name, shape in study.binding.shapes.items()},
            "symbols": dict(study.binding.symbols),
            "runs": runs,
            "request": {k: list(v) if isinstance(v, tuple) else v for k, v in words.items()},
        },
        meters=meters,
        nodes=compared,
        verdict=verdict,
        explanations=tuple(explained),
        notes=tuple({"kind": n.kind, "code": n.code, "text": n.text} for n in notes),
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
