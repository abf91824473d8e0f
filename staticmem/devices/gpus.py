"""The cards of gpus.yaml: by name (`rtx-4090`) or by size (`24GB`, `16GiB`)."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from staticmem.devices.documents import integer, keys_of, read_yaml, table, text
from staticmem.errors import UsageError, did_you_mean
from staticmem.ir.record import record
from staticmem.units import GIB, MIB

# The CUDA driver keeps part of a card for itself. Where `usable` is not known: 2 % of what NVML shows, at most 768 MiB.
# The cards of gpus.yaml whose figures are known hold back 246 MiB (RTX 3060) to 768 MiB (A100 80 GB); the largest is
# taken, so that an assumed card is rather too small than too large.
HELD_BACK_SHARE, HELD_BACK_MOST = 0.02, 768

# Unified memory: of the 128 GB of a DGX Spark 102 GiB are free for CUDA after a boot, with caches dropped
# (github.com/MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/47). The share stands for machines without a reading.
FREE_SHARE = 102 / 128

# Threads that a multiprocessor can hold: CUDA C++ Programming Guide, "Technical specifications per compute capability".
THREADS = {
    "sm_60": 2048, "sm_61": 2048, "sm_70": 2048, "sm_75": 1024, "sm_80": 2048, "sm_86": 1536, "sm_87": 1536,
    "sm_89": 1536, "sm_90": 2048, "sm_100": 2048, "sm_103": 2048, "sm_110": 1536, "sm_120": 1536, "sm_121": 1536,
}  # fmt: skip

# Chips without tables of their own, and the architecture whose workspaces are replayed in their place: the nearest one
# by generation for NVIDIA's; for other vendors nothing is known, so the default. Such a card says so in `assumed`.
STAND_INS = {
    "sm_60": "sm_70", "sm_61": "sm_70", "sm_87": "sm_86", "sm_103": "sm_100", "sm_110": "sm_100", "sm_121": "sm_120",
    **dict.fromkeys(("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "xe-hpc", "xe2-hpg"), "sm_90"),
    **dict.fromkeys(("gaudi2", "gaudi3"), "sm_90"),
}  # fmt: skip
BEFORE_AMPERE = ("sm_70", "sm_75")  # of those with tables
UNKNOWN_CHIP = "unknown"  # of a card that is a size alone
ASSUMED_PROCESSORS = 132  # an H100's, for chips whose context is taken to be that of one

VENDORS = ("NVIDIA", "AMD", "Intel")
CLASSES = ("consumer", "workstation", "data centre")
TYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")

NEAR = 4  # names that a hint has: an A100 is sold in so many kinds
_FORMS = ("sxm", "pcie", "nvl")
_SXM = re.compile(r"sxm\d*|hbm3")  # an H100 whose name has its memory's is an SXM module

DEFAULT_ARCHITECTURE = "sm_90"  # assumed without a GPU; attention kernels are chosen for it too


@record(frozen=True)
class Gpu:
    """A card. Memory in bytes: sold, shown by nvidia-smi, and given to processes. `assumed` names what has no source.

    `architecture` decides workspaces; `chip` is the card's own where another stands in for it. `bandwidth` is in 10^9
    bytes a second, `tflops` in 10^12 dense operations a second by type, `tdp` in watts; None or absent: not known.
    """

    slug: str
    name: str
    architecture: str
    processors: int
    nominal: int
    nvml: int
    usable: int
    assumed: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()  # (figure, where it was read)
    vendor: str = "NVIDIA"
    chip: str = ""
    form: str | None = None
    year: int | None = None
    price_class: str | None = None
    bandwidth: int | None = None
    tdp: int | None = None
    link: str | None = None
    tflops: tuple[tuple[str, float], ...] = ()
    unread: tuple[str, ...] = ()  # of the specs: figures that were not compared with a page
    usual: bool = False  # the variant that the name of the chip alone stands for
    unified: bool = False  # the CPU shares the memory, so that what is usable is no constant
    threads: tuple[int, int] | None = None  # the fewest and the most that it may hold, where its chip is not known
    unsaid: tuple[str, ...] = ()  # what a size does not say of a card, and what stands for it: a clause

    @property
    def resident_threads(self) -> int:
        """Threads that the whole card can hold at once."""
        chip = self.chip or self.architecture
        return self.processors * THREADS[chip] if chip in THREADS else ASSUMED_PROCESSORS * THREADS["sm_90"]

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Architectures whose workspaces the chip may have as well as those of the one that stands in for it: all that
        are known on the same side of Ampere, since which cuDNN has TF32 and bfloat16. Empty for a known chip."""
        if self.chip in ("", self.architecture):
            return ()
        others = [name for name in THREADS if name not in STAND_INS and name != self.architecture]
        old = self.architecture in BEFORE_AMPERE
        return tuple([name for name in others if (name in BEFORE_AMPERE) == old])


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
    optional = "nvml usable vendor form year class specs usual memory".split()
    keys_of(fields, path, ("name", "arch", "processors", "nominal", "source"), optional, where)
    chip = text(fields["arch"], path, f"{where}.arch")
    _read_choice(chip, (*THREADS, *STAND_INS), path, f"{where}.arch")
    architecture = STAND_INS.get(chip, chip)
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

    unified = _read_choice(fields.get("memory", "own"), ("own", "unified"), path, f"{where}.memory") == "unified"
    nvml = figure("nvml", nominal)
    usable = figure("usable", int(nominal * FREE_SHARE) if unified else nvml - held_back(nvml))
    if not 0 < usable <= nvml <= nominal:
        what = f"{path}: {where}: usable {usable}, nvml {nvml}, nominal {nominal} MiB"
        raise UsageError(what, "Each is at most the next.", code="SM401")
    if chip in STAND_INS:
        assumed.append("architecture")
    specs = table(fields.get("specs") or {}, path, f"{where}.specs")
    unread, pages = _unread(specs, path, f"{where}.specs")
    year = fields.get("year")
    return Gpu(
        slug, text(fields["name"], path, f"{where}.name"), architecture,
        integer(fields["processors"], path, f"{where}.processors"), nominal * MIB, nvml * MIB, usable * MIB,
        tuple(assumed), (*sources, *pages),
        _read_choice(fields.get("vendor", "NVIDIA"), VENDORS, path, f"{where}.vendor"), chip,
        _text(fields, "form", path, where), None if year is None else integer(year, path, f"{where}.year", 1990),
        _read_choice(fields["class"], CLASSES, path, f"{where}.class") if "class" in fields else None,
        _integer(specs, "bandwidth", path, where), _integer(specs, "tdp", path, where),
        _text(specs, "link", path, where), _tflops(specs.get("tflops") or {}, path, f"{where}.specs.tflops"),
        tuple(unread), _switch(fields, "usual", path, where), unified,
    )  # fmt: skip


