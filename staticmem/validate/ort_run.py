"""Runs a model with the ONNX Runtime in a process of its own and gives back what its allocators said."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from staticmem.allocators.onnxruntime.session import SessionOptions
from staticmem.errors import StaticmemError
from staticmem.validate import child
from staticmem.validate.ort_inputs import RandomInput

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
TIMEOUT = 600.0  # seconds


class RunError(StaticmemError):
    """The model could not be run on this machine."""


@dataclass(frozen=True)
class NodeReading:
    """The arena at the end of a node: bytes. None where the runtime does not say (arena off, before 1.28)."""

    name: str
    op: str
    provider: str
    requested: int | None
    in_use: int | None
    peak: int | None
    held: int | None


@dataclass(frozen=True)
class Readings:
    """What a run left. `workspaces` are bytes that kernels took for themselves, by node."""

    version: str
    provider: str
    runs: tuple[tuple[NodeReading, ...], ...]
    workspaces: dict[str, int]
    peak_rss: int | None
    device: dict[str, Any]
    saved: str | None


def installed() -> bool:
    """Whether onnxruntime can be imported; it is not imported here."""
    return importlib.util.find_spec("onnxruntime") is not None


def require() -> None:
    """Raises:
    RunError: onnxruntime is not installed (SM500).
    """
    if not installed():
        raise RunError(
            "onnxruntime is not installed",
            "The model is run with it.",
            "pip install 'staticmem[cpu]', or 'staticmem[gpu]' on a machine with an NVIDIA GPU (not both).",
            code="SM500",
        )


def run(
    model: str,
    folder: str,
    inputs: Sequence[RandomInput],
    options: SessionOptions,
    strict_provider: bool = True,
    timeout: float = TIMEOUT,
    memory_limit: int | None = None,
) -> Readings:
    """Runs `model` `options.runs` times and reads its memory.

    Args:
        model: path of a complete model.
        folder: a temporary folder of the caller's, for the job, the profile and the optimized model.
        inputs: how to make each input.
        options: of the session.
        strict_provider: whether a session that falls back to another provider is an error.
        timeout: seconds until the process is ended.
        memory_limit: bytes of data that the process may have, None for no limit.

    Raises:
        RunError: SM500 to SM506, by what went wrong.
    """
    require()
    job = _job(model, folder, inputs, options, strict_provider, memory_limit)
    try:
        answer = child.ask("staticmem.validate.ort_child", job, folder, timeout, child.environment())
    except child.TookTooLong as error:
        raise RunError(
            f"the runs took longer than {timeout:g} seconds",
            "The process was ended.",
            "Choose smaller dimensions, or a larger --timeout.",
            code="SM505",
        ) from error
    except child.Crashed as error:
        raise _crashed(error, memory_limit) from error
    if "error" in answer:
        raise _failed(answer["error"], options)
    return _readings(answer, job["saved"])


def _job(
    model: str,
    folder: str,
    inputs: Sequence[RandomInput],
    options: SessionOptions,
    strict_provider: bool,
    memory_limit: int | None,
) -> dict[str, Any]:
    provider_options: dict[str, str] = {}
    if options.provider == "cuda":
        provider_options = {
            "cudnn_conv_algo_search": options.cudnn_conv_algo_search,
            "arena_extend_strategy": options.arena_extend_strategy,
        }
        if options.gpu_mem_limit is not None:
            provider_options["gpu_mem_limit"] = str(options.gpu_mem_limit)
    return {
        "model": os.path.abspath(model),
        "provider": PROVIDERS[options.provider],
        "provider_options": provider_options,
        "strict_provider": strict_provider,
        "level": options.graph_optimization_level,
        "pattern": options.enable_mem_pattern,
        "reuse": options.enable_mem_reuse,
        "arena": options.enable_cpu_mem_arena,
        "threads": options.intra_op_num_threads,
        "runs": options.runs,
        "inputs": [item.to_json() for item in inputs],
        "memory_limit": memory_limit,
        "profile": os.path.join(folder, "profile"),
        "statistics": os.path.join(folder, "statistics.csv"),
        "saved": os.path.join(folder, "optimized.onnx"),
        "answer": os.path.join(folder, "answer.json"),
    }


def _readings(answer: dict[str, Any], saved: str) -> Readings:
    runs = tuple(
        tuple(
            NodeReading(
                row["name"], row["op"], row["provider"], row.get("mem_bytes_requested_in_use"),
                row.get("mem_bytes_in_use"), row.get("mem_in_use_peak"), row.get("mem_arena_held"),
            )
            for row in rows
        )
        for rows in answer["runs"]
    )  # fmt: skip
    return Readings(
        answer["version"],
        answer["provider"],
        runs,
        answer["workspaces"],
        answer["peak_rss"],
        answer["device"],
        saved if os.path.exists(saved) else None,
    )


def _crashed(crash: child.Crashed, memory_limit: int | None) -> RunError:
    if crash.short_of_memory:
        return memory_error(crash.said, memory_limit)
    return RunError(
        "the process that ran the model crashed",
        f"{crash.how}: {crash.said or 'it said nothing'}.",
        "Try --optimization disable, or another version of onnxruntime.",
        code="SM504",
    )


def memory_error(why: str, limit: int | None) -> RunError:
    """Not enough memory to run the model."""
    more = "" if limit is None else f" (it was allowed {limit:,} bytes)"
    return RunError(
        f"not enough memory to run the model{more}",
        f"{_first(why)}.",
        "Choose a smaller batch or smaller dimensions; 'staticmem analyze' needs no memory for tensors.",
        code="SM503",
    )


def _failed(error: dict[str, str], options: SessionOptions) -> RunError:
    kind, message = error["kind"], error["message"]
    if kind == "import":
        return RunError(
            "onnxruntime cannot be imported", f"{_first(message)}.", "Install it again: pip install onnxruntime.",
            code="SM500",
        )  # fmt: skip
    if kind == "provider":
        return RunError(
            f"onnxruntime has no {PROVIDERS[options.provider]} here",
            f"It has {message}.",
            "pip install 'staticmem[gpu]' in an environment without onnxruntime, or use --device cpu.",
            code="SM501",
        )
    if kind == "fallback":
        return RunError(
            f"the session does not run on {PROVIDERS[options.provider]}",
            f"The runtime fell back to {message} by itself: no device, or its libraries are missing.",
            "Check nvidia-smi, CUDA and cuDNN, or use --device cpu.",
            code="SM501",
        )
    if kind == "memory":
        return memory_error(message, None)
    if kind == "input":
        return RunError(
            "there are no random data for an input",
            f"{_first(message)}.",
            "Inputs are tensors of floating-point numbers, integers, booleans or texts.",
            code="SM506",
        )
    return RunError(
        "onnxruntime cannot run this model",
        f"{_first(message)}.",
        "Check the sizes (--batch, --dim) and the file (onnx.checker.check_model).",
        code="SM502",
    )


def _first(text: str) -> str:
    """One line, short, without a full stop at its end."""
    return " ".join(text.split())[:400].rstrip(".")
