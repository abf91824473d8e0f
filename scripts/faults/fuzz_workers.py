"""Runs a fuzzer's files in child processes: one that dies, hangs or takes too much memory is a finding, not the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

Make = Callable[[int], bytes]  # the file of this number
Task = Callable[[int, bytes], str | None]  # what is wrong with it
MADE = "made"
GRACE = 15.0  # seconds beyond the limit, for code that Python's alarm does not reach


def cause_of(found: str) -> str:
    """The same for findings of one cause: the exception and the innermost lines of ours, or words without numbers."""
    lines = re.findall(r'File "[^"]*?(staticmem/[^"]+|random_\w+\.py|fuzz\w*\.py)", line (\d+), in (\S+)', found)
    last = found.strip().splitlines()[-1]
    wrong = re.search(r"WrongError: (.*)", found)
    if wrong is not None:
        return re.sub(r"\d[\d,]*", "N", wrong[1])[:260]
    ours = [f"{name}:{line} {where}" for name, line, where in lines if name.startswith("staticmem")][-2:]
    return f"{last.split(':')[0]} {' < '.join(reversed(ours))}" if ours else re.sub(r"\d+", "N", last)[:200]


def _work(make: Make, task: Task, connection: Connection, memory: int) -> None:
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        number = connection.recv()
        if number is None:
            return
        try:
            data = make(number)
            connection.send(MADE)
            found = task(number, data)
        except MemoryError:
            found = "MemoryError outside of the readers"
        connection.send((number, found))


class _Worker:
    def __init__(self, make: Make, task: Task, memory: int) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(make, task, other, memory), daemon=True)
        self.process.start()
        other.close()
        self.number: int | None = None
        self.started = 0.0
        self.done = 0
        self.made = False

    def give(self, number: int) -> None:
        self.number, self.started, self.made = number, time.monotonic(), False
        self.connection.send(number)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()


def run(
    make: Make,
    task: Task,
    numbers: Iterator[int],
    workers: int = 1,
    memory: int = 0,
    limit: float = 150,
    renew: int = 500,
) -> Iterator[tuple[int, str | None]]:
    """Each number with what is wrong with its file. `limit`: seconds for a file, after which its process ends.

    A worker is replaced after `renew` files, so that what the process keeps does not add up.
    """
    idle: list[_Worker] = [_Worker(make, task, memory) for _ in range(workers)]
    busy: dict[Any, _Worker] = {}
    left = iter(numbers)
    while True:
        while idle:
            number = next(left, None)
            if number is None:
                break
            worker = idle.pop()
            if worker.done >= renew:
                worker.end()
                worker = _Worker(make, task, memory)
            worker.give(number)
            busy[worker.connection] = worker
        if not busy:
            break
        ready = wait(list(busy), timeout=1.0)
        for connection in ready:
            worker = busy.pop(connection)
            number = worker.number
            assert number is not None
            try:
                received = worker.connection.recv()
                if received == MADE:
                    worker.made = True
                    busy[connection] = worker
                    continue
                _, found = received
                worker.done += 1
                idle.append(worker)
                yield number, found
            except (EOFError, OSError):
                worker.process.join(5)
                code = worker.process.exitcode
                idle.append(_Worker(make, task, memory))
                name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
                yield number, f"the process died: {name}" if worker.made else None  # onnx, while the file was made
        for connection, worker in list(busy.items()):
            if time.monotonic() - worker.started > limit + GRACE:
                del busy[connection]
                os.kill(worker.process.pid or 0, signal.SIGKILL)
                worker.process.join(5)
                idle.append(_Worker(make, task, memory))
                assert worker.number is not None
                yield worker.number, f"no answer after {limit + GRACE:g} s"
    for worker in idle:
        worker.end()
