"""The process that runs the model: `main` is called with the path of its job.

It is a process of its own, because a runtime can crash, hang, or take all memory. It imports neither the analysis nor
anything else of the package, and writes what it read as JSON beside the job.
"""

from __future__ import annotations

import json
import os
from typing import Any

from staticmem.child import FailedError, answer, limit_memory, peak_resident
from staticmem.validate.nvml import Nvml

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
_READ = {  # fields of a `NodeReading`, by their names in a profile
    "requested": "mem_bytes_requested_in_use",
    "in_use": "mem_bytes_in_use",
    "peak": "mem_in_use_peak",
    "held": "mem_arena_held",
}


def main(path: str) -> int:
    return answer(path, _work)


def _work(job: dict[str, Any]) -> dict[str, Any]:
    try:
        import numpy as np
        import onnxruntime as ort
    except ImportError as error:
        raise FailedError("import", str(error)) from error
    limit_memory(job)
    provider = job["provider"]
    if provider not in ort.get_available_providers():
        if job["strict_provider"]:
            raise FailedError("provider", ", ".join(ort.get_available_providers()))
        provider = "CPUExecutionProvider"
    options = _options(ort, job)
    wanted: list[Any] = ["CPUExecutionProvider"]
    if provider != "CPUExecutionProvider":
        wanted.insert(0, (provider, job["provider_options"]))
    nvml = Nvml() if provider.startswith(("CUDA", "Tensorrt")) else None
    if nvml is not None:
        nvml.choose()
    _read(nvml, "before")
    try:
        session = ort.InferenceSession(job["model"], options, providers=wanted)
        real = session.get_providers()[0]
        if provider != real and job["strict_provider"]:
            raise FailedError("fallback", real)
        _read(nvml, "loaded")
        feeds = _feeds(np, job["inputs"], {i.name: i.type for i in session.get_inputs()})
        for _ in range(job["runs"]):
            session.run(None, feeds)
        _read(nvml, "ran")
        profile = session.end_profiling()
    except FailedError:
        raise
    except MemoryError as error:
        raise FailedError("memory", str(error)) from error
    except Exception as error:  # every failure of the runtime has a class of its own
        text = str(error) or type(error).__name__
        lowered = text.lower()
        short = "bad_alloc" in lowered or "failed to allocate" in lowered or "out of memory" in lowered
        raise FailedError("memory" if short else "runtime", text) from error
    del session  # the statistics are written when the session goes
    answer = {
        "version": ort.__version__,
        "provider": real,
        "runs": _runs(profile),
        "workspaces": _statistics(job["statistics"]),
        "peak_rss": peak_resident(),
        "device": nvml.facts if nvml is not None else {},
    }
    os.unlink(profile)
    return answer


def _options(ort: Any, job: dict[str, Any]) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[job["level"]])
    options.enable_mem_pattern = job["pattern"]
    options.enable_mem_reuse = job["reuse"]
    options.enable_cpu_mem_arena = job["arena"]
    options.enable_profiling = True
    options.profile_file_prefix = job["profile"]
    options.log_severity_level = 4
    options.intra_op_num_threads = job["threads"]
    options.inter_op_num_threads = 1
    options.optimized_model_filepath = job["saved"]
    options.add_session_config_entry("session.collect_node_memory_stats_to_file", job["statistics"])
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _feeds(np: Any, inputs: list[dict[str, Any]], types: dict[str, str]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feeds = {}
    for item in inputs:
        name, shape, dtype = item["name"], tuple(item["shape"]), item["dtype"]
        if name not in types:
            continue
        if dtype in ("float32", "float64"):
            feeds[name] = rng.standard_normal(shape, dtype=dtype)
        elif dtype == "float16":
            feeds[name] = rng.standard_normal(shape, dtype="float32").astype(dtype)
        elif dtype == "bool":
            feeds[name] = rng.integers(0, 2, shape).astype(bool)
        elif dtype == "string":
            feeds[name] = np.full(shape, "text", dtype=object)
        elif dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
            feeds[name] = rng.integers(0, min(item["high"], 127), shape).astype(dtype)
        else:
            raise FailedError("input", f"input '{name}' is {dtype}")
    missing = [name for name in types if name not in feeds]
    if missing:
        raise FailedError("input", f"input '{missing[0]}' is {types[missing[0]]}")
    return feeds


def _runs(profile: str) -> list[list[dict[str, Any]]]:
    """Node events by run, in the order in which nodes ended."""
    with open(profile, encoding="utf-8") as file:
        events = json.load(file)
    runs: list[list[dict[str, Any]]] = []
    current: list[dict[str, Any]] = []
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            args = event["args"]
            row: dict[str, Any] = {
                "name": name.removesuffix("_kernel_time"),
                "op": args.get("op_name", ""),
                "provider": args.get("provider", ""),
            }
            row.update({name: int(args[key]) if key in args else None for name, key in _READ.items()})
            current.append(row)
        elif name == "model_run":
            runs.append(current)
            current = []
    return runs


def _statistics(path: str) -> dict[str, int]:
    """Bytes that kernels took for themselves, by node; nodes with a comma in their name are found from the end."""
    counters: dict[str, int] = {}
    if not os.path.exists(path):
        return counters
    with open(path, encoding="utf-8") as file:
        for line in file:
            fields = line.rstrip("\n").rsplit(",", 4)
            if line.startswith("#") or len(fields) != 5:
                continue
            name = fields[0].rpartition("_")[0]
            if fields[4].isdigit() and int(fields[4]):
                counters[name] = max(counters.get(name, 0), int(fields[4]))
    return counters


def _read(nvml: Nvml | None, when: str) -> None:
    """Adds the device's memory at a moment to the facts: in use, and of this process."""
    memory = nvml.memory() if nvml is not None else None
    if nvml is not None and memory is not None:
        nvml.facts[f"{when}_used"] = memory[0]
        if memory[1] is not None:
            nvml.facts[f"{when}_process"] = memory[1]
