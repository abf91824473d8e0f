"""`validate --runtime onnxruntime`: a session predicted, run in a process of its own, and compared."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from staticmem import child
from staticmem.child import Failure, RunError
from staticmem.files import temporary_folder
from staticmem.ir.graph import Note
from staticmem.ort.memory.session import predict_session
from staticmem.ort.options import SessionOptions
from staticmem.ort.study import open_session, predicted
from staticmem.ort.validation import reconcile
from staticmem.ort.validation.model import plan_inputs, prepare
from staticmem.ort.validation.reconcile import NodeReading, Readings
from staticmem.scenario.request import Request
from staticmem.validate.records import Record, new_record

DEVICES = ("auto", "cpu", "cuda")
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
TIMEOUT = 600.0  # seconds
RECORDED = """
    graph_optimization_level enable_mem_pattern enable_mem_reuse enable_cpu_mem_arena arena_extend_strategy
    intra_op_num_threads gpu_mem_limit cudnn_conv_algo_search
""".split()  # options of the session
FAILURES: child.Failures = {
    "import": Failure(
        "onnxruntime cannot be imported", "{message}.", "Install it again: pip install onnxruntime.", "SM500"
    ),
    "provider": Failure(
        "onnxruntime has no {provider} here",
        "It has {message}.",
        "pip install 'staticmem[gpu]' in an environment without onnxruntime, or use --device cpu.",
        "SM501",
    ),
    "fallback": Failure(
        "the session does not run on {provider}",
        "The runtime fell back to {message} by itself: no device, or its libraries are missing.",
        "Check nvidia-smi, CUDA and cuDNN, or use --device cpu.",
        "SM501",
    ),
    "run": Failure(
        "onnxruntime cannot run this model",
        "{message}.",
        "Check the sizes (--batch, --dim) and the file (onnx.checker.check_model).",
        "SM502",
    ),
    "memory": Failure(
        "not enough memory to run the model{allowed}",
        "{message}.",
        "Choose a smaller batch or smaller dimensions; 'staticmem analyze' needs no memory for tensors.",
        "SM503",
    ),
    "crash": Failure(
        "the process that ran the model crashed",
        "{message}.",
        "Try --optimization disable, or another version of onnxruntime.",
        "SM504",
    ),
    "timeout": Failure(
        "the runs took longer than {timeout} seconds",
        "The process was ended.",
        "Choose smaller dimensions, or a larger --timeout.",
        "SM505",
    ),
    "input": Failure(
        "there are no random data for an input",
        "{message}.",
        "Inputs are tensors of floating-point numbers, integers, booleans or texts.",
        "SM506",
    ),
}


def installed() -> bool:
    """Whether onnxruntime can be imported; it is not imported here."""
    return importlib.util.find_spec("onnxruntime") is not None


def this_processor() -> str:
    """What is known of this machine's CPU, as `SessionOptions.processor` names it; "unknown" beside Linux on x86-64,
    and for CPUs with other units for integer products (AVX-VNNI, AMX)."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if line.startswith("flags")]
    except OSError:
        return "unknown"
    flags = set(lines[0].split()) if lines else set()
    if {"avx_vnni", "avx_vnni_int8", "amx_int8"} & flags or not {"avx2", "fma"} <= flags:
        return "unknown"
    return "avx512" if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags else "avx2"


