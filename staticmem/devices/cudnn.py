"""cuDNN's own answers without a GPU: which plan a convolution takes on a described card, and its workspace.

cuDNN 9.8 and later accept a description of a device in place of a device (`CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR`;
NVIDIA/cudnn-frontend, samples "deviceless AOT compilation"). The heuristics and the execution plan then answer for
that device. This module speaks to an installed libcudnn over ctypes; numbers of enumerators are those of
cudnn_graph.h (ABI, unchanged since 8.0 but for the device properties: 9.8). Nothing is imported or loaded until asked.

What PyTorch does is aten/src/ATen/native/cudnn/Conv_v8.cpp: heuristics in mode INSTANT, engines filtered by numerical
notes (`filterEngineConfigs`), the first plan that builds is run (`try_configs`), no limit on the workspace.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from staticmem.devices.conv import BACKWARD_DATA, BACKWARD_FILTER, FORWARD, Convolution
from staticmem.errors import StaticmemError, UsageError, did_you_mean

DEVICELESS = 90800  # cudnnGetVersion() of the first release that answers for a described device

# cudnn_graph.h: cudnnBackendAttributeType_t
_DATA_TYPE, _INT64, _DOUBLE, _CONV_MODE, _HEUR_MODE, _NOTE, _DESCRIPTOR, _CHAR = 1, 3, 5, 7, 8, 11, 15, 24
_CTYPES: dict[int, type[ctypes._SimpleCData]] = {  # type: ignore[type-arg]
    _INT64: ctypes.c_int64,
    _DOUBLE: ctypes.c_double,
    _DESCRIPTOR: ctypes.c_void_p,
}
# cudnn_graph.h: cudnnBackendDescriptorType_t
_CONVOLUTION, _ENGINE, _ENGINE_CONFIG, _HEURISTICS, _PLAN, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 5, 15, 17, 38
_OPERATION = {FORWARD: 10, BACKWARD_FILTER: 11, BACKWARD_DATA: 12}
# cudnn_graph.h: cudnnBackendAttributeName_t; x, w, y of each operation, its convolution, alpha and beta
_ROLES = {
    FORWARD: (704, 703, 705, 702, 700, 701),
    BACKWARD_DATA: (710, 709, 711, 708, 706, 707),
    BACKWARD_FILTER: (716, 715, 717, 714, 712, 713),
}
_DTYPES = {"tf32": 0, "float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}  # cudnnDataType_t
_TENSOR_CORE, _DOWN_CONVERT, _NONDETERMINISTIC = 0, 1, 4  # cudnnBackendNumericalNote_t
_INSTANT, _FALLBACK = 0, 2  # cudnnBackendHeurMode_t
_ALIGNMENT = 16  # bytes; Conv_v8.cpp getAlignment: no more is ever claimed


class CudnnError(StaticmemError):
    """libcudnn is missing, too old, or refused."""


@dataclass(frozen=True)
class Plan:
    """A plan that builds: the engine's global index and the bytes of workspace."""

    engine: int
    workspace: int


