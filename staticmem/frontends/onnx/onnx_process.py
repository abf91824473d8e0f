"""The other side of `isolation`: answers requests that come through a pipe with what onnx's C++ says.

Where a process cannot be forked safely it is started anew, so it imports nothing of staticmem. A request and
an answer are lists of byte strings: the process that reads the answers has to survive whatever a hostile file made of
this one, so nothing here is pickled.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Sequence
from typing import Any

MEMORY = 512 << 20  # bytes beside those of the message that inference may take
MEMORY_OF_BYTE = 64  # and for each byte of it; graphs of real models take 5 to 20
SECONDS = 10  # of processor time; ResNet-50 takes a fiftieth of a second
SECONDS_OF_BYTE = 2e-6  # onnx reads some 40 MB a second
JOINED = 1 << 20  # bytes of a message that is copied to be written at once
IDLE = 5.0  # seconds without a request, after which the process ends


def send(descriptor: int, parts: Sequence[bytes]) -> None:
    """Writes a message to a pipe."""
    header = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    if sum(map(len, parts)) < JOINED:
        write(descriptor, b"".join((header, *parts)))
        return
    for part in (header, *parts):
        write(descriptor, part)


def receive(descriptor: int) -> list[bytes]:
    """Reads a message from a pipe.

    Raises:
        EOFError: the other side has ended.
    """
    (count,) = struct.unpack("<I", read(descriptor, 4))
    sizes = struct.unpack(f"<{count}Q", read(descriptor, 8 * count))
    return [read(descriptor, size) for size in sizes]


def read(descriptor: int, size: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        EOFError: the other side has ended.
    """
    chunks = []
    while size > 0:
        chunk = os.read(descriptor, min(size, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def answer(request: list[bytes]) -> list[bytes]:
    """`done` and the results, `memory`, or `refused` and what onnx says."""
    try:
        return [b"done", *_KINDS[request[0]](request)]
    except MemoryError:
        return [b"memory"]
    except Exception as error:  # onnx has errors of several kinds, and pybind of its own
        return [b"refused", f"{error}".encode(errors="replace")]


def _model(request: list[bytes]) -> list[bytes]:
    from onnx import shape_inference  # its own `infer_shapes` would parse the answer

    _, strict, data_prop, model = request
    return [shape_inference.C.infer_shapes(model, False, strict == b"1", data_prop == b"1")]


def _node(request: list[bytes]) -> list[bytes]:
    import onnx.defs

    _, op, version, domain, ir_version, node, *rest = request
    tables: list[dict[str, Any]] = []
    for _ in range(3):  # types, contents, opsets
        count = int(rest[0])
        table, rest = rest[1 : 2 * count + 1], rest[2 * count + 1 :]
        tables.append({name.decode(): part for name, part in zip(table[::2], table[1::2], strict=True)})
    types, data, opsets = tables
    schema: Any = onnx.defs.get_schema(op.decode(), int(version), domain.decode())
    versions = {name: int(number) for name, number in opsets.items()}
    inferred = schema._infer_node_outputs(node, types, data, {}, versions, int(ir_version))
    return [part for name, kind in inferred.items() for part in (name.encode(), kind)]


def _functions(request: list[bytes]) -> list[bytes]:
    from onnx import inliner

    return [inliner.C.inline_local_functions(request[1], False)]


def _check(request: list[bytes]) -> list[bytes]:
    from onnx import checker

    checker.check_model(os.fsdecode(request[1]), full_check=True)
    return []


_KINDS = {b"model": _model, b"node": _node, b"functions": _functions, b"check": _check}


def limit(size: int) -> None:
    """Bounds the memory and the processor time of this process for a request of so many bytes, where the system can."""
    if sys.platform != "linux":
        return  # others have no such limit, or do not heed it
    import resource

    try:
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # a system without /proc
        used = 64 << 30
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime
    wanted = {
        resource.RLIMIT_AS: used + MEMORY + MEMORY_OF_BYTE * size,
        resource.RLIMIT_CPU: int(cpu + SECONDS + SECONDS_OF_BYTE * size) + 1,
        resource.RLIMIT_CORE: 0,
    }
    for kind, soft in wanted.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def serve(requests: int, answers: int) -> None:
    """Answers until nobody asks any more."""
    waits = sys.platform == "linux"
    while True:
        if waits:
            import select

            poll = select.poll()
            poll.register(requests, select.POLLIN)
            if not poll.poll(IDLE * 1000):
                return
        try:
            request = receive(requests)
        except (EOFError, OSError):
            return
        limit(sum(map(len, request)))
        try:
            send(answers, answer(request))
        except (OSError, MemoryError):
            return


def main() -> int:
    """Answers on the standard streams."""
    serve(0, 1)
    return 0
