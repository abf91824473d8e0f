"""A process of its own for a run: a crash, a time limit or a memory limit there ends nothing here.

The parent writes a job and reads an answer, both JSON in a temporary folder of its caller; the child (`answer`) writes
its answer whole or not at all.
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


class FailedError(Exception):
    """In the child: it cannot go on. `kind` says what the parent makes of it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class TookTooLong(Exception):  # noqa: N818 - what happened, for the parent to say in its own words
    """The child was ended after its time."""


@dataclass
class Crashed(Exception):  # noqa: N818
    """The child ended without an answer. `said` is the last line of its stderr, empty where it said nothing."""

    code: int
    said: str
    short_of_memory: bool

    @property
    def how(self) -> str:
        """The signal by name, or the exit code."""
        try:
            return signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"
        except ValueError:
            return f"exit code {self.code}"


def environment() -> dict[str, str]:
    """The child finds this package where the parent found it."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def ask(module: str, job: Mapping[str, Any], folder: str, timeout: float, env: Mapping[str, str]) -> dict[str, Any]:
    """The answer of `python -m module`; `job["answer"]` is where it writes it.

    Raises:
        TookTooLong: after `timeout` seconds.
        Crashed: there is no answer.
    """
    path, errors = os.path.join(folder, "job.json"), os.path.join(folder, "stderr.txt")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(job, file)
    with open(errors, "wb") as stream:
        try:
            done = subprocess.run(  # noqa: S603
                [sys.executable, "-m", module, path],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stream, timeout=timeout, check=False,
                env=dict(env),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise TookTooLong from error
    if not os.path.exists(job["answer"]):
        raise crash(done.returncode, errors)
    with open(job["answer"], encoding="utf-8") as file:
        answer: dict[str, Any] = json.load(file)
    return answer


def crash(code: int, errors: str) -> Crashed:
    """What an exit code and the file of a child's stderr say."""
    with open(errors, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read()[-4000:].splitlines() if line.strip()]
    killed = code == -getattr(signal, "SIGKILL", 9)
    short = killed or any("bad_alloc" in line or "MemoryError" in line for line in lines)
    said = "the system ended the process" if killed else lines[-1][:300] if lines else ""
    return Crashed(code, said, short)


def answer(path: str, work: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """In the child: reads the job, works, and writes the answer or why there is none."""
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    try:
        found = work(job)
    except FailedError as failed:
        found = {"error": {"kind": failed.kind, "message": failed.message}}
    except MemoryError as error:
        found = {"error": {"kind": "memory", "message": str(error) or "the process has no more memory"}}
    temporary = job["answer"] + ".part"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(temporary, job["answer"])
    return 0
