"""What the driver and the caching allocator say of a process on a CUDA device."""

from __future__ import annotations

import os
from typing import Any

import torch

from staticmem.eager.trace import round_up


class Driver:
    """The first visible device through NVML, where nvidia-ml-py is installed; to be made before CUDA is used."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.before = 0
        self.readings: dict[str, Any] = {}
        used: dict[str, int] = {}
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml = pynvml
            self.readings["driver"] = _text(pynvml.nvmlSystemGetDriverVersion())
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                used[_text(pynvml.nvmlDeviceGetUUID(handle))] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except Exception as error:  # NVML has an exception for everything, and its absence is no failure of the run
            self.readings["nvml"] = f"not read: {error}"
        properties = torch.cuda.get_device_properties(0)
        self.readings["name"] = properties.name
        self.readings["total"] = int(properties.total_memory)
        uuid = f"GPU-{getattr(properties, 'uuid', '')}"
        if uuid in used:
            self.handle, self.before = self.nvml.nvmlDeviceGetHandleByUUID(uuid), used[uuid]
        elif used:
            self.readings["nvml"] = "not read: NVML does not have the device that PyTorch has"

    def process(self) -> int | None:
        """Bytes of this process; where a container hides its number, what the device has more than before."""
        if self.handle is None:
            return None
        torch.cuda.synchronize()
        for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                self.readings["meter"] = "NVML, this process"
                return int(process.usedGpuMemory)
        self.readings["meter"] = "NVML, growth of the device"
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used) - self.before

    def context(self) -> int | None:
        """The process after `torch.cuda.init()` and one kernel, without anything in the allocator."""
        torch.cuda.init()
        one = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        del one
        torch.cuda.empty_cache()
        found = self.process()
        torch.cuda.reset_peak_memory_stats()
        return found

    def facts(self) -> dict[str, Any]:
        """What a record says of the device."""
        return self.readings


def workspaces() -> dict[str, int]:
    """Workspaces of cuBLAS and, beyond them, of cublasLt, and how much of both stays after the calls: bytes.

    To be called when no tensor of the model is left.
    """
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    a, bias = torch.zeros(128, 128, device="cuda"), torch.zeros(128, device="cuda")
    before = torch.cuda.memory_allocated()
    cublas = _extra(lambda: torch.mm(a, a))
    stays = torch.cuda.memory_allocated() - before
    lt = _extra(lambda: torch.addmm(bias, a, a))  # with a bias it is cublasLt's product
    if not stays and lt == cublas:
        lt = 0  # it takes the handle's, for each call anew
    return {"cublas": cublas, "cublaslt": lt, "kept": torch.cuda.memory_allocated() - before}


def _extra(call: Any) -> int:
    """Bytes that a call allocates beside its result."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    made = round_up(int(result.untyped_storage().nbytes()))
    return int(torch.cuda.max_memory_allocated()) - int(before) - made


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
