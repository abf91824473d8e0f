"""A band for reserved memory: the replay again, with what nobody knows changed a little.

One buffer more or less than a free block's size opens a segment or not, so reserved swings by whole activations between
runs that differ in nothing that a graph can tell. Each jitter changes, deterministically:

- the order of segments in address space, which is the driver's choice and decides between free blocks of equal size;
- all sizes that grow with the batch, by up to 4 %, because a real process has workspaces, metrics and batches that are
  a little different from the ones predicted. The result is scaled back by what was allocated;
- workspaces that are known as a band: one in four is at its least and one in four at its most, of each kernel the same
  in all steps. In four of the eleven replays those that the band is known to miss now and then (`Process.strays`) are
  beyond it, one in eight of them.

The median is of the replays without such strays. The first replay is the one that is predicted, without change. The
others, where nothing but PyTorch's default settings is asked for, are of the large pool in the first two steps
(`large_pool`, docs/adr/0014): what is left out moves reserved memory by a few MiB, and takes four fifths of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median, stdev
from typing import Any

from staticmem.allocators.cuda_caching import DEFAULTS, simulate
from staticmem.allocators.driver import Layout, ascending, descending, shuffled
from staticmem.allocators.large_pool import LargePool
from staticmem.allocators.peaks import Outline, outline
from staticmem.allocators.process import Process
from staticmem.allocators.result import Replay
from staticmem.allocators.settings import MIN_BLOCK, ROUND_LARGE, Settings
from staticmem.ir.record import record

REPLAYS = 11
_FACTOR = 2654435761  # Knuth's multiplicative hash: lots that look random and are always the same
# Student's t at 95 %, one-sided, by degrees of freedom (any table of the distribution)
_STUDENT = ((30, 1.697), (20, 1.725), (10, 1.812), (5, 2.015), (2, 2.920), (1, 6.314))
WIDTH = 0.04  # the largest change of sizes: the range of batches that one prediction stands for


@record(frozen=True, slots=True)
class Jitter:
    """One change: the factor of sizes that grow with the batch, and where the driver puts segments."""

    scale: float
    layout: Layout


@record(frozen=True, slots=True)
class Band:
    """Bytes: the median of the replays and the bounds of what one more of them would be, and all of them, the unchanged
    one first and those with strays last.

    `tight` says that some replay ran out of memory at the given capacity; those are not in the band.
    """

    low: int
    expected: int
    high: int
    values: tuple[int, ...]
    tight: bool = False


def jitters(count: int) -> Iterator[Jitter]:
    """The first `count` jitters; the first changes nothing. The rest are pairs of a larger and a smaller batch."""
    yield Jitter(1.0, ascending)
    layouts = (descending, *(shuffled(seed) for seed in range(1, count)))
    pairs = max((count - 1) // 2, 1)
    for index in range(1, count):
        step = (index + 1) // 2
        scale = WIDTH * step / pairs
        yield Jitter(1 + scale if index % 2 else 1 - scale, layouts[(index - 1) % len(layouts)])


class Sizes:
    """The sizes of some allocations of a process, as each jitter has them."""

    def __init__(self, process: Process, ids: Sequence[int] | None = None) -> None:
        """`ids`: these alone, in this order; all by default."""
        sizes, scales, kernels = process.sizes, process.scales, process.origins.kernels
        bounds, strays = process.bounds, process.strays
        # Many allocations are alike, as those of a kernel in each step are: each place has the number of its kind
        kinds: dict[Any, int] = {}
        self._places: list[int] = []
        for id in range(len(sizes)) if ids is None else ids:
            kind: Any = (sizes[id], scales[id])
            if id in bounds or id in strays:
                kind = (*kind, kernels[id], bounds.get(id), strays.get(id))
            self._places.append(kinds.setdefault(kind, len(kinds)))
        self._kinds = [(kind[0], kind[1]) for kind in kinds]
        uncertain = [(number, *kind[2:]) for kind, number in kinds.items() if len(kind) > 2]
        self._bounds = [(number, kernel, *band) for number, kernel, band, _ in uncertain if band is not None]
        self._strays = [(number, kernel, *band) for number, kernel, _, band in uncertain if band is not None]

    def scaled(self, scale: float, draw: int = 0) -> list[int]:
        """The sizes of a batch that is `scale` times as large. What is smaller than a block stays as it is.

        `draw` above 0 chooses which kernels' workspaces are at a bound.
        """
        kinds = self._kinds
        if draw and (self._bounds or self._strays):
            kinds = list(kinds)
            for number, kernel, low, high in self._bounds:
                lot = (kernel * _FACTOR + draw) * _FACTOR >> 16 & 3
                if lot < 2:
                    kinds[number] = (high if lot else low, kinds[number][1])
            # as often as docs/workspace.md says
            for number, kernel, low, high in self._strays if has_strays(draw) else ():
                lot = ((kernel + high) * _FACTOR + draw) * _FACTOR >> 20 & 15
                if lot < 2:
                    kinds[number] = (high if lot else low, kinds[number][1])
        grown = [round(nbytes * scale) if grows and nbytes > MIN_BLOCK else nbytes for nbytes, grows in kinds]
        return [grown[number] for number in self._places]


def is_quick(process: Process, settings: Settings, capacity: int | None = None) -> bool:
    """Whether an outline and the large pool stand for whole replays: default settings, as much memory as is asked for.

    A memory fraction alone is a smaller capacity, which a band does not ask for either.
    """
    plain = replace(settings, per_process_memory_fraction=1.0) == DEFAULTS
    return plain and capacity is None and not process.empties


def reserved_band(
    process: Process,
    settings: Settings = DEFAULTS,
    capacity: int | None = None,
    *,
    total: int | None = None,
    replays: int = REPLAYS,
    nominal: Replay | None = None,
) -> Band:
    """Median and bounds of peak reserved over `replays` jittered replays; `nominal` is the unchanged one, if known."""
    if is_quick(process, settings, capacity) and settings == DEFAULTS:
        known = outline(process.calls, process.sizes)
        return quick_band(process, known, LargePool(process, known, 1 + WIDTH), replays)
    nominal = nominal or simulate(process.events, settings, capacity, total=total, fallbacks=process.fallbacks)
    values, wide = [nominal.peak_reserved], list[int]()
    tight = nominal.oom is not None
    sizes = Sizes(process)
    for draw, jitter in enumerate(jitters(replays)):
        if draw == 0:
            continue
        events = process.served(sizes.scaled(jitter.scale, draw))
        replay = simulate(events, settings, capacity, total=total, fallbacks=process.fallbacks, layout=jitter.layout)
        if replay.oom is not None:
            tight = True
            continue
        into = wide if has_strays(draw) else values
        into.append(_of_nominal(replay.peak_reserved, replay.peak_allocated, nominal.peak_allocated))
    return _band(values, wide, tight)


def quick_band(process: Process, nominal: Outline, pool: LargePool, replays: int = REPLAYS) -> Band:
    """`reserved_band` for what `is_quick`; `pool` is of a growth of at least 1 + WIDTH."""
    values, wide = [nominal.peak_reserved], list[int]()
    drawn = Sizes(process, pool.ids)
    for draw, jitter in enumerate(jitters(replays)):
        if draw:
            allocated, reserved = pool.peaks(drawn.scaled(jitter.scale, draw), jitter.layout)
            into = wide if has_strays(draw) else values
            into.append(_of_nominal(reserved, allocated, nominal.peak_allocated))
    return _band(values, wide)


def _of_nominal(reserved: int, allocated: int, nominal: int) -> int:
    """Reserved memory of a jittered replay for what is allocated without the jitter, in whole segments."""
    ratio = nominal / allocated if allocated else 1.0
    return round(reserved * ratio / ROUND_LARGE) * ROUND_LARGE


def has_strays(draw: int) -> bool:
    """Draws 3 and 4, 7 and 8...: pairs of a larger and a smaller batch, so that the others stay balanced too."""
    return draw % 4 in (3, 0)


def _band(plain: Sequence[int], wide: Sequence[int], tight: bool = False) -> Band:
    """The range, or the 90 % prediction interval of as many draws where that is wider: the least and the most of eleven
    draws hold another one in ten of twelve cases only."""
    values = (*plain, *wide)
    expected = round(median(plain))
    spread = interval(values)
    return Band(min(*values, expected - spread), expected, max(*values, expected + spread), values, tight)


def interval(values: Sequence[int]) -> int:
    """Half of the interval that holds one more draw of a normal distribution in 9 of 10 cases, in whole segments."""
    count = len(values)
    if count < 2:
        return 0
    quantile = next(t for freedom, t in _STUDENT if freedom <= count - 1)
    return round(quantile * stdev(values) * float((1 + 1 / count) ** 0.5) / ROUND_LARGE) * ROUND_LARGE
