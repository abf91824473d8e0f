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
(`LargePool`, docs/adr/0014): what is left out moves reserved memory by a few MiB, and takes four fifths of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median, stdev
from typing import TYPE_CHECKING, Any

from staticmem.allocators.peaks import LargePool, Outline, outline
from staticmem.allocators.process import Process
from staticmem.allocators.settings import (
    DEFAULTS,
    MIN_BLOCK,
    ROUND_LARGE,
    Layout,
    Settings,
    ascending,
    descending,
    shuffled,
)
from staticmem.ir.record import record

if TYPE_CHECKING:
    from staticmem.allocators.result import Replay

REPLAYS = 11
WIDTH = 0.04  # the largest change of sizes: the range of batches that one prediction stands for
_FACTOR = 2654435761  # Knuth's multiplicative hash: lots that look random and are always the same
# Student's t at 95 %, one-sided, by degrees of freedom (any table of the distribution)
_STUDENT = ((30, 1.697), (20, 1.725), (10, 1.812), (5, 2.015), (2, 2.920), (1, 6.314))

# A replay with sizes that are so many times as large, the number of its draw, and a layout: the peaks of allocated and
# reserved memory, None where it runs out of memory.
_Replayed = Callable[[float, int, Layout], "tuple[int, int] | None"]


@record(frozen=True, slots=True)
class ReservedBand:
    """Bytes: the median of the replays and the bounds of what one more of them would be, and all of them, the unchanged
    one first and those with strays last.

    `tight` says that some replay ran out of memory at the given capacity; those are not in the band.
    """

    low: int
    expected: int
    high: int
    values: tuple[int, ...]
    tight: bool = False


def jitters(count: int) -> Iterator[tuple[float, Layout]]:
    """The first `count` jitters: the factor of sizes that grow with the batch, and where the driver puts segments.

    The first changes nothing. The rest are pairs of a larger and a smaller batch.
    """
    yield 1.0, ascending
    layouts = [descending, *map(shuffled, range(1, count))]
    pairs = max((count - 1) // 2, 1)
    for index in range(1, count):
        change = WIDTH * ((index + 1) // 2) / pairs
        yield 1 + change if index % 2 else 1 - change, layouts[(index - 1) % len(layouts)]


class JitteredSizes:
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
) -> ReservedBand:
    """Median and bounds of peak reserved over `replays` jittered replays; `nominal` is the unchanged one, if known."""
    if is_quick(process, settings, capacity) and settings == DEFAULTS:
        peaks = outline(process.calls, process.sizes)
        return quick_band(process, peaks, LargePool(process, peaks, 1 + WIDTH), replays)
    from staticmem.allocators.cuda_caching import simulate  # the default settings need none of it

    sizes = JitteredSizes(process)

    def replayed(scale: float, draw: int, layout: Layout) -> tuple[int, int] | None:
        events = process.served(sizes.scaled(scale, draw))
        replay = simulate(events, settings, capacity, total=total, fallbacks=process.fallbacks, layout=layout)
        return (replay.peak_allocated, replay.peak_reserved) if replay.oom is None else None

    nominal = nominal or simulate(process.events, settings, capacity, total=total, fallbacks=process.fallbacks)
    return _band((nominal.peak_allocated, nominal.peak_reserved), replays, replayed, nominal.oom is not None)


def quick_band(process: Process, nominal: Outline, pool: LargePool, replays: int = REPLAYS) -> ReservedBand:
    """`reserved_band` for what `is_quick`; `pool` is of a growth of at least 1 + WIDTH."""
    sizes = JitteredSizes(process, pool.ids)

    def replayed(scale: float, draw: int, layout: Layout) -> tuple[int, int]:
        return pool.peaks(sizes.scaled(scale, draw), layout)

    return _band((nominal.peak_allocated, nominal.peak_reserved), replays, replayed)


def has_strays(draw: int) -> bool:
    """Draws 3 and 4, 7 and 8...: pairs of a larger and a smaller batch, so that the others stay balanced too."""
    return draw % 4 in (3, 0)


def _band(nominal: tuple[int, int], replays: int, replayed: _Replayed, tight: bool = False) -> ReservedBand:
    """The range, or the 90 % prediction interval of as many draws where that is wider: the least and the most of eleven
    draws hold another one in ten of twelve cases only."""
    plain, wide = [nominal[1]], list[int]()
    for draw, (scale, layout) in enumerate(jitters(replays)):
        peaks = replayed(scale, draw, layout) if draw else None
        if peaks is None:
            tight = tight or draw > 0
            continue
        allocated, reserved = peaks
        # for what is allocated without the jitter, in whole segments
        ratio = nominal[0] / allocated if allocated else 1.0
        (wide if has_strays(draw) else plain).append(round(reserved * ratio / ROUND_LARGE) * ROUND_LARGE)
    values = (*plain, *wide)
    expected = round(median(plain))
    spread = interval(values)
    return ReservedBand(min(*values, expected - spread), expected, max(*values, expected + spread), values, tight)


def interval(values: Sequence[int]) -> int:
    """Half of the interval that holds one more draw of a normal distribution in 9 of 10 cases, in whole segments."""
    count = len(values)
    if count < 2:
        return 0
    quantile = next(t for freedom, t in _STUDENT if freedom <= count - 1)
    return round(quantile * stdev(values) * float((1 + 1 / count) ** 0.5) / ROUND_LARGE) * ROUND_LARGE
