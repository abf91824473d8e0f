"""Descriptions of cards for cuDNN, one for each architecture: it is the compute capability that decides the answers.

Fields are those of cuDNN's device-properties JSON (`cudnnBackendDevicePropDescriptor`, NVIDIA/cudnn-frontend's
deviceless samples); their values are limits of the compute capability (CUDA C++ Programming Guide, table "Technical
specifications per compute capability") and, for the rest, of one card of it. Changing the number of multiprocessors,
clocks, memory or the name changed no workspace when it was tried (cuDNN 9.26).
"""

from __future__ import annotations

from typing import Any

from staticmem.errors import UsageError, did_you_mean

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
