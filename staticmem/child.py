"""A process of its own, for running what others wrote: a crash, a time limit or a memory limit there ends nothing here.

The parent (`run`) writes a job and reads an answer, both JSON in a temporary folder of its caller; the child (`answer`)
writes its answer whole or not at all. This module imports no part of the analysis.

All processes of the package are started here, so that none has the current folder on its path (`isolated`): what is
analysed often lies there, and a `json.py` or `torch.py` beside it would run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess  # the child is this package's own module, without a shell
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

from staticmem.errors import StaticmemError

_HAS_SAFE_PATH = sys.version_info >= (3, 11)


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


# Exit codes of a process that was told to end, which says nothing of the model
_STOPPED = tuple(-getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))

# By what the child says of itself; "timeout" and "crash" are the parent's, "run" stands for every other kind.
Failures = Mapping[str, Failure]


def run(module: str, job: Mapping[str, Any], folder: str, timeout: float, failures: Failures, **facts: str) -> Any:
    """The answer of the `main` of a module; `job["answer"]` is where it writes it. `facts` fill in the failures' texts.

    Raises:
        RunError: after `timeout` seconds, or without an answer, or with one that says why there is none.
    """
    path, errors = os.path.join(folder, "job.json"), os.path.join(folder, "stderr.txt")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(job, file)
    with open(errors, "wb") as stream, start(module, path, errors=stream) as process:
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise failures["timeout"].error(timeout=f"{timeout:g}") from error
        finally:
            process.kill()  # nothing where it has ended
    if not os.path.exists(job["answer"]):
        raise crashed(process.returncode, errors, failures, **facts)
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
    last = lines[-1][:300] if lines else ""
    if killed:
        last = "the system ended the process"
    if killed or any("bad_alloc" in line or "MemoryError" in line for line in lines):
        return failures["memory"].error(last, **facts)
    try:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        how = f"exit code {code}"
    failure = failures["crash"]
    if code in _STOPPED:
        failure = replace(failure, hint="Another process or a person stopped it: run the command again.")
    return failure.error(f"{how}: {last or 'it said nothing'}", **facts)


def start(
    module: str, *arguments: str, pipes: bool = False, errors: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """A process that calls the `main` of a module of this package. `pipes`: it reads and writes them, else nothing."""
    streams = subprocess.PIPE if pipes else subprocess.DEVNULL
    stderr = subprocess.DEVNULL if errors is None else errors
    line = command(module, *arguments)
    return subprocess.Popen(line, stdin=streams, stdout=streams, stderr=stderr, env=environment())  # noqa: S603


def command(module: str, *arguments: str) -> list[str]:
    """The command line of such a process."""
    flags = ["-P"] if _HAS_SAFE_PATH else []
    if sys.flags.no_user_site:
        flags.append("-s")
    first = os.path.join(os.path.dirname(os.path.abspath(__file__)), "isolated.py")
    return [sys.executable, *flags, first, module, *arguments]


def environment() -> dict[str, str]:
    """The child has the user's PYTHONPATH; an empty entry, which Python takes for the current folder, is nobody's wish.
    Processes that it starts itself (torch does) have no current folder on their path either, from Python 3.11 on.

    Sets of texts have the same order in each child: models go through them (the types of layers in rotary embeddings of
    transformers), and their files differed."""
    ignored = sys.flags.ignore_environment  # python -E, python -I
    given = "" if ignored else os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(os.path.abspath(entry) for entry in given.split(os.pathsep) if entry)
    own = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    return {"PYTHONHASHSEED": "0", **os.environ, **own}


@contextmanager
def isolated_workers() -> Iterator[None]:
    """Within it `multiprocessing` starts processes without the current folder on their path.

    It starts `python -c`, to which the current folder is the first place of `multiprocessing` itself. Before the task
    arrives, a worker has the path of this process from it."""
    if _HAS_SAFE_PATH:
        name, before = "PYTHONSAFEPATH", os.environ.get("PYTHONSAFEPATH")
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        return
    from multiprocessing import util

    name, flags = "_args_from_interpreter_flags", getattr(util, "_args_from_interpreter_flags")  # noqa: B009
    setattr(util, name, lambda: [*flags(), "-I"])
    try:
        yield
    finally:
        setattr(util, name, flags)


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
