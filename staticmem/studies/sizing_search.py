"""Searches over batches and numbers of devices. Both go over fixed rungs, so that cards share the steps they try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from staticmem.devices.gpus import Gpu
from staticmem.errors import StaticmemError
from staticmem.ir.model_file import ModelFile
from staticmem.report.sizing import Count
from staticmem.studies import Request
from staticmem.studies.bench import Bench
from staticmem.units import format_bytes

MOST_BATCH = 1 << 16
PER_OCTAVE = 8  # rungs between a batch and its double: the result is within 12.5 % of the largest
DEVICES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # what clusters have


def rungs(low: int, most: int) -> list[int]:
    """Batches that are tried: all up to 8, then eight to each doubling."""
    batches, batch, step = [], low, 1
    while batch <= most:
        batches.append(batch)
        while batch >= 2 * PER_OCTAVE * step:
            step *= 2
        batch += step
    return batches


def batch_range(model: ModelFile) -> tuple[int, int] | None:
    """The least and most batch that the file allows; None where the batch is fixed."""
    low, most, dynamic = 1, MOST_BATCH, False
    for spec in model.inputs:
        axis = spec.shape[0] if spec.shape else None
        if isinstance(axis, str):
            dynamic = True
            bounds = model.symbols.get(axis)
            if bounds is not None:
                low, most = max(low, bounds.low or 1), min(most, bounds.high or MOST_BATCH)
    return (low, max(low, most)) if dynamic else None


def last(values: Sequence[int], allows: Callable[[int], bool], guess: int = 0) -> int:
    """Index of the last value that is allowed, -1 where none is; `allows` is true up to some value. Starts at a guess
    and doubles its stride, so that a good guess costs two calls."""
    if not values or not allows(values[0]):
        return -1
    low, stride = 0, 1
    at = min(max(guess, 0), len(values) - 1)
    if at and allows(values[at]):
        low = at
    elif at:
        high = at
        while (at := high - stride) > 0 and not allows(values[at]):
            high, stride = at, 2 * stride
        return _between(values, allows, max(at, 0), high)
    while (at := low + stride) < len(values) and allows(values[at]):
        low, stride = at, 2 * stride
    return _between(values, allows, low, min(at, len(values)))


def _between(values: Sequence[int], allows: Callable[[int], bool], low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        if allows(values[middle]):
            low = middle
        else:
            high = middle
    return low


class Batches:
    """The largest batch that fits each card. Cards come in the order of their memory, and each search starts
    at the result of the one before. A bound of the band leads there, and the band itself decides on the last rungs."""

    def __init__(self, bench: Bench, request: Request) -> None:
        self.bench, self.request = bench, request
        limits = batch_range(bench.study.model)
        self.values = rungs(*limits) if limits is not None else []
        self._guess = 0

    def largest(self, card: Gpu) -> int | None:
        """None where the batch is fixed or the model takes no other."""
        if not self.values:
            return None

        def holds(judge: Callable[[Request, Gpu], bool], batch: int) -> bool:
            try:
                return judge(replace(self.request, batch=batch), card)
            except StaticmemError:
                return False  # the model does not take this batch

        if self._takes_none():
            return None
        index = last(self.values, lambda batch: holds(self.bench.may_fit, batch), self._guess)
        self._guess = max(index, 0)
        while index >= 0 and not holds(self.bench.fits, self.values[index]):
            index -= 1
        return self.values[index] if index >= 0 else 0

    def _takes_none(self) -> bool:
        try:
            self.bench.step(replace(self.request, batch=self.values[0]))
        except StaticmemError:
            return True
        return False


def fewest(bench: Bench, strategy: str, card: Gpu, request: Request, checkpointed: Request | None) -> Count:
    """The fewest devices of a strategy; with checkpointed blocks where they are needed for it."""
    why = ""
    for variant, checkpointing in ((request, False), (checkpointed, True)):
        if variant is None:
            continue
        result = _fewest(bench, strategy, card, variant)
        if isinstance(result, tuple):
            return Count(strategy, result[0], result[1], checkpointing, "")
        why = result
    return Count(strategy, None, None, False, why)


def _fewest(bench: Bench, strategy: str, card: Gpu, request: Request) -> tuple[int, int] | str:
    """The fewest devices and the need, or why none are enough."""

    def ask(devices: int) -> Request:
        return replace(request, parallel=strategy, devices=devices)

    def short(devices: int) -> str:
        return f"{format_bytes(bench.live(ask(devices)))} of tensors on each of {devices}"

    if strategy in ("tp", "pp"):  # the model says how far these can go
        why = ""
        for devices in DEVICES:
            try:
                if bench.allows(ask(devices), card):
                    return devices, bench.expected(ask(devices), card)
                why = short(devices)
            except StaticmemError as error:
                return why or error.why
        return why
    tried = DEVICES[:1] if strategy == "ddp" else DEVICES  # what DDP needs does not depend on their number
    if not bench.allows(ask(tried[-1]), card):
        return short(tried[-1])
    low, high = 0, len(tried) - 1  # the need falls as devices are added
    while low < high:
        middle = (low + high) // 2
        if bench.allows(ask(tried[middle]), card):
            high = middle
        else:
            low = middle + 1
    return tried[low], bench.expected(ask(tried[low]), card)