def _switch(fields: Mapping[str, Any], key: str, path: Path, where: str) -> bool:
    value = fields.get(key, False)
    if not isinstance(value, bool):
        raise UsageError(f"{path}: {where}.{key} is {value!r:.40}", "It is true or false.", code="SM401")
    return value


def _read_choice(value: Any, choices: Iterable[str], path: Path, where: str) -> str:
    choices = tuple(choices)
    if value not in choices:
        raise UsageError(f"{path}: {where} is '{value}'", "", did_you_mean(str(value), choices), "SM401")
    return str(value)


def _text(fields: Mapping[str, Any], key: str, path: Path, where: str) -> str | None:
    return text(fields[key], path, f"{where}.{key}") if key in fields else None


def _integer(fields: Mapping[str, Any], key: str, path: Path, where: str) -> int | None:
    return integer(fields[key], path, f"{where}.{key}") if key in fields else None


def _tflops(value: Any, path: Path, where: str) -> tuple[tuple[str, float], ...]:
    figures = table(value, path, where)
    keys_of(figures, path, (), TYPES, where)
    for name, number in figures.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            raise UsageError(
                f"{path}: {where}.{name} is {number!r:.40}", "A number above zero is needed.", code="SM401"
            )
    return tuple((name, float(figures[name])) for name in TYPES if name in figures)


