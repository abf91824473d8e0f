"""The tasks of a sweep in local processes, any of which may be killed, or on the executor of a caller."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, TypeVar

from staticmem.child import isolated_workers
from staticmem.errors import StaticmemError, unexpected
from staticmem.frontends import architectures
from staticmem.ir.model_file import ModelFile

# Seconds of processor time from which processes are worth their start: each imports and runs for itself the steps that
# the others have too. Three cards of ResNet-50, 3.6 s of work, take 5.8 s of it in two processes (benchmarks/size.py).
WORTH_PROCESSES = 6.0

Task = TypeVar("Task")
Run = Callable[[Task], tuple[Any, ...]]  # what an executor's `submit` takes for a task


def name_to_reopen(model: ModelFile) -> str | None:
    """What another process opens a model by: the name that was given, with its options, or the path of its file; None
    where it is in memory alone."""
    given = model.given or model.path
    return whole_name(given) if model.given or os.path.isfile(given) else None


def whole_name(given: str) -> str:
    """The name of a model for processes in other folders."""
    try:
        return architectures.whole(given)
    except FileNotFoundError:  # the current folder is gone: that the file is too is an error of the row
        return given


def on_executor(executor: Executor, tasks: Sequence[Task], run: Run[Task]) -> Iterator[tuple[Task, Any]]:
    """Each task with its result, or the error in its place, as they come."""
    waiting = {executor.submit(*run(task)): task for task in tasks}
    for task, result in _wait_for_tasks(waiting):
        yield task, _ended() if isinstance(result, BrokenExecutor) else result


def in_processes(
    tasks: Sequence[Task],
    run: Run[Task],
    jobs: int,
    divide: Callable[[Task], Sequence[Task]],
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[tuple[Task, Any]]:
    """The same in local processes. Where one is killed, all that was not done is done again, a task at a time: then it
    is known which task it was. `divide` gives the parts of that one; a part whose process is killed too is an error.
    `meanwhile` is what this process does once they work."""
    left: list[Task] = []
    with _pool(min(jobs, len(tasks))) as pool:
        waiting = _submitted(pool, tasks, run)
        meanwhile()
        for task, result in _wait_for_tasks(waiting):
            if isinstance(result, BrokenExecutor):
                left.append(task)
            else:
                yield task, result
    for task in left:
        result = _alone(task, run)
        if not isinstance(result, BrokenExecutor):
            yield task, result
            continue
        parts = divide(task)
        for part in parts:
            result = _alone(part, run) if len(parts) > 1 else result
            yield part, _ended() if isinstance(result, BrokenExecutor) else result


def _ended() -> StaticmemError:
    return StaticmemError(
        "the process that worked on it ended",
        "Something killed it: often the system, for lack of memory.",
        "Use fewer processes (--jobs 1), or analyse this configuration alone.",
        "SM189",
    )


def _alone(task: Task, run: Run[Task]) -> Any:
    with _pool(1) as pool:
        return next(_wait_for_tasks(_submitted(pool, [task], run)))[1]


def _wait_for_tasks(waiting: dict[Future[Any], Task]) -> Iterator[tuple[Task, Any]]:
    try:
        for future in as_completed(waiting):
            error = future.exception()
            if error is None or isinstance(error, BrokenExecutor):
                yield waiting[future], error or future.result()
            elif isinstance(error, Exception):
                yield waiting[future], unexpected(error, "Analyse this configuration alone")
            else:
                raise error
    except BaseException:
        for future in waiting:
            future.cancel()
        raise


# -- processes ---------------------------------------------------------------------------------------------------


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with the block, at once where it ends by an exception."""
    import multiprocessing  # `_submitted` starts the processes, as `staticmem.child` has it

    before = set(multiprocessing.active_children())
    with isolated_workers():  # the semaphores of a pool start multiprocessing's tracker of resources
        pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:  # they do not see Ctrl-C
            process.terminate()
        # not without waiting: at the end of the interpreter Python 3.11 writes to the pipe of a pool that is closing
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _submitted(pool: ProcessPoolExecutor, tasks: Sequence[Task], run: Run[Task]) -> dict[Future[Any], Task]:
    """The tasks, submitted: this starts the processes. They get no Ctrl-C, which a terminal sends to all of a group:
    in the middle of their imports they would print a traceback each. It is kept for this process meanwhile."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        with isolated_workers(), _main_left_out():
            return _all(pool, tasks, run)
    from multiprocessing import resource_tracker

    with isolated_workers(), _main_left_out(), _interrupt_deferred():
        resource_tracker.ensure_running()  # its own start would let the signal through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit what is blocked
        try:
            return _all(pool, tasks, run)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Processes that start within the block do not import the main module, as `multiprocessing` has it: a script that
    asks for a report would run again in each, and what they work on is a function of this package."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Raises an interrupt that comes within the block at its end.

    Blocking the signal in this thread does not suffice: the kernel then gives it to another thread (numpy's BLAS has
    some), and Python still raises it here. Between the start of a process and what is written to it, that would leave
    a process without its input. Python runs handlers in the main thread only, so no other thread needs this."""
    handler = signal.getsignal(signal.SIGINT)  # None: not a handler of Python
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught and callable(handler):
            handler(*caught[0])


def _all(pool: ProcessPoolExecutor, tasks: Sequence[Task], run: Run[Task]) -> dict[Future[Any], Task]:
    waiting: dict[Future[Any], Task] = {}
    for task in tasks:
        try:
            waiting[pool.submit(*run(task))] = task
        except BrokenExecutor as error:  # a process was killed while the last ones were submitted
            future: Future[Any] = Future()
            future.set_exception(error)
            waiting[future] = task
    return waiting
