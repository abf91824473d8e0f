"""Why a step ran out of memory: the crash against the prediction for the same step, and the smallest change that fits.

A process that crashes has not reached its peak, so that a reading can contradict a prediction in one direction only:
it held more than was predicted at most.

An out-of-memory error of PyTorch as numbers: from its message in a log, or from a memory snapshot.

Formats: the message of `DeviceCachingAllocator::malloc` (c10/cuda/CUDACachingAllocator.cpp), sizes of two decimals;
`oom` among the events of a snapshot (torch/csrc/cuda/memory_snapshot.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from staticmem.devices import gpus
from staticmem.devices.sizing import TIGHT
from staticmem.errors import UsageError
from staticmem.files import read as read_file
from staticmem.files import unreadable
from staticmem.ir.record import record
from staticmem.report.formats import JSON, Format
from staticmem.report.model import Peak
from staticmem.report.sweep import cheapest
from staticmem.report.text import PLAIN, Text, View
from staticmem.report.verdict import METERS, step_name, with_article
from staticmem.studies import Study
from staticmem.studies.levers import levers
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
        return _read_snapshot(path)
    messages = _MESSAGE.findall(data.decode("utf-8", "replace"))
    crash = of_message(messages[-1]) if messages else None
    if crash is None:
        raise _no_error(path, "It has no line with 'CUDA out of memory. Tried to allocate' and the sizes after it")
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


def _read_snapshot(path: str) -> Crash:
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


FORESEEN, OTHERS, LIMIT, CONTRADICTED, OPEN = "foreseen", "other processes", "limit", "contradicted", "open"
SAME_SIZE = 0.01  # of a device's memory: drivers and ECC move it by less, other cards differ by more

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """A meter: bytes that the process had at the crash, with the request that failed, and what was predicted."""

    meter: str
    at_crash: int
    low: int
    expected: int
    high: int


@dataclass(frozen=True)
class Explanation:
    """All of it. Bytes.

    Attributes:
        cause: "foreseen", "other processes", "limit", "contradicted" or "open".
        meter: the prediction that is contradicted; empty where none is.
        tried_bytes: the request that failed.
        room_bytes: what the process could have of the card.
        change: the cheapest change of the step that fits the room, `flags` do it and `change_bytes` is what the device
            needs then; empty where no lever alone is enough, or the step is not what is too large.
    """

    cause: str
    meter: str
    step: str
    gpu: str
    tried_bytes: int
    room_bytes: int
    rows: tuple[Row, ...]
    change: str = ""
    flags: str = ""
    change_bytes: int | None = None


def explain(crash: Crash, study: Study, progress: Progress | None = None) -> Explanation:
    """The explanation of a crash in a study's step.

    Raises:
        UsageError: neither the request nor the crash tells which card it was (SM238).
    """
    slug = study.request.gpu or _find_card(crash)
    study = study.ask(replace(study.request, gpu=slug))
    report = study.report
    assert report.gpu is not None
    usable = report.gpu.usable_bytes if crash.total is None else min(crash.total, report.gpu.usable_bytes)
    room = min(usable - crash.others, crash.allowed or usable)
    rows = tuple(_rows(crash, report.peak))
    cause, meter = _cause(crash, rows, usable, room)
    result = Explanation(cause, meter, step_name(report), report.gpu.name, crash.tried, room, rows)
    if cause in (CONTRADICTED, OPEN):
        return result
    lever = cheapest(levers(study, slug, int(TIGHT * room), progress))
    if lever is None:
        return result
    return replace(result, change=lever.does, flags=lever.flags, change_bytes=lever.device_bytes)


def _rows(crash: Crash, peak: Peak) -> list[Row]:
    """The meters that the crash tells, each with its prediction."""
    read = {"allocated": crash.allocated + crash.tried, "reserved": crash.reserved, "device": crash.in_use}
    rows = []
    for meter, at_crash in read.items():
        expected, band = getattr(peak, f"{meter}_bytes"), peak.bands.get(meter)
        if at_crash is not None and expected is not None and band is not None:
            rows.append(Row(meter, at_crash, band.low, expected, band.high))
    return rows


def _cause(crash: Crash, rows: tuple[Row, ...], usable: int, room: int) -> tuple[str, str]:
    """The first cause that the figures bear out, and the meter that is contradicted."""
    by_meter = {row.meter: row for row in rows}
    allocated, device = by_meter["allocated"], by_meter.get("device")
    need = max(row.high for row in rows)
    if allocated.at_crash > allocated.high + 2 * crash.blur:
        return CONTRADICTED, "allocated"
    if need > TIGHT * usable:
        return FORESEEN, ""
    if need > TIGHT * room:
        return (OTHERS if crash.others else LIMIT), ""
    for row in (by_meter["reserved"], device):
        if row is not None and row.at_crash > row.high + crash.blur:
            return CONTRADICTED, row.meter
    return OPEN, ""


def _find_card(crash: Crash) -> str:
    """The card of the catalog that has the memory of the message."""
    total = crash.total
    if total is None:
        raise UsageError("the card is not known", "A snapshot does not name it.", "Name it with --gpu.", code="SM238")
    same = [card for card in gpus.cards().values() if abs(card.usable - total) <= SAME_SIZE * total]
    if len({(card.usable, card.architecture) for card in same}) == 1:
        return same[0].slug
    names = ", ".join(sorted(card.slug for card in same)[:6]) or "none of the catalog"
    why = f"Cards with {PLAIN.size(total, 2)} are {names}."  # as the message writes it
    raise UsageError("the message does not tell the card", why, "Name it with --gpu.", code="SM238")


# -- for people --------------------------------------------------------------------------------------------------------

_WHY = {
    FORESEEN: "This was foreseen: {step} needs up to {high} on {card}, which has {room}.",
    OTHERS: "Other processes had what is missing: {step} needs up to {high}, and they left {room} of {card}.",
    LIMIT: "The limit of set_per_process_memory_fraction is too low: {step} needs up to {high}, {room} are allowed.",
    OPEN: "The prediction does not explain it: {step} needs up to {high}, and {room} of {card} were there.",
}
_CONTRADICTED = {
    "allocated": "The process held tensors that are not of this step: {at_crash} with the request that failed, where "
    "{step} allocates {high} at most.",
    "reserved": "Memory was fragmented more than predicted: PyTorch reserved {at_crash}, where {step} reserves {high} "
    "at most.",
    "device": "The context and libraries took more than predicted: the process had {at_crash}, where {step} has "
    "{high} at most.",
}
_NEXT = {
    "allocated": "Look for another batch, size or setting than given here; a second model or EMA; losses or outputs "
    "kept over steps; an evaluation before the crash.",
    "reserved": "Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; sizes that change from step to step fragment.",
    "device": "NCCL and other libraries of the process are not in the prediction; 'staticmem calibrate' reads them.",
}
_SETTLES = "To see which tensors were there, dump a snapshot when it happens, and 'staticmem compare-snapshot' it."


def answer(result: Explanation, view: View = PLAIN) -> str:
    """The sentence that a user came for."""
    row = next((row for row in result.rows if row.meter == result.meter), result.rows[-1])
    pattern = _CONTRADICTED[result.meter] if result.cause == CONTRADICTED else _WHY[result.cause]
    high = row.high if result.cause == CONTRADICTED else max(row.high for row in result.rows)
    return pattern.format(
        step=result.step,
        card=with_article(result.gpu),
        high=view.size(high),
        at_crash=view.size(row.at_crash),
        room=view.size(result.room_bytes),
    )


def advice(result: Explanation, view: View = PLAIN) -> str:
    """What to do about it."""
    if result.cause == CONTRADICTED:
        return f"{_NEXT[result.meter]} {_SETTLES if result.meter == 'allocated' else ''}".rstrip()
    if result.cause == OPEN:
        return _SETTLES
    if not result.change:
        return "No single change of the step is enough: 'staticmem size' says which cards hold it."
    needs = "" if result.change_bytes is None else f", which needs {view.size(result.change_bytes)}"
    return f"The cheapest change that fits: {result.change}{needs}{f' ({result.flags})' if result.flags else ''}."


def render(result: Explanation, view: View = PLAIN) -> str:
    """The answer, the advice, and the meters of the crash beside their predictions."""
    if view.quiet:
        return view.line(answer(result, view))
    text = Text(view)
    text.answer(answer(result, view))
    text.wrap(advice(result, view))
    text.heading(f"At the crash: {view.size(result.tried_bytes)} more were asked for")
    heads = ("", "at the crash", "predicted", "", "read as")
    rows = [
        (row.meter, view.size(row.at_crash), view.size(row.expected), f"{view.size(row.low)} to {view.size(row.high)}")
        for row in result.rows
    ]
    text.columns([heads, *[(*row, METERS[row[0]]) for row in rows]], right=(1, 2))
    return text.end()


FORMATS = (Format("table", "txt", render), JSON)
