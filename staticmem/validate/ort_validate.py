"""`validate --runtime onnxruntime`: predict, run, read, reconcile."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from staticmem.allocators.onnxruntime.session import SessionOptions, SessionPrediction, predict_session
from staticmem.files import temporary_folder
from staticmem.ir.graph import Note
from staticmem.ir.model_file import Binding
from staticmem.studies.session import open_session, predicted
from staticmem.validate import ort_reconcile, ort_run
from staticmem.validate.ort_inputs import RandomInput, plan_inputs
from staticmem.validate.ort_model import prepare
from staticmem.validate.record import Record, sha256
from staticmem.version import __version__

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Scenario:
    """Sizes of the inputs, as the flags of `analyze` give them."""

    batch: int | None = None
    resolution: tuple[int, int] | None = None
    dims: Mapping[str, int] | None = None


def validate(
    path: str,
    scenario: Scenario,
    options: SessionOptions | None = None,
    device: str = "auto",
    timeout: float = ort_run.TIMEOUT,
    memory_limit: int | None = None,
) -> Record:
    """Runs an ONNX file and compares its memory with the prediction.

    Args:
        path: the file; weights that are missing are random data.
        scenario: sizes of the inputs.
        options: of the session; its provider follows `device`.
        device: "cpu"; "cuda", an error where the session does not run there; "auto", CUDA where it runs, else the CPU.
        timeout: seconds for all runs.
        memory_limit: bytes of data for the process, None for what the machine has available.

    Raises:
        ModelFileError: the file is no ONNX model.
        DimensionError: a size is missing, or the file fixes another one.
        RunError: the model cannot be run here (SM500 to SM506).
    """
    ort_run.require()
    opened = open_session(path, scenario.batch, scenario.resolution, scenario.dims)
    proto, binding, shapes = opened.proto, opened.binding, opened.shapes
    options = replace(options or SessionOptions(), provider="cpu" if device == "cpu" else "cuda")
    wanted = plan_inputs(proto.graph, shapes)
    with temporary_folder() as folder:
        first = predict_session(proto, shapes, binding.symbols, replace(options, provider="cpu", gpu_mem_limit=None))
        _check_memory(first, memory_limit)
        prepared = prepare(path, folder)
        read = ort_run.run(
            prepared.path, folder, wanted, options, device == "cuda", timeout, memory_limit or _available()
        )
        real = "cuda" if read.provider == ort_run.PROVIDERS["cuda"] else "cpu"
        options = replace(options, provider=real)
        found = predicted(opened, options, read.saved)
    notes = list(found.notes)
    if device != "cpu" and real == "cpu":
        text = "this ran on the CPU: the session has no CUDA here, whatever was asked for"
        notes.insert(0, Note("warning", "SM510", text))
    if prepared.filled:
        text = f"{prepared.filled} weights without contents were filled with random data ({prepared.nbytes:,} bytes)"
        notes.append(Note("assumption", "SM511", text, prepared.filled))
    return _record(path, binding, shapes, wanted, options, found, read, notes)


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


def _check_memory(found: SessionPrediction, limit: int | None) -> None:
    """Refuses before the machine is brought down: weights, their packed copies, activations and inputs."""
    available = limit if limit is not None else _available()
    needed = found.held + found.weights.outside + found.inputs
    if available is not None and needed > available:
        raise ort_run.memory_error(f"it needs about {needed:,} bytes and {available:,} are available", limit)


def _record(
    path: str,
    binding: Binding,
    shapes: Mapping[str, tuple[int, ...]],
    inputs: list[RandomInput],
    options: SessionOptions,
    found: SessionPrediction,
    read: ort_run.Readings,
    notes: list[Note],
) -> Record:
    table = ort_reconcile.meters(found, read)
    compared = ort_reconcile.nodes(found, read)
    runtime: dict[str, Any] = {
        "name": "onnxruntime",
        "version": read.version,
        "provider": read.provider,
        "options": {
            "graph_optimization_level": options.graph_optimization_level,
            "enable_mem_pattern": options.enable_mem_pattern,
            "enable_mem_reuse": options.enable_mem_reuse,
            "enable_cpu_mem_arena": options.enable_cpu_mem_arena,
            "arena_extend_strategy": options.arena_extend_strategy,
            "intra_op_num_threads": options.intra_op_num_threads,
            "gpu_mem_limit": options.gpu_mem_limit,
            "cudnn_conv_algo_search": options.cudnn_conv_algo_search if options.provider == "cuda" else None,
        },
    }
    device: dict[str, Any] = {"kind": options.provider, "name": read.device.get("name") or _processor()}
    for key in ("driver", "total"):
        if key in read.device:
            device["memory" if key == "total" else key] = read.device[key]
    return Record(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        staticmem=__version__,
        runtime=runtime,
        device=device,
        host={"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()},
        model={"name": os.path.basename(path), "sha256": sha256(path), "format": "onnx"},
        scenario={
            "inputs": {item.name: list(item.shape) for item in inputs},
            "symbols": dict(binding.symbols),
            "runs": options.runs,
        },
        meters=table,
        nodes=compared,
        verdict=ort_reconcile.verdict(found, read, table, compared),
        explanations=tuple(ort_reconcile.explanations(found, read, table, compared)),
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
