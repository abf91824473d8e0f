"""The process that runs the model: `python -m staticmem.validate.ort_child JOB`.

It is a process of its own, because a runtime can crash, hang, or take all memory. It imports neither the analysis nor
anything else of the package, and writes what it read as JSON beside the job.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from staticmem.validate.child import FailedError, answer

LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
_READ = ("mem_bytes_requested_in_use", "mem_bytes_in_use", "mem_in_use_peak", "mem_arena_held")


def main(path: str) -> int:
    return answer(path, _work)


def _work(job: dict[str, Any]) -> dict[str, Any]:
    try:
        import numpy as np
        import onnxruntime as ort
    except ImportError as error:
        raise FailedError("import", str(error)) from error
    if job["memory_limit"]:
        _limit(int(job["memory_limit"]))
    provider = job["provider"]
    if provider not in ort.get_available_providers():
        if job["strict_provider"]:
            raise FailedError("provider", ", ".join(ort.get_available_providers()))
        provider = "CPUExecutionProvider"
    options = _options(ort, job)
    wanted: list[Any] = ["CPUExecutionProvider"]
    if provider != "CPUExecutionProvider":
        wanted.insert(0, (provider, job["provider_options"]))
    gpu = _Nvml(provider)
    try:
        session = ort.InferenceSession(job["model"], options, providers=wanted)
        real = session.get_providers()[0]
        if provider != real and job["strict_provider"]:
            raise FailedError("fallback", real)
        gpu.read("loaded")
        feeds = _feeds(np, job["inputs"], {i.name: i.type for i in session.get_inputs()})
        for _ in range(job["runs"]):
            session.run(None, feeds)
        gpu.read("ran")
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
        "threads": job["threads"],
        "peak_rss": _peak_rss(),
        "device": gpu.answer(),
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
        shape, dtype = tuple(item["shape"]), item["dtype"]
        if item["name"] not in types:
            continue
        if dtype in ("float32", "float64"):
            feeds[item["name"]] = rng.standard_normal(shape, dtype=dtype)
        elif dtype == "float16":
            feeds[item["name"]] = rng.standard_normal(shape, dtype="float32").astype(dtype)
        elif dtype == "bool":
            feeds[item["name"]] = rng.integers(0, 2, shape).astype(bool)
        elif dtype == "string":
            feeds[item["name"]] = np.full(shape, "text", dtype=object)
        elif dtype in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
            feeds[item["name"]] = rng.integers(0, min(item["high"], 127), shape).astype(dtype)
        else:
            raise FailedError("input", f"input '{item['name']}' is {dtype}")
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
            row.update({key: int(args[key]) for key in _READ if key in args})
            current.append(row)
        elif name == "model_run":
            runs.append(current)
            current = []
    return runs


def _statistics(path: str) -> dict[str, int]:
    """Bytes that kernels took for themselves, by node; nodes with a comma in their name are found from the end."""
    found: dict[str, int] = {}
    if not os.path.exists(path):
        return found
    with open(path, encoding="utf-8") as file:
        for line in file:
            fields = line.rstrip("\n").rsplit(",", 4)
            if line.startswith("#") or len(fields) != 5:
                continue
            name = fields[0].rpartition("_")[0]
            if fields[4].isdigit() and int(fields[4]):
                found[name] = max(found.get(name, 0), int(fields[4]))
    return found


def _limit(size: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _peak_rss() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


class _Nvml:
    """What the driver says of the first device, where nvidia-ml-py is there and the session is to run on it."""

    def __init__(self, provider: str) -> None:
        self.handle: Any = None
        self.readings: dict[str, Any] = {}
        if not provider.startswith(("CUDA", "Tensorrt")):
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml = pynvml
            self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.readings["name"] = pynvml.nvmlDeviceGetName(self.handle)
            self.readings["driver"] = pynvml.nvmlSystemGetDriverVersion()
            self.read("before")
        except Exception as error:
            self.readings["nvml"] = f"not read: {error}"

    def read(self, when: str) -> None:
        if self.handle is None:
            return
        info = self.nvml.nvmlDeviceGetMemoryInfo(self.handle)
        self.readings[f"{when}_used"], self.readings["total"] = int(info.used), int(info.total)
        for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                self.readings[f"{when}_process"] = int(process.usedGpuMemory)

    def answer(self) -> dict[str, Any]:
        return self.readings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