def validate_session(
    path: str,
    request: Request,
    options: SessionOptions | None = None,
    device: str = "auto",
    timeout: float = TIMEOUT,
    memory_limit: int | None = None,
) -> Record:
    """Runs an ONNX file and compares its memory with the prediction.

    Args:
        path: the file; weights that are missing are random data.
        request: its sizes of the inputs count.
        options: of the session; its provider follows `device`.
        device: "cpu"; "cuda", an error where the session does not run there; "auto", CUDA where it runs, else the CPU.
        timeout: seconds for all runs.
        memory_limit: bytes of data for the process, None for what the machine has available.

    Raises:
        ModelFileError: the file is no ONNX model.
        DimensionError: a size is missing, or the file fixes another one.
        RunError: the model cannot be run here (SM500 to SM506).
    """
    if not installed():
        raise RunError(
            "onnxruntime is not installed",
            "The model is run with it.",
            "pip install 'staticmem[cpu]', or 'staticmem[gpu]' on a machine with an NVIDIA GPU (not both).",
            code="SM500",
        )
    opened = open_session(path, request.batch, request.image_size, request.dims)
    proto, binding, shapes = opened.proto, opened.binding, opened.shapes
    options = replace(options or SessionOptions(), provider="cpu" if device == "cpu" else "cuda")
    options = replace(options, processor=this_processor())
    inputs = plan_inputs(proto.graph, shapes)
    with temporary_folder() as folder:
        first = predict_session(proto, shapes, binding.symbols, replace(options, provider="cpu", gpu_mem_limit=None))
        # weights, their packed copies, activations and inputs
        child.check_memory(first.held + first.weights.outside + first.inputs, memory_limit, FAILURES)
        prepared = prepare(path, folder)
        job = {
            "model": os.path.abspath(prepared.path),
            "inputs": [asdict(item) for item in inputs],
            "strict_provider": device == "cuda",
            "memory_limit": memory_limit or child.available_memory(),
        }
        read = measure(job, options, folder, timeout, **child.allowed(memory_limit))
        real = "cuda" if read.provider == PROVIDERS["cuda"] else "cpu"
        options = replace(options, provider=real)
        prediction = predicted(opened, options, read.saved)
    notes = list(prediction.notes)
    if device != "cpu" and real == "cpu":
        text = "this ran on the CPU: the session has no CUDA here, whatever was asked for"
        notes.insert(0, Note("warning", "SM510", text))
    if prepared.filled:
        text = f"{prepared.filled} weights without contents were filled with random data ({prepared.nbytes:,} bytes)"
        notes.append(Note("assumption", "SM511", text, prepared.filled))
    meters, compared = reconcile.meters(prediction, read), reconcile.nodes(prediction, read)
    shown = asdict(options)
    if real != "cuda":
        shown["cudnn_conv_algo_search"] = None
    return new_record(
        path,
        "onnx",
        real,
        read.device,
        notes,
        runtime={
            "name": "onnxruntime",
            "version": read.version,
            "provider": read.provider,
            "options": {name: shown[name] for name in RECORDED},
        },
        scenario={
            "inputs": {item.name: list(item.shape) for item in inputs},
            "symbols": dict(binding.symbols),
            "runs": options.runs,
        },
        meters=meters,
        nodes=compared,
        verdict=reconcile.verdict(prediction, read, meters, compared),
        explanations=tuple(reconcile.explanations(prediction, read, meters, compared)),
    )


def measure(
    job: Mapping[str, Any], options: SessionOptions, folder: str, timeout: float = TIMEOUT, **facts: str
) -> Readings:
    """Runs a model `options.runs` times in a process of its own and reads its memory.

    Args:
        job: `model`, the path of a complete model; `inputs`, how to make each (`RandomInput`); `strict_provider`,
            whether a session that falls back to another provider is an error; `memory_limit`, bytes of data or None.
        options: of the session.
        folder: a temporary folder of the caller's, for the job, the profile and the optimized model.
        timeout: seconds until the process is ended.
        facts: for the texts of errors.

    Raises:
        RunError: SM500 to SM506, by what went wrong.
    """
    provider_options: dict[str, str] = {}
    if options.provider == "cuda":
        provider_options = {
            "cudnn_conv_algo_search": options.cudnn_conv_algo_search,
            "arena_extend_strategy": options.arena_extend_strategy,
        }
        if options.gpu_mem_limit is not None:
            provider_options["gpu_mem_limit"] = str(options.gpu_mem_limit)
    files = {"profile": "profile", "statistics": "statistics.csv", "saved": "optimized.onnx", "answer": "answer.json"}
    job = {
        **job,
        "provider": PROVIDERS[options.provider],
        "provider_options": provider_options,
        "level": options.graph_optimization_level,
        "pattern": options.enable_mem_pattern,
        "reuse": options.enable_mem_reuse,
        "arena": options.enable_cpu_mem_arena,
        "threads": options.intra_op_num_threads,
        "runs": options.runs,
        **{key: os.path.join(folder, name) for key, name in files.items()},
    }
    facts = {"provider": job["provider"], **facts}
    answer = child.run("staticmem.ort.validation.child", job, folder, timeout, FAILURES, **facts)
    answer["runs"] = tuple(tuple(NodeReading(**row) for row in rows) for rows in answer["runs"])
    return Readings(**answer, saved=job["saved"] if os.path.exists(job["saved"]) else None)
