"""Asks onnx's C++ in a process of its own, so that no file can end this one.

onnx's inference of sizes and its inliner are written for files that keep the rules. With others they follow a null
pointer or divide by zero, which is a signal (GatherND with `batch_dims=-1`, onnx 1.23), and inference computes with
contents of any length. Checking attributes before would need a list of all that can go wrong in a hundred operators.

On Linux the process is forked, which costs a few milliseconds, when something is asked for the first time; it answers
until nobody has asked for some seconds. Elsewhere it is started anew (macOS cannot fork safely once its frameworks are
loaded, Windows not at all), which takes as long as `import onnx`. Where no process can be made, onnx runs in this one.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.frontends.onnx import onnx_process

FORKS = sys.platform == "linux"
LARGE = 4 << 20  # bytes of a request after which the process goes
PATIENCE = 20  # on the clock, times the processor time that a request may take: a busy machine, a stopped process


class RefusedError(ValueError):
    """onnx refuses what it was asked, with a message."""


class FailedError(ModelFileError):
    """onnx's process ended without an answer, or met its limits. `signal`: the one that ended it, 0 for none."""

    def __init__(self, what: str, why: str, number: int = 0) -> None:
        hint = "Try another release of onnx, or check the file with onnx.checker.check_model."
        super().__init__(what, why, hint, code="SM159")
        self.signal = number


class Worker:
    """A process that answers requests; `pid` and the two ends of its pipes."""

    def __init__(self) -> None:
        """Raises: OSError: there can be no more processes."""
        self.process: Any = None  # of subprocess, where the process was not forked
        if FORKS:
            self._fork()
        else:
            self._start()

    def _fork(self) -> None:
        requests, self.requests = os.pipe()
        try:
            self.answers, answers = os.pipe()
        except OSError:
            os.close(requests)
            os.close(self.requests)
            raise
        try:
            with warnings.catch_warnings():
                # of threads that may hold locks: the child runs onnx alone, which this thread does not run now
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
        except OSError:
            for end in (requests, self.requests, self.answers, answers):
                os.close(end)
            raise
        if self.pid:
            os.close(requests)
            os.close(answers)
            return
        try:
            _settle({requests, answers})
            onnx_process.serve(requests, answers)
        finally:
            os._exit(0)

    def _start(self) -> None:
        from staticmem import child  # late: most files need no process

        self.process = child.start(onnx_process.__name__, pipes=True)
        self.pid = self.process.pid
        self.requests, self.answers = self.process.stdin.fileno(), self.process.stdout.fileno()

    def ask(self, request: Sequence[bytes]) -> list[bytes]:
        """Raises: EOFError, OSError: the process has ended. TimeoutError: it has not, for too long."""
        seconds = PATIENCE * (onnx_process.SECONDS + onnx_process.SECONDS_OF_BYTE * sum(map(len, request)))
        if FORKS:
            onnx_process.send(self.requests, request)
            import select

            poll = select.poll()
            poll.register(self.answers, select.POLLIN)
            if not poll.poll(seconds * 1000):
                raise TimeoutError
            return onnx_process.receive(self.answers)
        late = threading.Timer(seconds, self.process.kill)
        late.start()
        try:
            onnx_process.send(self.requests, request)
            return onnx_process.receive(self.answers)
        finally:
            late.cancel()

    def end(self) -> int:
        """Ends the process; gives the signal that ended it, 0 where it had ended by itself."""
        self.close()
        if self.process is not None:
            self.process.kill()
            return max(-int(self.process.wait()), 0)
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == 0:  # running still; of one that is ending this does not change the status
                os.kill(self.pid, signal.SIGKILL)
                _, status = os.waitpid(self.pid, 0)
        except OSError:  # somebody else waited for it
            return 0
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def close(self) -> None:
        if self.process is not None:
            for file in (self.process.stdin, self.process.stdout):
                with suppress(OSError):
                    file.close()
            return
        for end in (self.requests, self.answers):
            os.close(end)


def _settle(kept: set[int]) -> None:
    """Makes a forked process one that only answers: no terminal, no files of others, no interrupts."""
    for number, action in (
        (signal.SIGINT, signal.SIG_IGN),  # the process that asks decides
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGALRM, signal.SIG_DFL),
    ):
        signal.signal(number, action)
    if "faulthandler" in sys.modules:
        sys.modules["faulthandler"].disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in {0, 1, 2} - kept:  # who closed them has pipes there
        os.dup2(nothing, standard)
    start = 3
    for end in sorted(kept - {0, 1, 2}):
        os.closerange(start, end)
        start = end + 1
    os.closerange(start, max(start, 4096))


_worker: Worker | None = None
_lock = threading.Lock()


def _forget() -> None:
    """In a process that was forked from one that has a worker: it is not this one's."""
    global _worker, _lock
    _lock = threading.Lock()
    if _worker is not None:
        _worker.close()
        _worker = None