class Cudnn:
    """An installed libcudnn. `plans` answers for a card that is described, not present."""

    def __init__(self, library: Path | None = None) -> None:
        path = library or find_library()
        if path is None:
            raise CudnnError(
                "libcudnn is not installed", "Its answers were asked for.", "pip install 'staticmem[cudnn]'", "SM411"
            )
        if not path.exists():
            raise CudnnError(
                f"{path} does not exist", "STATICMEM_CUDNN_LIBRARY names it.", "Name a libcudnn.so.9.", code="SM411"
            )
        load_dependencies(path)
        try:
            self._c = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise CudnnError(f"cannot load {path}", str(error), code="SM411") from error
        self._c.cudnnGetVersion.restype = ctypes.c_size_t
        self.version = int(self._c.cudnnGetVersion())
        if self.version < DEVICELESS:
            raise CudnnError(
                f"cuDNN {self.version} cannot answer without a GPU", "Versions from 9.8 on can.", code="SM411"
            )
        self._devices: dict[str, ctypes.c_void_p] = {}

    @property
    def name(self) -> str:
        """The version as text, e.g. `9.26.0` (cudnn_version.h: major x 10000 + minor x 100 + patch)."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def plans(self, conv: Convolution, architecture: str, limit: int = 1, deterministic: bool = False) -> list[Plan]:
        """The first `limit` plans in the order in which PyTorch tries them; empty if cuDNN has none."""
        plans: list[Plan] = []
        with self._scope() as descriptors:
            graph = self._operation_graph(descriptors, conv)
            for mode in (_INSTANT, _FALLBACK):
                for config in self._configs(descriptors, graph, mode, architecture):
                    engine, notes = self._engine(descriptors, config)
                    if _excluded(notes, conv.precision, deterministic):
                        continue
                    workspace = self._workspace(descriptors, config, architecture)
                    if workspace is not None:
                        plans.append(Plan(engine, workspace))
                        if len(plans) >= limit:
                            return plans
        return plans

    # -- descriptors ---------------------------------------------------------------------------------------------

    @contextmanager
    def _scope(self) -> Iterator[list[ctypes.c_void_p]]:
        descriptors: list[ctypes.c_void_p] = []
        try:
            yield descriptors
        finally:
            for descriptor in reversed(descriptors):
                self._c.cudnnBackendDestroyDescriptor(descriptor)

    def _new(self, descriptors: list[ctypes.c_void_p], kind: int) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        self._check(self._c.cudnnBackendCreateDescriptor(kind, ctypes.byref(descriptor)))
        descriptors.append(descriptor)
        return descriptor

    def _set(self, descriptor: ctypes.c_void_p, name: int, kind: int, *values: object) -> None:
        plain = [v.value if isinstance(v, ctypes.c_void_p) else v for v in values]
        array = (_CTYPES.get(kind, ctypes.c_int) * len(plain))(*plain)
        self._check(
            self._c.cudnnBackendSetAttribute(descriptor, name, kind, ctypes.c_int64(len(plain)), ctypes.byref(array))
        )

    def _finish(self, descriptor: ctypes.c_void_p) -> ctypes.c_void_p:
        self._check(self._c.cudnnBackendFinalize(descriptor))
        return descriptor

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.create_string_buffer(2048)
            self._c.cudnnGetLastErrorString(text, ctypes.c_size_t(2048))
            raise CudnnError(
                f"cuDNN refused (status {status})", text.value.decode(errors="replace")[:300], code="SM411"
            )

    def _device(self, architecture: str) -> ctypes.c_void_p:
        """The description of a card; kept for the life of this object."""
        if architecture not in self._devices:
            kept: list[ctypes.c_void_p] = []
            text = json.dumps(describe(architecture)).encode()
            device = self._new(kept, _DEVICE)
            self._check(
                self._c.cudnnBackendSetAttribute(device, 2702, _CHAR, ctypes.c_int64(len(text)), ctypes.c_char_p(text))
            )
            self._devices[architecture] = self._finish(device)
        return self._devices[architecture]

    def _tensor(
        self, descriptors: list[ctypes.c_void_p], uid: int, sizes: Sequence[int], conv: Convolution
    ) -> ctypes.c_void_p:
        tensor = self._new(descriptors, _TENSOR)
        self._set(tensor, 901, _DATA_TYPE, _DTYPES[conv.precision])
        self._set(tensor, 902, _INT64, *sizes)
        self._set(tensor, 903, _INT64, *_strides(sizes, conv.channels_last))
        self._set(tensor, 906, _INT64, uid)
        self._set(tensor, 900, _INT64, _ALIGNMENT)
        return self._finish(tensor)

    def _operation_graph(self, descriptors: list[ctypes.c_void_p], conv: Convolution) -> ctypes.c_void_p:
        x, w, y = (self._tensor(descriptors, ord(n), s, conv) for n, s in (("x", conv.x), ("w", conv.w), ("y", conv.y)))
        convolution = self._new(descriptors, _CONVOLUTION)
        compute = 1 if conv.precision == "float64" else 0  # CUDNN_DATA_DOUBLE or CUDNN_DATA_FLOAT
        self._set(convolution, 100, _DATA_TYPE, compute)
        self._set(convolution, 101, _CONV_MODE, 1)  # CUDNN_CROSS_CORRELATION
        self._set(convolution, 106, _INT64, len(conv.stride))
        for name, values in ((102, conv.dilation), (103, conv.stride), (104, conv.padding), (105, conv.padding)):
            self._set(convolution, name, _INT64, *values)
        self._finish(convolution)
        operation = self._new(descriptors, _OPERATION[conv.direction])
        names = _ROLES[conv.direction]
        for name, value in zip(names[:4], (x, w, y, convolution), strict=True):
            self._set(operation, name, _DESCRIPTOR, value)
        self._set(operation, names[4], _DOUBLE, 1.0)
        self._set(operation, names[5], _DOUBLE, 0.0)
        self._finish(operation)
        graph = self._new(descriptors, _GRAPH)
        self._set(graph, 801, _DESCRIPTOR, operation)
        return self._finish(graph)

    # -- questions -----------------------------------------------------------------------------------------------

    def _get(self, descriptor: ctypes.c_void_p, name: int, kind: int, room: int, into: object) -> int:
        count = ctypes.c_int64()
        self._check(
            self._c.cudnnBackendGetAttribute(descriptor, name, kind, ctypes.c_int64(room), ctypes.byref(count), into)
        )
        return count.value

    def _configs(
        self, descriptors: list[ctypes.c_void_p], graph: ctypes.c_void_p, mode: int, architecture: str
    ) -> list[ctypes.c_void_p]:
        heuristics = self._new(descriptors, _HEURISTICS)
        self._set(heuristics, 201, _DESCRIPTOR, graph)
        self._set(heuristics, 200, _HEUR_MODE, mode)
        self._set(heuristics, 204, _DESCRIPTOR, self._device(architecture))
        try:
            self._finish(heuristics)
            room = self._get(heuristics, 202, _DESCRIPTOR, 0, None)
        except CudnnError:
            return []
        configs = [self._new(descriptors, _ENGINE_CONFIG) for _ in range(room)]
        array = (ctypes.c_void_p * room)(*[c.value for c in configs])
        return configs[: self._get(heuristics, 202, _DESCRIPTOR, room, ctypes.byref(array))] if room else []

    def _engine(self, descriptors: list[ctypes.c_void_p], config: ctypes.c_void_p) -> tuple[int, set[int]]:
        engine = self._new(descriptors, _ENGINE)
        slot = ctypes.c_void_p(engine.value)
        self._get(config, 300, _DESCRIPTOR, 1, ctypes.byref(slot))
        index, notes = ctypes.c_int64(), (ctypes.c_int * 16)()
        self._get(engine, 1301, _INT64, 1, ctypes.byref(index))
        count = self._get(engine, 1303, _NOTE, 16, ctypes.byref(notes))
        return index.value, set(notes[:count])

    def _workspace(self, descriptors: list[ctypes.c_void_p], config: ctypes.c_void_p, architecture: str) -> int | None:
        plan, size = self._new(descriptors, _PLAN), ctypes.c_int64()
        try:
            self._set(plan, 401, _DESCRIPTOR, config)
            self._set(plan, 407, _DESCRIPTOR, self._device(architecture))
            self._finish(plan)
            self._get(plan, 402, _INT64, 1, ctypes.byref(size))
        except CudnnError:
            return None
        return size.value


def _excluded(notes: set[int], precision: str, deterministic: bool) -> bool:
    """`filterEngineConfigs` of Conv_v8.cpp."""
    if deterministic and _NONDETERMINISTIC in notes:
        return True
    if precision in ("tf32", "float32") and _DOWN_CONVERT in notes:
        return True
    return precision == "float32" and _TENSOR_CORE in notes


def _strides(sizes: Sequence[int], channels_last: bool) -> list[int]:
    order = [1, *range(len(sizes) - 1, 1, -1), 0] if channels_last else range(len(sizes) - 1, -1, -1)
    strides, step = [0] * len(sizes), 1
    for axis in order:
        strides[axis] = step
        step *= sizes[axis]
    return strides


@lru_cache(maxsize=1)
def installed() -> Cudnn | None:
    """The installed libcudnn if it can answer without a GPU, else None."""
    try:
        return Cudnn() if find_library() is not None else None
    except CudnnError:
        return None


# -- the library -----------------------------------------------------------------------------------------------------


def find_library() -> Path | None:
    """libcudnn.so.9: `STATICMEM_CUDNN_LIBRARY`, else the one in NVIDIA's wheels, which a CUDA build of torch brings."""
    named = os.environ.get("STATICMEM_CUDNN_LIBRARY")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        path = Path(root) / "cudnn" / "lib" / "libcudnn.so.9"
        if path.exists():
            return path
    return None