def _unread(specs: Mapping[str, Any], path: Path, where: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Figures that were not read on a page, and (figure, page) of those that were."""
    if not specs:
        return [], []
    keys_of(specs, path, ("source",), ("bandwidth", "tdp", "link", "tflops", "read"), where)
    pages = specs["source"] if isinstance(specs["source"], list) else [specs["source"]]
    page = ", ".join(text(p, path, f"{where}.source") for p in pages)
    given = [key for key in ("bandwidth", "tdp", "link") if key in specs] + list(specs.get("tflops") or {})
    read = specs.get("read") or []
    if not isinstance(read, list):
        raise UsageError(f"{path}: {where}.read is {read!r:.40}", "A list of figures is needed.", code="SM401")
    for name in read:
        _read_choice(name, given, path, f"{where}.read")
    return [name for name in given if name not in read], [(name, page) for name in read]


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib|mb|mib|g|m)", re.IGNORECASE)
_UNITS = {"gb": GIB, "g": GIB, "gib": GIB, "mb": MIB, "m": MIB, "mib": MIB}


def parse_size(text: str) -> int | None:
    """Bytes of `24GB` (as vendors count: 2**30), `24GiB`, `512MB`; None for other text."""
    match = _SIZE.fullmatch(text.strip())
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()]) if match is not None else None


def catalog(file: str | os.PathLike[str] | None = None) -> Mapping[str, Gpu]:
    """The cards of the package, and those of a user's file over them."""
    return cards() if file is None else {**cards(), **load(Path(file))}


def checked() -> str:
    """The date at which the package's list was checked."""
    return str(read_yaml(Path(__file__).with_name("gpus.yaml"))["checked"])


def find(query: str, file: str | os.PathLike[str] | None = None) -> Gpu:
    """A card by its name, or a card of a size that is not in the list; `file` is a user's own list.

    A name may leave out what only one card has (`4090`), or what tells variants of a chip apart (`h100`): the usual
    variant is meant then, and `variants` has the others. The names of drivers and shops are taken too
    (`NVIDIA A100-SXM4-80GB`, `GeForce RTX 3090`). `24GB` is a card sold as 24 GB: vendors count 2**30, and not
    all of it is usable. `24GiB` is usable memory as it is.
    """
    gpus = catalog(file)
    slug = _slug(query)
    meant = _meant(query, gpus) or _meant_by_driver(query, gpus)
    if meant is not None:
        return meant
    size = parse_size(query)
    if size is None:
        why = "A GPU is a name of the catalog or a size such as 24GB."
        several = (
            "Several are compared by 'staticmem size', each with its flag: --gpu l4 --gpu t4." if "," in query else ""
        )
        raise UsageError(f"unknown GPU '{query}'", why, several or near(slug, gpus, file), code="SM402")
    if size <= 0:
        raise UsageError(f"a GPU of {query}", "A size is more than zero.", code="SM402")
    usable = size if query.strip().lower().endswith("ib") else size - held_back(size // MIB) * MIB
    name, assumed = f"GPU of {query.strip()}", ("nvml", "usable", "processors", "architecture")
    held = [card.resident_threads for card in cards().values() if card.vendor == "NVIDIA"]
    text = f"only the memory of the {name} is known: its figures are those of an H100 with this memory, and bands"
    unsaid = (f"{text} include other chips from compute capability 8.0 on (a name of 'staticmem gpus' narrows them)",)
    sizes = (ASSUMED_PROCESSORS, size, size, usable)
    threads, chip = (min(held), max(held)), UNKNOWN_CHIP
    return Gpu(slug, name, DEFAULT_ARCHITECTURE, *sizes, assumed, chip=chip, threads=threads, unsaid=unsaid)


def variants(query: str, file: str | os.PathLike[str] | None = None) -> list[str]:
    """The other cards that a name could mean, where it is the name of a chip alone."""
    gpus = catalog(file)
    slug = _slug(query)
    meant = _meant(query, gpus)
    if meant is None or not meant.usual or slug == meant.slug:
        return []
    return [name for name in _possible(slug, gpus) if name != meant.slug]


def _slug(query: str) -> str:
    return re.sub(r"[\s_]+", "-", query.strip().lower())


def _meant(query: str, gpus: Mapping[str, Gpu]) -> Gpu | None:
    """The card that a name or a part of one stands for; None where it could be several, or none, or is a size."""
    slug = _slug(query)
    if slug in gpus:
        return gpus[slug]
    if parse_size(query) is not None:  # `16GB` is no part of a name
        return None
    spelt = {_compact(name): name for name in gpus}.get(_compact(slug))
    if spelt is not None:
        return gpus[spelt]
    possible = _possible(slug, gpus)
    usual = [name for name in possible if gpus[name].usual and len({_model(name) for name in possible}) == 1]
    # `3090` is an RTX 3090, although there is an RTX 3090 Ti
    plain = [name for name in possible if name.endswith(f"-{slug}") and all(p.startswith(name) for p in possible)]
    meant = usual or plain or possible
    return gpus[meant[0]] if len(meant) == 1 else None


def _meant_by_driver(query: str, gpus: Mapping[str, Gpu]) -> Gpu | None:
    """The card that a driver or a shop calls so: without the words of makers and brands, which no short name has."""
    if parse_size(query) is not None:
        return None
    named = [word for gpu in gpus.values() for word in _split_name(f"{gpu.vendor} {gpu.name}")]
    short = {word for slug in gpus for word in _split_name(slug)} | {"gb"}
    brands = {word for word in named if word.isalpha()} - short
    asked = [word for word in _split_name(named_by_driver(query)) if word not in brands]
    if all(word.isdigit() for word in asked):
        return None
    full = [slug for slug, gpu in gpus.items() if set(asked) == {*_split_name(gpu.name)} - brands]
    if len(full) == 1:
        return gpus[full[0]]
    return _meant("-".join(asked), gpus) or _meant("-".join([word for word in asked if word != "sxm"]), gpus)


def named_by_driver(name: str) -> str:
    """The name that a driver gives a card, in small letters, with one word for its SXM modules."""
    return _SXM.sub("sxm", name.lower())


def _model(slug: str) -> tuple[str, ...]:
    """The words of a name that say the model: without its memory and its form."""
    return tuple([word for word in _split_name(slug) if word not in _FORMS and not re.fullmatch(r"\d+gb", word)])


def _split_name(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _compact(slug: str) -> str:
    return slug.replace("-", "")


def _possible(slug: str, slugs: Iterable[str]) -> list[str]:
    """The names that have all words of this one, or words in a row that are spelt as it (`7900xtx`), sorted."""
    slugs, compact = list(slugs), _compact(slug)
    return _find_longer_names(slug, slugs) or sorted(name for name in slugs if _has_run(name.split("-"), compact))


def _has_run(parts: Sequence[str], compact: str) -> bool:
    """Whether some words in a row make up a text."""
    places = range(len(parts))
    return any("".join(parts[start : end + 1]) == compact for start in places for end in places[start:])


def _find_longer_names(slug: str, slugs: Iterable[str]) -> list[str]:
    """The names that have all words of this one, sorted."""
    parts = set(slug.split("-"))
    return sorted(name for name in slugs if parts <= set(name.split("-")))


def near(slug: str, slugs: Iterable[str], file: str | os.PathLike[str] | None = None) -> str:
    """A hint for an unknown name: the names that have all of its parts, else similar ones, and where to find all.

    All of them are too many for a hint.
    """
    slugs = sorted(slugs)
    close = _find_longer_names(slug, slugs)[:NEAR] or difflib.get_close_matches(slug, slugs, n=NEAR, cutoff=0.6)
    catalog = "'staticmem gpus'" if file is None else f"'staticmem gpus --gpus-file {file}'"
    if not close:
        return f"{catalog} lists the names."
    *others, last = [f"'{name}'" for name in close]
    return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}? {catalog} lists all names."
