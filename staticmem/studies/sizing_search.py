"""Sizes that can be tried, and searches over batches and numbers of devices: over fixed rungs, which cards share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from staticmem.devices.gpus import Gpu
from staticmem.engine.shapes import value_infos
from staticmem.errors import DimensionError, StaticmemError, UsageError, did_you_mean
from staticmem.ir.model_file import ModelFile, SymbolRange, describe_inputs
from staticmem.parallel.strategies.context import unit_of_lengths
from staticmem.report.model import MOST_BATCH
from staticmem.report.sizing import ACCUMULATE, Count
from staticmem.scenario.combinations import LARGEST, check
from staticmem.scenario.request import GENERATE
from staticmem.scenario.strategies import STRATEGIES
from staticmem.studies import Request, Study
from staticmem.studies.bench import Bench
from staticmem.units import format_bytes

MOST_OPS = 6_000  # of a step that grows with the batch: a search runs some tens of them in seconds
PER_OCTAVE = 8  # rungs between a batch and its double: a rung is within 12.5 % of the largest batch
SCALES = (0.5, 0.75, 1, 1.5, 2)  # of a resolution
STRIDES = (1, 2, 4, 8, 16, 32, 64, 128)  # of sizes that a model takes: windows, patches and strides of convolutions
PROMPT = "prompt"  # what `--max-dim` grows in generation
DEVICES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # what clusters have


def rungs(low: int, most: int) -> list[int]:
    """Batches between which a search divides: all up to 16, then eight to each doubling."""
    batches, batch, step = [], low, 1
    while batch <= most:
        batches.append(batch)
        while batch >= 2 * PER_OCTAVE * step:
            step *= 2
        batch += step
    return batches


def batch_range(model: ModelFile, most: int = MOST_BATCH) -> tuple[int, int] | None:
    """The least and most batch that the file allows; None where the batch is fixed."""
    axes = [spec.shape[0] for spec in model.inputs if spec.shape and isinstance(spec.shape[0], str)]
    return _range([model.symbols[axis] for axis in axes if axis in model.symbols], most) if axes else None


def _range(bounds: Sequence[SymbolRange], most: int) -> tuple[int, int]:
    low = max([1, *(bound.low or 1 for bound in bounds)])
    return low, max(low, min([most, *(bound.high or most for bound in bounds)]))


@dataclass(frozen=True)
class GrownSize:
    """What a search makes larger: the batch, or the open dimension `dim`, of which the model takes multiples of
    `stride`. A search counts strides. In generation the dimension is `PROMPT`: the tokens of `--prompt`."""

    dim: str | None = None
    stride: int = 1

    @property
    def name(self) -> str:
        return self.dim or "batch"

    def at(self, request: Request, strides: int) -> Request:
        """The request with this many strides in place of its own size."""
        if self.dim is None:
            return replace(request, batch=strides)
        if self._is_prompt(request):
            return replace(request, prompt=strides * self.stride)
        return replace(request, dims={**(request.dims or {}), self.dim: strides * self.stride})

    @property
    def flag(self) -> str:
        return "--max-batch" if self.dim is None else "--max-dim"

    def of_size(self, request: Request, size: int) -> Request:
        """The request with this size, which is a multiple of the stride."""
        return self.at(request, size // self.stride)

    def left_out(self, request: Request) -> Request:
        """The request without a size for it; generation has a prompt always."""
        if self.dim is None:
            return replace(request, batch=None)
        if self._is_prompt(request):
            return replace(request, prompt=2)
        return replace(request, dims={name: n for name, n in (request.dims or {}).items() if name != self.dim} or None)

    def size_of(self, request: Request) -> int | None:
        """What the request says of it."""
        if self._is_prompt(request):
            return request.prompt
        return request.batch if self.dim is None else (request.dims or {}).get(self.dim)

    def tried(self, study: Study, most: int = MOST_BATCH) -> tuple[GrownSize, tuple[int, int] | None]:
        """This with the stride that the model takes, and the least and the most strides; None where the batch is fixed.

        The code of a model may take another way at the least sizes (`if n > 1`): the least is one that it takes, with
        the one behind it. Where there is none, the first size is left for the search to be refused.

        Raises:
            UsageError: the model has no such open dimension.
        """
        limits = self._limits(study, most)
        if limits is None:
            return self, None
        low, most = limits
        example = study.model.sizes.example.get(self.dim or "", low)
        unit = unit_of_lengths(study.request) if self.dim is not None else 1
        for stride in [unit * n for n in STRIDES] if self.dim is not None else STRIDES[:1]:
            grown = replace(self, stride=stride)
            first = -(-low // stride)
            starts = {first, first + 1} | ({max(first, example // stride)} if self.dim is not None else set())
            for start in sorted(starts):
                if grown._is_taken(study, start):
                    least = grown._least(study, first, start)
                    return grown, (least, max(least, most // stride))
        return self, limits

    def _least(self, study: Study, low: int, taken: int) -> int:
        """The least size from `low` on that the model takes, where it takes `taken` and all behind the least."""
        while low < taken:
            middle = (low + taken) // 2
            if self._is_taken(study, middle):
                taken = middle
            else:
                low = middle + 1
        return taken

    def _is_taken(self, study: Study, strides: int) -> bool:
        """Whether the file allows this size and the one behind it, as far as it says, and the ops take a dimension's:
        five halvings leave nothing of a small image."""
        try:
            for size in (strides, strides + 1):
                asked = Study(study.model, self.at(study.request, size))
                asked.binding  # noqa: B018 - for the error of a size that the file does not allow
                if self.dim is not None:
                    value_infos(asked.graph, training=study.request.mode == "train")
        except DimensionError:
            return False
        return True

    def _is_prompt(self, request: Request) -> bool:
        return self.dim == PROMPT and request.mode == GENERATE

    def _limits(self, study: Study, most: int) -> tuple[int, int] | None:
        model = study.model
        if self.dim is None:
            return batch_range(model, most)
        if self._is_prompt(study.request):
            return 2, most  # a prompt of one token is a decode step
        check(LARGEST, study.request.given(max_dim=self.dim))
        if self.dim not in model.symbols:
            why = f"Open dimensions of the inputs: {', '.join(model.symbols) or 'none'} ({describe_inputs(model)})."
            hint = did_you_mean(self.dim, model.symbols) if model.symbols else "Export it with this dimension open."
            raise UsageError(f"--max-dim: no open dimension '{self.dim}'", why, hint, "SM111")
        return _range([model.symbols[self.dim]], most)


BATCH = GrownSize()


def last_of_few_ops(ops: Callable[[int], int], low: int, most: int) -> int:
    """The last batch that a search runs; `most`, but for models to whose step each sample adds ops, as a loop over the
    batch does. `ops`: how many the step at a batch has, 0 where the model does not take it."""
    few = [ops(batch) for batch in range(low, min(low + 2, most + 1))]
    if len(few) < 2 or not 0 < few[0] < few[1]:
        return most
    before, count = few[1], ops(low + 2)
    if count <= before:
        return most
    return min(most, low + 2 + max(MOST_OPS - count, 0) // (count - before))


def divisors(total: int) -> list[int]:
    """The numbers that divide a total, itself included, from 1 on."""
    small = [n for n in range(1, isqrt(total) + 1) if total % n == 0]
    return sorted({*small, *(total // n for n in small)})


def resolutions(study: Study, asked: Sequence[int] | None) -> list[tuple[int, int]]:
    """Resolutions around the asked one, and it, where the file leaves height or width of an image open.

    They are multiples of 32, as most strides need.
    """
    sides = [spec.resolution_of(spec.shape or ()) or () for spec in study.model.inputs]
    if asked is None or len(asked) != 2 or not any(isinstance(size, str) for sizes in sides for size in sizes):
        return []
    height, width = asked
    scaled = {tuple(max(32, round(side * scale / 32) * 32) for side in asked) for scale in SCALES}
    return sorted({(h, w) for h, w in scaled} | {(height, width)})


def last(values: Sequence[int], allows: Callable[[int], bool], guess: int = 0) -> int:
    """Index of the last value that is allowed, -1 where none is; `allows` is true up to some value. Starts at a guess
    and doubles its stride, so that a good guess costs two calls."""
    if not values:
        return -1
    at = min(max(guess, 0), len(values) - 1)
    stride = 1
    if allows(values[at]):
        low, high = at, len(values)
        while (at := low + stride) < len(values):
            if not allows(values[at]):
                high = at
                break
            low, stride = at, 2 * stride
    else:
        low, high = -1, at
        while (at := high - stride) >= 0:
            if allows(values[at]):
                low = at
                break
            high, stride = at, 2 * stride
    return bisect_left(range(low + 1, high), True, key=lambda at: not allows(values[at])) + low


@dataclass(frozen=True)
class Found:
    """The fewest devices, and the need of the rank with the most."""

    devices: int
    nbytes: int
    batch: int | None = None  # of each in a micro-batch, of a global batch
    accumulate: int = 1


def fewest(
    bench: Bench, strategy: str, card: Gpu, request: Request, checkpointed: Request | None, total: int | None = None
) -> Count:
    """The fewest devices of a strategy; with checkpointed blocks where they are needed for it.

    Args:
        total: a global batch that the devices share; None: each has the batch of the request.
    """
    why = ""
    for variant, checkpointing in ((request, False), (checkpointed, True)):
        if variant is None:
            continue
        result = (
            _divide_total(bench, strategy, card, variant, total) if total else _fewest(bench, strategy, card, variant)
        )
        if isinstance(result, Found):
            return Count(strategy, result.devices, result.nbytes, checkpointing, "", result.batch, result.accumulate)
        why = result
    return Count(strategy, None, None, False, why)


def _divide_total(bench: Bench, strategy: str, card: Gpu, request: Request, total: int) -> Found | str:
    """The fewest devices that a global batch is shared by, or why none are enough.

    What a device needs falls as they are added: each has fewer samples, and with ZeRO and FSDP less of the model.
    """
    if strategy == ACCUMULATE:
        return _accumulated(bench, card, request, total)
    low, _ = batch_range(bench.study.model) or (1, total)
    if total % DEVICES[0]:
        return f"{total:,} samples cannot be shared evenly by {DEVICES[0]} devices"
    tried = [devices for devices in DEVICES if total % devices == 0 and total // devices >= low]
    if not tried:
        return f"{DEVICES[0]} devices have {total // DEVICES[0]:,} samples each, the file takes {low:,} or more"

    def ask(devices: int) -> Request:
        return replace(request, batch=total // devices, parallel=strategy, devices=devices)

    def enough(devices: int) -> bool:
        return bench.safe(ask(devices), card)

    if not enough(tried[-1]):
        need = format_bytes(bench.expected(ask(tried[-1]), card))
        return f"{need} are needed on each of {tried[-1]:,} at {total // tried[-1]:,} samples each"
    devices = tried[bisect_left(tried[:-1], True, key=enough)]
    return Found(devices, bench.expected(ask(devices), card), total // devices)


def _accumulated(bench: Bench, card: Gpu, request: Request, total: int) -> Found | str:
    """The largest micro-batch of one device that divides a global batch, or why there is none."""
    low, _ = batch_range(bench.study.model) or (1, total)
    parts = [part for part in divisors(total)[:-1] if part >= low]
    if not parts:
        return (
            f"no micro-batch below {total:,} and of {low:,} or more, the least of the file, divides {total:,} samples"
        )

    def ask(batch: int) -> Request:
        return replace(request, batch=batch, accumulate=total // batch)

    def allows(batch: int) -> bool:
        try:
            return bench.safe(ask(batch), card)
        except StaticmemError:
            return False  # the model does not take this batch

    while True:  # an export may have no batch of 1, whatever it says
        try:
            least = bench.expected(ask(parts[0]), card)
            break
        except StaticmemError as error:
            if not parts[1:]:
                return error.why
            parts = parts[1:]
    at = last(parts, allows)
    if at < 0:
        return f"{format_bytes(least)} are needed at {parts[0]:,} samples at a time"
    batch = parts[at]
    return Found(1, bench.expected(ask(batch), card), batch, total // batch)


def _fewest(bench: Bench, strategy: str, card: Gpu, request: Request) -> Found | str:
    """The fewest devices and the need, or why none are enough."""

    def ask(devices: int) -> Request:
        return replace(request, parallel=strategy, devices=devices)

    def short(devices: int) -> str:
        return f"{format_bytes(bench.live(ask(devices)))} of tensors on each of {devices}"

    if STRATEGIES[strategy].runs_parts:  # the model says how far these can go
        why = ""
        for devices in DEVICES:
            try:
                if bench.safe(ask(devices), card):
                    return Found(devices, bench.expected(ask(devices), card))
                why = short(devices)
            except StaticmemError as error:
                return why or error.why
        return why
    tried = DEVICES[:1] if STRATEGIES[strategy].keeps_whole else DEVICES  # what DDP needs is not less on more
    if not bench.safe(ask(tried[-1]), card):
        return short(tried[-1])
    # the need falls as devices are added, and the last number is enough
    enough = tried[bisect_left(tried[:-1], True, key=lambda devices: bench.safe(ask(devices), card))]
    return Found(enough, bench.expected(ask(enough), card))