def load_dependencies(library: Path) -> None:
    """cuBLAS and NVRTC of the same wheels first: libcudnn names them without a path."""
    root = library.parents[2]
    for pattern in ("libcublasLt.so.*", "libcublas.so.*", "libnvrtc.so.*"):
        for path in sorted(root.glob(f"*/lib/{pattern}")):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                break
            except OSError:
                continue


# -- cards -----------------------------------------------------------------------------------------------------------

# Descriptions of cards for cuDNN, one for each architecture: it is the compute capability that decides the answers.
#
# Fields are those of cuDNN's device-properties JSON (`cudnnBackendDevicePropDescriptor`, NVIDIA/cudnn-frontend's
# deviceless samples); their values are limits of the compute capability (CUDA C++ Programming Guide, table "Technical
# specifications per compute capability") and, for the rest, of one card of it. Changing the number of multiprocessors,
# clocks, memory or the name changed no workspace when it was tried (cuDNN 9.26).
#
# architecture: (name, multiprocessors, shared memory a block may opt in to, threads and blocks of a multiprocessor,
#                clock kHz, memory clock kHz, L2 bytes, memory bytes)
_CARDS: dict[str, tuple[str, int, int, int, int, int, int, int, int]] = {
    "sm_70": ("Tesla V100-SXM2-16GB", 80, 98304, 2048, 32, 1530000, 877000, 6 << 20, 16945709056),
    "sm_75": ("Tesla T4", 40, 65536, 1024, 16, 1590000, 5001000, 4 << 20, 15828320256),
    "sm_80": ("NVIDIA A100-SXM4-40GB", 108, 166912, 2048, 32, 1410000, 1215000, 40 << 20, 42474471424),
    "sm_86": ("NVIDIA GeForce RTX 3090", 82, 101376, 1536, 16, 1695000, 9751000, 6 << 20, 25438126080),
    "sm_89": ("NVIDIA GeForce RTX 4090", 128, 101376, 1536, 24, 2520000, 10501000, 72 << 20, 25386352640),
    "sm_90": ("NVIDIA H100 80GB HBM3", 132, 232448, 2048, 32, 1980000, 2619000, 50 << 20, 85045870592),
    "sm_100": ("NVIDIA B200", 148, 232448, 2048, 32, 1965000, 3996000, 126 << 20, 191500000000),
    "sm_120": ("NVIDIA GeForce RTX 5090", 170, 101376, 1536, 24, 2407000, 14001000, 96 << 20, 33600000000),
}

ARCHITECTURES = tuple(_CARDS)


def describe(architecture: str) -> dict[str, Any]:
    """The device properties of one card of an architecture (`sm_80`)."""
    if architecture not in _CARDS:
        raise UsageError(
            f"unknown architecture '{architecture}'", "", did_you_mean(architecture, ARCHITECTURES), code="SM400"
        )
    name, processors, optin, threads, blocks, clock, memory_clock, l2, memory = _CARDS[architecture]
    return {
        "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
        "multiProcessorCount": processors, "smCountOrigin": 0, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": optin, "oversizedSharedMemoryPerBlock": 0, "reservedSharedMemoryPerBlock": 1024,
        "maxRegistersPerSM": 65536, "maxCtasPerSM": blocks, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": threads,
        "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": clock,
        "memClockRateKHz": memory_clock, "l2CacheSize": l2, "deviceName": name, "cudaDeviceId": 0,
        "deviceVer": int(architecture.removeprefix("sm_")) * 10, "driverVer": 13020, "totalGlobalMem": memory,
    }  # fmt: skip
