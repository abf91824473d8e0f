"""Child processes with their processor time and peak memory, and the medians of several rounds.

Processor time (user and system) rather than time on the clock: everything measured has one thread and its files in the
page cache, so on an idle machine they are the same, and on a busy one processor time is what remains comparable.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds on the clock for one child; more than anything here takes, but on a machine that is busy


@dataclass(frozen=True)
class Run:
    """One finished child: seconds of processor time and on the clock, peak resident bytes, what it printed."""

    seconds: float
    clock: float
    rss: int
    output: str


@dataclass
class Series:
    """The runs of one command."""

    name: str
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return median(run.seconds for run in self.runs)

    @property
    def rss(self) -> int:
        return int(median(run.rss for run in self.runs))

    def reported(self, key: str) -> float:
        """Median of a number that the child printed as JSON."""
        return float(median(json.loads(run.output)[key] for run in self.runs))


class ChildError(Exception):
    """A child that ended with an error, or was ended because it took too long."""


def run(command: Sequence[str], limit: float = LIMIT) -> Run:
    """Runs a child to its end, at most `limit` seconds on the clock. Peak memory is its own `ru_maxrss` (wait4).

    A child starts with the peak of the process that forks it, so this process imports nothing large.
    """
    start = time.perf_counter()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # installed: with .pyc files
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    watch = threading.Timer(limit, os.kill, (child.pid, signal.SIGKILL))  # child.kill() might reap it
    watch.start()
    try:
        with child.stdout as pipe:
            output = pipe.read()
        _, status, usage = os.wait4(child.pid, 0)
    finally:
        watch.cancel()
    clock = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        late = f"not done after {limit:.0f} seconds" if clock >= limit else f"exit {child.returncode}"
        raise ChildError(f"{' '.join(command)}: {late}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(usage.ru_utime + usage.ru_stime, clock, usage.ru_maxrss * unit, output)


def interleaved(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, Series]:
    """Runs the commands in turn, `rounds` times each, after one round that counts for nothing (caches, .pyc files).

    In turn, so that what disturbs the machine for a while disturbs all of them alike.
    """
    found = {name: Series(name) for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            done = run(command)
            if turn:
                found[name].runs.append(done)
    return found


def machine() -> dict[str, str]:
    """What a reader must know of the machine: processor, cores, Python, and the versions that matter."""
    from importlib.metadata import version

    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "processor": processor,
        "cores": str(os.cpu_count()),
        "system": platform.system(),
        "python": platform.python_version(),
        "onnx": version("onnx"),
        "numpy": version("numpy"),
    }
