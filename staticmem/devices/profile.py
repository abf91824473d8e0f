"""Device memory of a process beside its tensors: context, libraries, CUDA modules and cuBLAS workspaces, from a
profile, and a communicator of NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from staticmem.devices.documents import CODE, integer, keys_of, read_yaml, table, text
from staticmem.devices.gpus import THREADS, Gpu
from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.units import KIB, MIB, NOTHING, Band
from staticmem.version import REFERENCE_TORCH, cuda_of_build, torch_release

DEFAULT = Path(__file__).parent / "profiles" / "pytorch.yaml"
DEFAULT_TORCH = REFERENCE_TORCH.rpartition(".")[0]


# By the number of communicators of NCCL, what they take on each device: buffers of channels, beside PyTorch's own.
# It depends on the links, the number of channels and of peers, and on the version; nothing here was measured. Each
# group that a rank talks in has one: that of its data, and that of replicas, of experts, or of a sequence beside it.
#
# low: 484 MiB of a process with a communicator on an RTX 3090 over PCIe (github.com/NVIDIA/nccl/pull/2366), less the
#   256 MiB of its context (profiles/pytorch.yaml).
# expected: 688 MB a communicator of three or four A100 over NVLink, 544 MB of two (github.com/NVIDIA/nccl/issues/964).
# high: "about 1.6GB" with one communicator (github.com/NVIDIA/nccl/issues/864).
_ONE = Band(228 * MIB, 688 * MIB, 1638 * MIB)
_TWO = _ONE.plus(_ONE)
NCCL = NOTHING, _ONE, _TWO, _TWO.plus(_ONE), _TWO.plus(_TWO)


# CUDA modules. With lazy loading a kernel is loaded when it is first used. With eager loading the context loads every
# kernel that libtorch_cuda and the libraries it is linked with have for the architecture, before the first tensor.
LAZY, EAGER = "lazy", "eager"  # CUDA_MODULE_LOADING


@record(frozen=True)
class EagerModules:
    """Bytes of all kernels in builds of torch from version `since` on, one reading a card."""

    since: tuple[int, int]
    readings: tuple[int, ...]

    @property
    def band(self) -> Band:
        """The least, the median and the most of the readings: neither card nor build of torch is known."""
        return Band(min(self.readings), round(median(self.readings)), max(self.readings))


@record(frozen=True)
class Modules:
    """PyTorch asks for lazy loading from version `lazy_since` on; `eager` is in the order of versions."""

    lazy_since: tuple[int, int]
    eager: tuple[EagerModules, ...]
    sources: tuple[tuple[str, str], ...]

    def loading(self, torch: tuple[int, int]) -> str:
        """The default of a version of torch, with a driver that has lazy loading (R515 and later)."""
        return LAZY if torch >= self.lazy_since else EAGER

    def band(self, torch: tuple[int, int], loading: str | None = None) -> Band:
        """Bytes of the modules that are there before the first tensor; nothing where they are loaded lazily."""
        if (loading or self.loading(torch)) == LAZY or not self.eager:
            return NOTHING
        fitting = [entry for entry in self.eager if entry.since <= torch]
        return (fitting[-1] if fitting else self.eager[0]).band


UNKNOWN = Modules((1, 13), (), ())  # a profile that says nothing of them


@record(frozen=True)
class Cublas:
    """cuBLAS workspaces of one range of torch versions. Bytes; kept: for the life of the handle, else for a call."""

    since: tuple[int, int]
    nbytes: int
    by_architecture: tuple[tuple[str, int], ...]
    lt_nbytes: int
    kept: bool
    lt_kept: bool
    source: str

    def workspace(self, architecture: str) -> int:
        return dict(self.by_architecture).get(architecture, self.nbytes)


@record(frozen=True)
class Profile:
    """A checked profile. `readings` are contexts that were read on a card, in bytes."""

    name: str
    fixed: int
    per_thread: float  # bytes
    low: float
    high: float
    readings: tuple[tuple[str, int], ...]
    libraries: Band
    cublas_versions: tuple[Cublas, ...]
    cudnn_versions: tuple[tuple[tuple[int, int], str], ...]
    sources: tuple[tuple[str, str], ...]
    assumed: tuple[str, ...]
    modules: Modules = UNKNOWN

    def context(self, gpu: Gpu) -> Band:
        """The bare CUDA context: as read on this card, else by its resident threads."""
        read = dict(self.readings).get(gpu.slug)
        if read is not None:
            return Band(read, read, read)
        threads = gpu.resident_threads
        fewest, most = gpu.threads or (threads, threads)
        low, high = self.fixed + round(self.per_thread * fewest), self.fixed + round(self.per_thread * most)
        return Band(int(low * self.low), self.fixed + round(self.per_thread * threads), int(high * self.high))

    def overhead(self, gpu: Gpu) -> Band:
        """All that nvidia-smi shows for the process before the first tensor and beside the allocator."""
        return self.context(gpu).plus(self.libraries)

    def loaded(self, torch: str, loading: str | None = None) -> Profile:
        """The profile whose libraries have the modules that eager loading adds; `loading` None: as torch does it."""
        modules = self.modules.band(torch_release(torch), loading)
        return self if modules == NOTHING else replace(self, libraries=self.libraries.plus(modules))

    def cublas(self, torch: str = DEFAULT_TORCH) -> Cublas:
        """The workspaces of a torch version; versions before the first entry count as the first."""
        wanted = torch_release(torch)
        fitting = [entry for entry in self.cublas_versions if entry.since <= wanted]
        return fitting[-1] if fitting else self.cublas_versions[0]

    def cudnn(self, torch: str = DEFAULT_TORCH) -> str:
        """The cuDNN that a torch release brings, e.g. `9.10.2`."""
        wanted = torch_release(torch)
        build = cuda_of_build(torch)
        if build is not None and (11, 0) <= build < _CUDA_11_ON_PYPI:
            builds = [cudnn for cuda, since, cudnn in _CUDNN_OF_CUDA_11 if cuda <= build and since <= wanted]
            if builds:
                return builds[-1]
        fitting = [cudnn for since, cudnn in self.cudnn_versions if since <= wanted]
        return fitting[-1] if fitting else self.cudnn_versions[0][1]


# cuDNN in the wheels for CUDA 11.0 to 11.6 of releases before 2.0: from which CUDA and which release on.
# 8.0.5: https://github.com/pytorch/pytorch/issues/47669 (1.7.0 had 8.0.3). 8.2.0 for CUDA 11.3:
# https://github.com/pytorch/builder/pull/724. 8.3.2 for it: https://github.com/pytorch/builder/pull/1000, which came
# behind the release of 1.11. 8.5.0 came with CUDA 11.7 (https://github.com/pytorch/builder/issues/1133).
_CUDNN_OF_CUDA_11 = (((11, 0), (1, 7), "8.0.5"), ((11, 3), (1, 10), "8.2.0"), ((11, 3), (1, 12), "8.3.2"))
_CUDA_11_ON_PYPI = (11, 7)


@lru_cache(maxsize=4)
def load(path: Path | None = None) -> Profile:
    """The profile of a file, else the one in the package."""
    path = path or DEFAULT
    document = read_yaml(path)
    keys_of(document, path, "version name context libraries cublas cudnn".split(), ("checked", "modules"))
    context = table(document["context"], path, "context")
    keys_of(context, path, ("fixed_mib", "kib_per_thread", "low", "high", "source"), ("readings",), "context")
    readings, sources = [], [("context", text(context["source"], path, "context.source"))]
    for slug, data in table(context.get("readings") or {}, path, "context.readings").items():
        where = f"context.readings.{slug}"
        keys_of(table(data, path, where), path, required=("mib", "source"), where=where)
        readings.append((str(slug), integer(data["mib"], path, f"{where}.mib") * MIB))
        sources.append((where, text(data["source"], path, f"{where}.source")))
    low, high = _number(context["low"], path, "context.low"), _number(context["high"], path, "context.high")
    if not low <= 1 <= high:
        raise UsageError(f"{path}: context.low is {low}, context.high is {high}", "They enclose 1.", code=CODE)
    libraries, library_source, assumed = _libraries(table(document["libraries"], path, "libraries"), path)
    modules = _modules(table(document["modules"], path, "modules"), path) if "modules" in document else UNKNOWN
    return Profile(
        text(document["name"], path, "name"), integer(context["fixed_mib"], path, "context.fixed_mib", 0) * MIB,
        _number(context["kib_per_thread"], path, "context.kib_per_thread") * KIB, low, high, tuple(readings),
        libraries, _cublas(document["cublas"], path), _cudnn(document["cudnn"], path),
        (*sources, ("libraries", library_source), *modules.sources), assumed, modules,
    )  # fmt: skip


def _libraries(data: dict[str, Any], path: Path) -> tuple[Band, str, tuple[str, ...]]:
    names = ("low_mib", "expected_mib", "high_mib")
    keys_of(data, path, required=(*names, "source"), optional=("assumed",), where="libraries")
    low, expected, high = (integer(data[n], path, f"libraries.{n}", 0) * MIB for n in names)
    if not low <= expected <= high:
        raise UsageError(f"{path}: libraries: {low // MIB}, {expected // MIB}, {high // MIB}", "They rise.", code=CODE)
    return (
        Band(low, expected, high),
        text(data["source"], path, "libraries.source"),
        ("libraries",) * bool(data.get("assumed")),
    )


def _modules(data: dict[str, Any], path: Path) -> Modules:
    keys_of(data, path, required=("lazy_since", "eager"), where="modules")
    lazy_since = torch_release(text(data["lazy_since"], path, "modules.lazy_since"))
    eager: list[EagerModules] = []
    sources: list[tuple[str, str]] = []
    for i, entry in enumerate(_entries(data["eager"], path, "modules.eager")):
        where = f"modules.eager[{i}]"
        eager.append(_eager_modules(entry, torch_release(entry["torch"]), path, where))
        sources += _list_sources(entry, path, where)
    return Modules(lazy_since, tuple(eager), tuple(sources))


def _eager_modules(entry: dict[str, Any], since: tuple[int, int], path: Path, where: str) -> EagerModules:
    """One range of versions: each reading is a process with a tensor, less the tensor, less the bare context."""
    keys_of(entry, path, required=("torch", "readings"), where=where)
    sizes = []
    for name, data in table(entry["readings"], path, f"{where}.readings").items():
        place = f"{where}.readings.{name}"
        reading = table(data, path, place)
        keys_of(reading, path, required=("mib", "context_mib", "torch", "source"), where=place)
        context = integer(reading["context_mib"], path, f"{place}.context_mib")
        sizes.append((integer(reading["mib"], path, f"{place}.mib", context + 1) - context) * MIB)
    if not sizes:
        raise UsageError(f"{path}: {where}.readings is empty", "At least one reading is needed.", code=CODE)
    return EagerModules(since, tuple(sizes))


def _list_sources(entry: dict[str, Any], path: Path, where: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"{where}.readings.{name}", text(data["source"], path, f"{where}.readings.{name}.source"))
        for name, data in entry["readings"].items()
    )


def _number(value: Any, path: Path, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UsageError(f"{path}: {where} is {value!r:.40}", "A number above zero is needed.", code=CODE)
    return float(value)


def _entries(value: Any, path: Path, where: str) -> Sequence[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{path}: {where} is not a list", "An entry for each range of versions.", code=CODE)
    entries = [table(entry, path, f"{where}[{i}]") for i, entry in enumerate(value)]
    since = [torch_release(text(entry.get("torch"), path, f"{where}.torch")) for entry in entries]
    if since != sorted(since):
        raise UsageError(f"{path}: {where} is not in the order of versions", "The oldest comes first.", code=CODE)
    return entries


def _cublas(value: Any, path: Path) -> tuple[Cublas, ...]:
    entries = []
    required = ("torch", "bytes", "lt_bytes", "kept", "lt_kept", "source")
    for i, entry in enumerate(_entries(value, path, "cublas")):
        where = f"cublas[{i}]"
        keys_of(entry, path, required=required, optional=("by_architecture",), where=where)
        by_architecture = table(entry.get("by_architecture") or {}, path, f"{where}.by_architecture")
        keys_of(by_architecture, path, required=(), optional=tuple(THREADS), where=f"{where}.by_architecture")
        for flag in ("kept", "lt_kept"):
            if not isinstance(entry[flag], bool):
                raise UsageError(f"{path}: {where}.{flag} is {entry[flag]!r:.40}", "true or false.", code=CODE)
        entries.append(
            Cublas(
                torch_release(entry["torch"]), integer(entry["bytes"], path, f"{where}.bytes", 0),
                tuple((a, integer(n, path, f"{where}.by_architecture.{a}", 0)) for a, n in by_architecture.items()),
                integer(entry["lt_bytes"], path, f"{where}.lt_bytes", 0), entry["kept"], entry["lt_kept"],
                text(entry["source"], path, f"{where}.source"),
            )
        )  # fmt: skip
    return tuple(entries)


def _cudnn(value: Any, path: Path) -> tuple[tuple[tuple[int, int], str], ...]:
    entries = []
    for i, entry in enumerate(_entries(value, path, "cudnn")):
        keys_of(entry, path, required=("torch", "cudnn"), where=f"cudnn[{i}]")
        entries.append((torch_release(entry["torch"]), text(entry["cudnn"], path, f"cudnn[{i}].cudnn")))
    return tuple(entries)
