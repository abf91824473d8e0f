"""After how many batches an evaluation that gathers on the GPU has filled it.

What is gathered grows with every batch, so a loop that fits with ten may end with a thousand. As many batches as can be
replayed in a moment are; behind them memory grows as in the last of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from staticmem.config.plan import CONCATENATED, NOTHING, Instant
from staticmem.devices.meters import Device, replay_on

if TYPE_CHECKING:
    import numpy as np

    from staticmem.allocators.process import Process
    from staticmem.allocators.result import Replay

CALLS = 150_000  # of a replay: some seconds
NEVER = 1_000_000  # batches of which nobody waits for the end


class Batches(NamedTuple):
    """A process, the bytes of tensors alive behind each call, and the call behind each step of its last instant."""

    process: Process
    live: np.ndarray
    steps: list[int]


def fills(instant: Instant) -> bool:
    """Whether an instant gathers without end."""
    return instant.own.get("gather", NOTHING) != NOTHING and "accumulation_steps" not in instant.own


def batches_until_full(
    play: Callable[[Sequence[Instant]], Batches],
    before: Sequence[Instant],
    instant: Instant,
    device: Device,
    capacity: int,
) -> int:
    """How many batches of an instant the allocator holds in `capacity` bytes after the instants before it; 0: more than
    anyone evaluates.

    `play` makes the process of instants. Behind the batches that are replayed, segments with live blocks grow as they
    did in the second half of these; others go back to the driver where it has no more.
    """
    few = play([*before, replace(instant, times=4)])
    _, first, _, last = few.steps[:4]  # the first is the variable's and the container's
    grown = int(few.live[last - 1] - few.live[first - 1]) // 2
    copies = 2 if instant.own["gather"] == CONCATENATED else 1  # the whole, and that of before
    if grown <= 0 or capacity // (grown * copies) > NEVER:
        return 0
    a_step = last - few.steps[-2]
    bound = (capacity - int(few.live[first - 1])) // (grown * copies) + 1
    times = max(min(bound, (CALLS - last) // a_step), 6)
    played = play([*before, replace(instant, times=times)])
    replay = replay_on(played.process, device, capacity)
    steps = played.steps
    if replay.oom is not None:
        return sum(step <= replay.oom.time for step in steps)
    middle, end = steps[len(steps) // 2] - 1, steps[-1] - 1
    held = _held(replay, end)
    running = max(replay._allocated[steps[-2] : steps[-1]]) - replay._allocated[end]  # by so much more a batch has
    if copies > 1:  # while a batch runs, or while its outputs are joined to those of before
        return times + min((capacity - held - running) // grown, (capacity - held - times * grown) // (2 * grown))
    blocks = (held - _held(replay, middle)) // (len(steps) - 1 - len(steps) // 2)
    return times + (capacity - held - running) // max(grown, blocks)


def _held(replay: Replay, time: int) -> int:
    """Bytes of segments that have live blocks: what cannot go back to the driver."""
    now = replay.fragmentation(time)
    return now.reserved - now.releasable
