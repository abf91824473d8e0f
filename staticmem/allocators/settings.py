"""What decides a replay beside its events: the allocator's settings, and where the driver puts segments.

Settings are spelled as in `PYTORCH_CUDA_ALLOC_CONF` (or `PYTORCH_ALLOC_CONF`). Source: c10/core/AllocatorConfig.{h,cpp}
(common options) and c10/cuda/CUDAAllocatorConfig.{h,cpp} of pytorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from staticmem.errors import UsageError, did_you_mean
from staticmem.ir.record import record
from staticmem.units import MIB

MIN_BLOCK = 512  # kMinBlockSize, c10/core/AllocatorConfig.h
SMALL_SIZE = MIB  # kSmallSize: the largest request that the small pool serves
SMALL_BUFFER = 2 * MIB  # kSmallBuffer: segments of the small pool
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
ROUND_LARGE = 2 * MIB  # kRoundLarge: such a segment is a multiple of this
LARGE_SEGMENT = 20 * MIB  # large_segment_size_: segments for requests of 1 to 10 MiB
ROUNDUP_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: 1 MiB, 2 MiB ... 64 GiB, c10/core/AllocatorConfig.cpp
UNLIMITED = 2**64 - 1  # std::numeric_limits<size_t>::max()

# Options that change no device memory of the native allocator: pinned host memory, locks, CUDA graphs, messages.
WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)


@record(frozen=True, slots=True)
class Settings:
    """The allocator's options; the defaults are PyTorch's. Sizes in bytes.

    `roundup_power2_divisions[i]` is for requests of 2**i MiB up to twice that (0: off); `[0]` also for smaller ones.
    `garbage_collection_threshold` has an effect only with a memory fraction below 1, as in PyTorch.
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding_size: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0

    def round_size(self, nbytes: int) -> int:
        """Bytes of the block that a request needs (`round_size`, c10/cuda/CUDACachingAllocator.cpp)."""
        if nbytes < MIN_BLOCK:
            return MIN_BLOCK
        interval = min(max(nbytes.bit_length() - 1 - 20, 0), ROUNDUP_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            return roundup_power2_next_division(nbytes, divisions)
        return -(-nbytes // MIN_BLOCK) * MIN_BLOCK

    def allocation_size(self, size: int) -> int:
        """Bytes of a new segment for a rounded request (`get_allocation_size`, same file)."""
        if size <= SMALL_SIZE:
            return SMALL_BUFFER
        if size < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    @property
    def rounds_plainly(self) -> bool:
        """Whether every request is rounded to 512 bytes and nothing else."""
        return max(self.roundup_power2_divisions) <= 1


DEFAULTS = Settings()


def roundup_power2_next_division(nbytes: int, divisions: int) -> int:
    """`nbytes` up to the next of `divisions` equal steps between two powers of two: 1200 in 4 steps is 1280."""
    floor = 1 << (nbytes.bit_length() - 1)
    if floor == nbytes:
        return nbytes
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-nbytes // step) * step


def parse_settings(text: str | None) -> Settings:
    """Settings from a string such as `expandable_segments:True,max_split_size_mb:128`; None or "" are the defaults.

    Raises:
        UsageError: an option is unknown, or its value is not one that PyTorch takes.
    """
    if not text:
        return DEFAULTS
    settings = DEFAULTS
    rounding_given = False
    # PyTorch reads large_segment_size_mb first: it is the least value of two others
    for name, value in sorted(_options(text), key=lambda option: option[0] != "large_segment_size_mb"):
        if name in WITHOUT_EFFECT:
            continue
        if name not in _READERS:
            hint = did_you_mean(name, (*_READERS, *WITHOUT_EFFECT))
            raise _error(f"unknown allocator option '{name}'", "PyTorch would refuse it.", hint)
        field, reader = _READERS[name]
        setting = reader(name, value, settings)
        settings = replace(settings, **{field: setting}) if field else settings
        rounding_given = rounding_given or name == "max_non_split_rounding_mb"
    if not rounding_given:  # max_non_split_rounding_size_ starts as large_segment_size_ (AllocatorConfig.cpp)
        settings = replace(settings, max_non_split_rounding_size=settings.large_segment_size)
    return settings


def _error(what: str, why: str, hint: str) -> UsageError:
    return UsageError(what, why, hint, code="SM144")


def _options(text: str) -> list[tuple[str, str]]:
    """`key:value` pairs; commas inside square brackets belong to the value. Whitespace has no meaning."""
    text = "".join(text.split())
    parts: list[str] = []
    start = depth = 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    pairs = []
    for part in parts:
        name, colon, value = part.partition(":")
        if not part:
            continue
        if not colon or not value or depth:
            why = "Options are key:value pairs with commas between them."
            hint = "For example: expandable_segments:True,max_split_size_mb:128."
            raise _error(f"allocator option '{part}' is not understood", why, hint)
        pairs.append((name, value))
    return pairs


# Each reads the value of an option: its name, the text, and the settings so far.


def _whole(name: str, value: str) -> int:
    if value.isascii() and value.isdigit():
        return int(value)
    hint = f"For example: {name}:128."
    raise _error(f"{name}:{value} is not a whole number", "It is a size in MiB or a count.", hint)


def _mebibytes(name: str, value: str, settings: Settings) -> int:
    size = _whole(name, value) * MIB
    if size < settings.large_segment_size:
        least = settings.large_segment_size // MIB
        raise _error(f"{name}:{value} is too small", f"PyTorch takes {least} and more.", f"Try {name}:{least}.")
    return size


def _large_segment(name: str, value: str, settings: Settings) -> int:
    size = _whole(name, value) * MIB
    if size <= MIN_LARGE_ALLOC:
        raise _error(f"{name}:{value} is too small", "It must be more than 10.", "PyTorch's own is 20.")
    return size


def _fraction(name: str, value: str, settings: Settings) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if 0 < number < 1 or (name == "per_process_memory_fraction" and number == 1):
        return number
    raise _error(f"{name}:{value} is out of range", "It is a fraction between 0 and 1.", f"For example: {name}:0.8.")


def _true_or_false(name: str, value: str, settings: Settings) -> bool:
    if value not in ("True", "False"):
        raise _error(f"{name}:{value} is not understood", "It is True or False.", "Mind the capital.")
    return value == "True"


def _backend(name: str, value: str, settings: Settings) -> None:
    if value != "native":
        why = "Only PyTorch's own caching allocator is (backend:native)."
        raise _error(f"the allocator backend '{value}' is not simulated", why, "Leave the option out.")


def _power_of_two(name: str, value: str, zero: bool = False) -> int:
    number = _whole(name, value)
    if number & (number - 1) or (number == 0 and not zero):
        hint = f"For example: {name}:4, or [256:1,512:2,1024:4,>:8]."
        raise _error(f"{name}: {value} is not a power of two", "PyTorch divides between powers of two.", hint)
    return number


def _roundup(name: str, value: str, settings: Settings) -> tuple[int, ...]:
    """One number for all sizes, or `[256:1,512:2,>:4]`: `parseRoundUpPower2Divisions` with its order of filling."""
    if not value.startswith("["):
        return (_power_of_two(name, value),) * ROUNDUP_INTERVALS
    table = list(settings.roundup_power2_divisions)
    last, first = -1, True
    for item in value.strip("[]").split(","):
        bound, _, count = item.partition(":")
        divisions = _power_of_two(name, count, zero=True)
        if bound == ">":
            table[last + 1 :] = [divisions] * (ROUNDUP_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(name, bound).bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if first:
            table[:last] = [divisions] * last
            first = False
        table[last] = divisions
    return tuple(table)


# option -> the field of `Settings` that it sets, and what reads its value
_READERS: dict[str, tuple[str, Callable[[str, str, Settings], Any]]] = {
    "backend": ("", _backend),
    "expandable_segments": ("expandable_segments", _true_or_false),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "large_segment_size_mb": ("large_segment_size", _large_segment),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _mebibytes),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _roundup),
}

# -- addresses of segments ---------------------------------------------------------------------------------------------

BASE = 0x7F0000000000  # where CUDA's addresses lie on Linux; nothing but order depends on it
SLOT = 1 << 40  # bytes between two segments where they are not laid side by side: more than any device has
SLOTS = 1 << 16

# From the number of the next segment, the bytes of the segments before it and its own size to its address.
Layout = Callable[[int, int, int], int]


def ascending(number: int, offset: int, size: int) -> int:
    """Each segment behind the one before: the deterministic layout."""
    return BASE + offset


def descending(number: int, offset: int, size: int) -> int:
    """Each segment in front of the one before."""
    return BASE - offset - size


def shuffled(seed: int) -> Layout:
    """Segments in an order that looks random and is the same for the same seed."""
    factor = (2654435761 * (2 * seed + 1)) | 1  # Knuth's multiplicative hash; odd, so that no two numbers collide
    return lambda number, offset, size: BASE + (number * factor + seed) % SLOTS * SLOT
