"""A process of its own, for running what others wrote: a crash, a time limit or a memory limit there ends nothing here.

The parent (`run`) writes a job and reads an answer, both JSON in a temporary folder of its caller; the child (`answer`)
writes its answer whole or not at all. This module imports no part of the analysis.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess  # the child is this package's own module, without a shell
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from staticmem.errors import StaticmemError


class RunError(StaticmemError):
    """The model could not be run on this machine."""


@dataclass(frozen=True)
class Failure:
    """What the user is told of a kind of failure; `{message}` stands for what is known of it."""

    what: str
    why: str
    hint: str
    code: str

    def error(self, message: str = "", **facts: str) -> RunError:
        """The error; the message is one line, short, without a full stop at its end."""
        facts = {"allowed": "", **facts, "message": " ".join(message.split())[:400].rstrip(".")}
        return RunError(self.what.format(**facts), self.why.format(**facts), self.hint, code=self.code)


# By what the child says of itself; "timeout" and "crash" are the parent's, "run" stands for every other kind.
Failures = Mapping[str, Failure]


def run(module: str, job: Mapping[str, Any], folder: str, timeout: float, failures: Failures, **facts: str) -> Any:
    """The answer of `python -m module`; `job["answer"]` is where it writes it. `facts` fill in the failures' texts.

    Raises:
        RunError: after `timeout` seconds, or without an answer, or with one that says why there is none.
    """
    path, errors = os.path.join(folder, "job.json"), os.path.join(folder, "stderr.txt")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(job, file)
    with open(errors, "wb") as stream:
        command = [sys.executable, "-m", module, path]
        nothing = subprocess.DEVNULL
        try:
            ended = subprocess.run(  # noqa: S603
                command, stdin=nothing, stdout=nothing, stderr=stream, timeout=timeout, check=False, env=environment()
            )
        except subprocess.TimeoutExpired as error:
            raise failures["timeout"].error(timeout=f"{timeout:g}") from error
    if not os.path.exists(job["answer"]):
        raise crashed(ended.returncode, errors, failures, **facts)
    with open(job["answer"], encoding="utf-8") as file:
        answer: dict[str, Any] = json.load(file)
    if "error" in answer:
        raise failed(answer["error"], failures, **facts)
    return answer


def failed(error: Mapping[str, str], failures: Failures, **facts: str) -> RunError:
    """The error for what a child says of itself."""
    return failures.get(error["kind"], failures["run"]).error(error["message"], **facts)


def crashed(code: int, errors: str, failures: Failures, **facts: str) -> RunError:
    """The error for a child that ended without an answer, by its exit code and the file of its stderr."""
    with open(errors, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read()[-4000:].splitlines() if line.strip()]
    killed = code == -getattr(signal, "SIGKILL", 9)
    last = "the system ended the process" if killed else lines[-1][:300] if lines else ""
    if killed or any("bad_alloc" in line or "MemoryError" in line for line in lines):
        return failures["memory"].error(last, **facts)
    try:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        how = f"exit code {code}"
    return failures["crash"].error(f"{how}: {last or 'it said nothing'}", **facts)


def environment() -> dict[str, str]:
    """The child finds this package where the parent found it, and sets of texts have the same order in each child:
    models go through them (the types of layers in rotary embeddings of transformers), and their files differed."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONHASHSEED": "0", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def check_memory(needed: int, limit: int | None, failures: Failures) -> None:
    """Refuses before the machine is brought down. `limit`: bytes that are allowed, None for what there is.

    Raises:
        RunError: a run needs more.
    """
    available = limit if limit is not None else available_memory()
    if available is not None and needed > available:
        message = f"it needs about {needed:,} bytes and {available:,} are available"
        raise failures["memory"].error(message, **allowed(limit))


def allowed(limit: int | None) -> dict[str, str]:
    """The fact that texts of failures have of a memory limit."""
    return {} if limit is None else {"allowed": f" (it was allowed {limit:,} bytes)"}


def available_memory() -> int | None:
    """Bytes of main memory that the system can give, None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


# -- in the child ------------------------------------------------------------------------------------------------------


class FailedError(Exception):
    """The child cannot go on. `kind` says what the parent makes of it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


def answer(path: str, work: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Reads the job, works, and writes the answer or why there is none."""
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    try:
        result = work(job)
    except FailedError as failure:
        result = {"error": {"kind": failure.kind, "message": failure.message}}
    except MemoryError as error:
        result = {"error": {"kind": "memory", "message": str(error) or "the process has no more memory"}}
    temporary = job["answer"] + ".part"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(temporary, job["answer"])
    return 0


def limit_memory(job: Mapping[str, Any]) -> None:
    """Sets the job's memory limit; to be called when the libraries are imported."""
    if not job["memory_limit"]:
        return
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_DATA, (int(job["memory_limit"]),) * 2)


def peak_resident() -> int | None:
    """Bytes of main memory that this process had at most."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
