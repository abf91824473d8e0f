"""Runs a model with PyTorch in a process of its own and gives back what was read of its memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staticmem.errors import StaticmemError
from staticmem.validate import child

RUNS = 3  # steps: what a prediction of device memory has
TIMEOUT = 600.0  # seconds
_HINTS = "Choose a smaller batch or smaller dimensions; 'staticmem analyze' needs no memory for tensors."


class TorchRunError(StaticmemError):
    """The model could not be run with PyTorch on this machine."""


@dataclass(frozen=True)
class LiveRow:
    """An op of the last step that allocates: bytes of its results, and what is alive after it. `node` is the graph's
    op, -1 for none; `optional` what PyTorch may write in place where nothing watches it."""

    phase: str
    op: str
    node: int
    sizes: tuple[int, ...]
    live: int
    optional: bool


@dataclass(frozen=True)
class TorchReadings:
    """What a run left. Bytes; None where this device does not have the meter.

    `cublas` and `cublaslt` are workspaces of one product, `kept` is what of both stays after it.
    """

    version: str
    stand_ins: Mapping[str, int]
    rows: tuple[LiveRow, ...]
    live_peak: int | None
    live_at: tuple[str, str]
    forward_end: int | None
    scalars: int
    allocated: int | None
    reserved: int | None
    reserved_now: int | None
    context: int | None
    process: int | None
    kept: int | None
    cublas: int | None
    cublaslt: int | None
    cudnn: int | None
    device: Mapping[str, Any]


def require_torch() -> None:
    """Raises:
    TorchRunError: PyTorch is not installed (SM220).
    """
    if importlib.util.find_spec("torch") is None:
        raise TorchRunError(
            "PyTorch is not installed",
            "The model is run with it.",
            "pip install torch, as https://pytorch.org/get-started says for your device.",
            code="SM220",
        )


def run(
    model: str,
    words: Mapping[str, Any],
    device: str,
    output_shape: Sequence[int],
    folder: str,
    runs: int = RUNS,
    timeout: float = TIMEOUT,
    memory_limit: int | None = None,
    snapshot: str | None = None,
    threads: int | None = None,
    debug: bool = False,
) -> TorchReadings:
    """Runs `runs` steps of a model and reads its memory.

    Args:
        model: path of the file.
        words: the fields of a `Request` that were given, as JSON can have them.
        device: "cpu" or "cuda".
        output_shape: of the first output, for the target of the loss.
        folder: a temporary folder of the caller's.
        timeout: seconds until the process is ended.
        memory_limit: bytes of main memory that the process may have, None for no limit.
        snapshot: where PyTorch's own memory snapshot goes, on CUDA.
        threads: of PyTorch on the CPU.

    Raises:
        TorchRunError: SM220 to SM225, by what went wrong.
    """
    require_torch()
    answer_path = os.path.join(folder, "answer.json")
    job = {
        "model": os.path.abspath(model), "words": dict(words), "device": device, "output_shape": list(output_shape),
        "runs": runs, "memory_limit": memory_limit if device == "cpu" else None, "threads": threads,
        "snapshot": os.path.abspath(snapshot) if snapshot is not None and device == "cuda" else None,
        "answer": answer_path, "debug": debug,
    }  # fmt: skip
    try:
        answer = child.ask("staticmem.validate.torch_child", job, folder, timeout, child.environment())
    except child.TookTooLong as error:
        raise TorchRunError(
            f"the steps took longer than {timeout:g} seconds",
            "The process was ended.",
            "Choose smaller dimensions, or a larger --timeout.",
            code="SM224",
        ) from error
    except child.Crashed as error:
        raise _crashed(error) from error
    if "error" in answer:
        raise _failed(answer["error"])
    return _readings(answer)


def _readings(answer: dict[str, Any]) -> TorchReadings:
    rows = tuple(LiveRow(r[0], r[1], r[2], tuple(r[3]), r[4], r[5]) for r in answer.get("rows", ()))
    return TorchReadings(
        version=answer["version"],
        stand_ins=answer["stand_ins"],
        rows=rows,
        live_peak=answer.get("live_peak"),
        live_at=(answer.get("live_phase", ""), answer.get("live_op", "")),
        forward_end=answer.get("forward_end"),
        scalars=answer.get("scalars", 0),
        allocated=answer.get("allocated"),
        reserved=answer.get("reserved"),
        reserved_now=answer.get("reserved_now"),
        context=answer.get("context"),
        process=answer.get("process"),
        kept=answer.get("kept"),
        cublas=answer.get("cublas"),
        cublaslt=answer.get("cublaslt"),
        cudnn=answer.get("cudnn"),
        device=answer["device"],
    )


def out_of_memory(why: str) -> TorchRunError:
    """Not enough memory to run the model."""
    return TorchRunError("not enough memory to run the model", f"{why.rstrip('.')}.", _HINTS, code="SM222")


def _crashed(crash: child.Crashed) -> TorchRunError:
    if crash.short_of_memory:
        return out_of_memory(crash.said)
    return TorchRunError(
        "the process that ran the model crashed",
        f"{crash.how}: {crash.said or 'it said nothing'}.",
        "Try another version of PyTorch; if staticmem itself failed, report it.",
        code="SM223",
    )


def _failed(error: dict[str, str]) -> TorchRunError:
    kind, message = error["kind"], error["message"].rstrip(".")
    if kind == "memory":
        return out_of_memory(message)
    if kind == "import":
        return TorchRunError(
            "PyTorch cannot be imported", f"{message}.", "Install it again: https://pytorch.org/get-started.",
            code="SM220",
        )  # fmt: skip
    if kind == "device":
        return TorchRunError(
            "there is no CUDA device for PyTorch",
            f"{message}.",
            "Check nvidia-smi and that this PyTorch is built for CUDA, or use --device cpu.",
            code="SM225",
        )
    return TorchRunError(
        "PyTorch cannot run this graph",
        f"{message}.",
        "Check the sizes (--batch, --dim); values here are random, and some ops need particular ones.",
        code="SM221",
    )
