"""An out-of-memory error of PyTorch as numbers: from its message in a log, or from a memory snapshot.

Formats: the message of `DeviceCachingAllocator::malloc` (c10/cuda/CUDACachingAllocator.cpp), sizes of two decimals;
`oom` among the events of a snapshot (torch/csrc/cuda/memory_snapshot.cpp).
"""

from __future__ import annotations

import re
from typing import Any

from staticmem.errors import UsageError
from staticmem.files import read as read_file
from staticmem.files import unreadable
from staticmem.ir.record import record
from staticmem.units import parse_bytes
from staticmem.validate import plain_pickle, snapshots

MOST = 64 << 20  # bytes of a log that are read
ROUNDING = 0.005  # of its unit: what two decimals may hide
_MESSAGE = re.compile(r"CUDA out of memory\. Tried to allocate[^\n]{0,4000}", re.IGNORECASE)
_SIZE = r"(\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB))"
_NOW = {  # PyTorch 2.1 and newer
    "tried": f"Tried to allocate {_SIZE}",
    "total": rf"(?:has a )?total capac(?:ity|ty) of {_SIZE}",  # 2.0 and 2.1 spell it capacty
    "free": f"of which {_SIZE} is free",
    "in_use": f"this process has {_SIZE} memory in use",
    "allowed": rf"{_SIZE} allowed",
    "allocated": f"{_SIZE} is allocated by PyTorch",
    "unallocated": f"{_SIZE} is reserved by PyTorch but unallocated",
}
_BEFORE = {  # until 2.0: (GPU 0; 23.70 GiB total capacity; 21.49 GiB already allocated; ...)
    "total": f"{_SIZE} total capacity",
    "free": f"{_SIZE} free",
    "allocated": f"{_SIZE} already allocated",
    "reserved": f"{_SIZE} reserved in total by PyTorch",
}
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use")


@record(frozen=True, slots=True)
class Crash:
    """What the allocator knew when it gave up. Bytes; None where the source does not say.

    Attributes:
        tried: the request that failed.
        allocated: of the process before it; `reserved` contains it.
        total: of the device, as the driver gives it to processes; `free` of it.
        in_use: by the process, its context and libraries included.
        others: by other processes.
        allowed: the limit of `torch.cuda.set_per_process_memory_fraction`.
        blur: how far each size may be off, because the message rounds it.
    """

    tried: int
    allocated: int
    reserved: int
    total: int | None
    free: int | None
    in_use: int | None
    others: int
    allowed: int | None
    blur: int


def read(path: str) -> Crash:
    """The last out-of-memory error in a log or a snapshot; its first byte tells which it is.

    Raises:
        UsageError: the file cannot be read (SM238), has no such error (SM239), or is another pickle (SM233, SM234).
    """
    try:
        data = read_file(path, MOST)
    except OSError as error:
        raise unreadable(path, error, "SM238") from error
    if data[:1] == b"\x80":
        return _of_snapshot(path)
    messages = _MESSAGE.findall(data.decode("utf-8", "replace"))
    crash = of_message(messages[-1]) if messages else None
    if crash is None:
        raise _no_error(path, "It has no line with 'CUDA out of memory. Tried to allocate' and the sizes behind it")
    return crash


def of_message(message: str) -> Crash | None:
    """The error of a message; None where sizes are missing that PyTorch always writes."""
    now = {name: _size(pattern, message) for name, pattern in _NOW.items()}
    before = {name: _size(pattern, message) for name, pattern in _BEFORE.items()}
    tried = now["tried"]
    allocated = now["allocated"] if now["allocated"] is not None else before["allocated"]
    if tried is None or allocated is None:
        return None
    reserved = before["reserved"] if before["reserved"] is not None else allocated + (now["unallocated"] or 0)
    total = now["total"] if now["total"] is not None else before["total"]
    free = now["free"] if now["free"] is not None else before["free"]
    others = sum(parse_bytes(size) or 0 for size in _OTHERS.findall(message))
    blur = round(ROUNDING * (1 << 30))
    return Crash(tried, allocated, reserved, total, free, now["in_use"], others, now["allowed"], blur)


def _size(pattern: str, message: str) -> int | None:
    match = re.search(pattern, message, re.IGNORECASE)
    return None if match is None else parse_bytes(match[1].replace(" bytes", ""))


def _of_snapshot(path: str) -> Crash:
    """The last `oom` event, with what was allocated and reserved before it."""
    snapshot = snapshots.read(path)
    try:
        document: Any = plain_pickle.load(path)
        events = max(document["device_traces"], key=len)
        at = max(index for index, event in enumerate(events) if event["action"] == "oom")
        tried, free = int(events[at]["size"]), events[at].get("device_free")
    except (KeyError, TypeError, ValueError) as error:
        raise _no_error(path, "Its events have no 'oom': it was written at another moment") from error
    free = free if isinstance(free, int) else None
    return Crash(tried, snapshot.allocated[at], snapshot.reserved[at], None, free, None, 0, None, 0)


def _no_error(path: str, why: str) -> UsageError:
    hint = "Give the log with PyTorch's error, or a snapshot of torch.cuda.memory that was dumped when it happened."
    return UsageError(f"{path} has no out-of-memory error", f"{why}.", hint, code="SM239")
