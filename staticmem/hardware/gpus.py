"""The cards of gpus.yaml: by name (`rtx-4090`) or by size (`24GB`, `16GiB`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from staticmem.errors import UsageError, did_you_mean
from staticmem.hardware.documents import integer, keys_of, read_yaml, table, text
from staticmem.units import GIB, MIB

# The CUDA driver keeps part of a card for itself. Where `usable` is not known: 2 % of what NVML shows, at most 768 MiB.
# The cards of gpus.yaml whose figures are known hold back 246 MiB (RTX 3060) to 768 MiB (A100 80 GB); the largest is
# taken, so that an assumed card is rather too small than too large.
HELD_BACK_SHARE, HELD_BACK_MOST = 0.02, 768

# Threads that a multiprocessor can hold: CUDA C++ Programming Guide, "Technical specifications per compute capability".
THREADS = {
    "sm_70": 2048, "sm_75": 1024, "sm_80": 2048, "sm_86": 1536, "sm_89": 1536, "sm_90": 2048, "sm_100": 2048,
    "sm_120": 1536,
}  # fmt: skip

DEFAULT_ARCHITECTURE = "sm_90"  # what is assumed where nothing is said: attention kernels are chosen for it too


@dataclass(frozen=True)
class Gpu:
    """A card. Memory in bytes: sold, shown by nvidia-smi, and given to CUDA processes. `assumed` names derived ones."""

    slug: str
    name: str
    architecture: str
    processors: int
    nominal: int
    nvml: int
    usable: int
    assumed: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()  # (figure, where it was read)

    @property
    def resident_threads(self) -> int:
        """Threads that the whole card can hold at once."""
        return self.processors * THREADS[self.architecture]


def held_back(nvml_mib: int) -> int:
    """MiB that CUDA is assumed not to give away."""
    return min(int(nvml_mib * HELD_BACK_SHARE), HELD_BACK_MOST)


@lru_cache(maxsize=1)
def cards() -> Mapping[str, Gpu]:
    """All known cards by slug."""
    return load(Path(__file__).with_name("gpus.yaml"))


def load(path: Path) -> dict[str, Gpu]:
    """The cards of a file, checked."""
    document = read_yaml(path)
    keys_of(document, path, required=("version", "checked", "cards"))
    return {slug: _card(str(slug), data, path) for slug, data in table(document["cards"], path, "cards").items()}


def _card(slug: str, data: Any, path: Path) -> Gpu:
    where = f"cards.{slug}"
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug):
        raise UsageError(f"{path}: {where}", "A name is lower-case words with hyphens.", code="SM401")
    fields = table(data, path, where)
    keys_of(
        fields, path, required=("name", "arch", "processors", "nominal", "source"), optional=("nvml", "usable"),
        where=where,
    )  # fmt: skip
    architecture = text(fields["arch"], path, f"{where}.arch")
    if architecture not in THREADS:
        raise UsageError(f"{path}: {where}.arch is '{architecture}'", "", did_you_mean(architecture, THREADS), "SM401")
    nominal = integer(fields["nominal"], path, f"{where}.nominal")
    sources = [("nominal", text(fields["source"], path, f"{where}.source"))]
    assumed: list[str] = []

    def figure(key: str, otherwise: int) -> int:
        value = fields.get(key, otherwise)
        if not isinstance(value, dict):
            assumed.append(key)
            return integer(value, path, f"{where}.{key}")
        keys_of(value, path, required=("mib", "source"), optional=("quoted",), where=f"{where}.{key}")
        sources.append((key, text(value["source"], path, f"{where}.{key}.source")))
        return integer(value["mib"], path, f"{where}.{key}.mib")

    nvml = figure("nvml", nominal)
    usable = figure("usable", nvml - held_back(nvml))
    if not 0 < usable <= nvml <= nominal:
        raise UsageError(
            f"{path}: {where}: usable {usable}, nvml {nvml}, nominal {nominal} MiB", "Each is at most the next.",
            code="SM401",
        )  # fmt: skip
    return Gpu(
        slug, text(fields["name"], path, f"{where}.name"), architecture,
        integer(fields["processors"], path, f"{where}.processors"), nominal * MIB, nvml * MIB, usable * MIB,
        tuple(assumed), tuple(sources),
    )  # fmt: skip


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|mb|mib|g|m)", re.IGNORECASE)
_UNITS = {"gb": GIB, "g": GIB, "gib": GIB, "mb": MIB, "m": MIB, "mib": MIB}


def find(query: str, architecture: str = DEFAULT_ARCHITECTURE) -> Gpu:
    """A card by its name, or a card of a size that is not in the list.

    `24GB` is a card sold as 24 GB: vendors count 2**30, and not all of it is usable. `24GiB` is usable memory as it is.
    """
    known = cards()
    slug = re.sub(r"[\s_]+", "-", query.strip().lower())
    if slug in known:
        return known[slug]
    match = _SIZE.fullmatch(query.strip())
    if match is None:
        raise UsageError(
            f"unknown GPU '{query}'", "A GPU is a name or a size such as 24GB.", did_you_mean(slug, known), code="SM402"
        )
    number, unit = float(match.group(1)), match.group(2).lower()
    if number <= 0:
        raise UsageError(f"a GPU of {query}", "A size is more than zero.", code="SM402")
    size = int(number * _UNITS[unit])
    usable = size if unit.endswith("ib") else size - held_back(size // MIB) * MIB
    return Gpu(
        slug,
        query.strip(),
        architecture,
        _typical_processors(architecture),
        size,
        size,
        usable,
        ("nvml", "usable", "processors"),
    )


def _typical_processors(architecture: str) -> int:
    """The largest card of an architecture: its context is the largest."""
    return max((gpu.processors for gpu in cards().values() if gpu.architecture == architecture), default=132)