def _at_exit() -> None:
    global _worker
    if _worker is not None:
        _worker.end()
        _worker = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(_at_exit)


def _ask(request: Sequence[bytes], what: str) -> list[bytes]:
    """The results of a request.

    Raises:
        RefusedError: onnx has an error for it.
        FailedError: it ended without an answer.
    """
    global _worker
    with _lock:
        for attempt in (1, 2):
            fresh = _worker is None
            if _worker is None:
                try:
                    _worker = Worker()
                except (OSError, ValueError):
                    return _results(onnx_process.answer(list(request)), what)
            try:
                answer = _worker.ask(request)
                break
            except TimeoutError:
                _worker.end()
                _worker = None
                raise _failed(what, getattr(signal, "SIGXCPU", 0)) from None
            except (EOFError, OSError):
                number = _worker.end()
                _worker = None
                # one that was idle has ended by itself
                if attempt == 2 or fresh or number:
                    raise _failed(what, number) from None
            except BaseException:  # Ctrl-C: the answer that comes is to nobody
                _worker.end()
                _worker = None
                raise
        if _worker is not None and sum(map(len, request)) > LARGE:  # what it holds is worth giving back
            _worker.end()
            _worker = None
    return _results(answer, what)


def _results(answer: list[bytes], what: str) -> list[bytes]:
    if answer[0] == b"memory":
        raise FailedError(what, f"onnx needs more than {onnx_process.MEMORY >> 20} MiB for it.")
    if answer[0] != b"done":
        raise RefusedError(answer[1].decode(errors="replace"))
    return answer[1:]


def _failed(what: str, number: int) -> FailedError:
    import onnx

    if number == getattr(signal, "SIGXCPU", 0) and number:
        return FailedError(what, f"onnx took more than {onnx_process.SECONDS} seconds of processor time.", number)
    try:
        name = signal.Signals(number).name
    except ValueError:
        return FailedError(what, "The process that asks onnx ended without an answer.", number)
    return FailedError(what, f"onnx {onnx.__version__} ends by a signal there ({name}): a fault of onnx.", number)


def title(node: Any) -> str:
    """What messages call a NodeProto."""
    return f"node {node.op_type} '{node.name or (*node.output, '')[0]}'"


def infer_shapes(model: bytes, strict: bool = False, data_prop: bool = False) -> bytes:
    """`onnx.shape_inference.infer_shapes` of a serialized ModelProto.

    Raises:
        RefusedError: onnx has an error for it.
        FailedError: it ended without an answer.
    """
    what = "onnx cannot infer the sizes of the graph"
    return _ask((b"model", b"01"[strict : strict + 1], b"01"[data_prop : data_prop + 1], model), what)[0]


def infer_node(
    node: Any,
    version: int,
    types: Mapping[str, Any],
    data: Mapping[str, Any],
    opsets: Mapping[str, int],
    domain: str | None = None,
) -> dict[str, Any]:
    """`onnx.shape_inference.infer_node_outputs` of a NodeProto: TypeProtos of its results by name.

    Args:
        version: of the operator's opset; `domain` is its own where the node's has another name.
        types: TypeProtos by name. data: TensorProtos of contents that are known.

    Raises:
        RefusedError: onnx has an error for it, knows no such operator, or lacks the type of an input.
        FailedError: it ended without an answer.
    """
    import onnx

    if any(name and name not in types for name in node.input):
        raise RefusedError("the type of an input is not known")
    request = [
        b"node", node.op_type.encode(), b"%d" % version, (node.domain if domain is None else domain).encode(),
        b"10", node.SerializeToString(),
    ]  # fmt: skip
    for table in (types, {name: data[name] for name in node.input if name in data}):
        request.append(b"%d" % len(table))
        for name, proto in table.items():
            request += (name.encode(), proto.SerializeToString())
    request.append(b"%d" % len(opsets))
    for name, number in opsets.items():
        request += (name.encode(), b"%d" % number)
    inferred = _ask(request, f"onnx cannot infer the sizes of {title(node)}")
    kinds: dict[str, Any] = {}
    for name, kind in zip(inferred[::2], inferred[1::2], strict=True):
        kinds[name.decode()] = onnx.TypeProto.FromString(kind)
    return kinds


def inline_functions(model: bytes) -> bytes:
    """`onnx.inliner.inline_local_functions` of a serialized ModelProto.

    Raises:
        RefusedError: onnx has an error for it.
        FailedError: it ended without an answer.
    """
    return _ask((b"functions", model), "onnx cannot put the functions of the graph in place")[0]


def check(path: str) -> None:
    """`onnx.checker.check_model` of a file, inference of sizes included.

    Raises:
        RefusedError: the checker refuses it.
        FailedError: it ended without an answer.
    """
    _ask((b"check", os.fsencode(path)), "onnx cannot check the file")
