"""What the driver says of memory through NVML, where nvidia-ml-py is installed; for the processes that run models."""

from __future__ import annotations

import os
from typing import Any


class Nvml:
    """The devices of this machine; to be made before CUDA is used.

    Attributes:
        facts: what a record says of the device: `driver`, `name`, `total`; `nvml` has why there is nothing to read.
        before: bytes that the chosen device had in use when this was made.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.before = 0
        self._device: Any = None
        self._devices: dict[str, tuple[Any, int]] = {}  # by UUID: the handle, and bytes in use
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self.facts["driver"] = _text(pynvml.nvmlSystemGetDriverVersion())
            for index in range(pynvml.nvmlDeviceGetCount()):
                device = pynvml.nvmlDeviceGetHandleByIndex(index)
                used = int(pynvml.nvmlDeviceGetMemoryInfo(device).used)
                self._devices[_text(pynvml.nvmlDeviceGetUUID(device))] = device, used
        except Exception as error:  # NVML has an exception for everything, and its absence is no failure of the run
            self.facts["nvml"] = f"not read: {error}"

    def choose(self, uuid: str | None = None) -> None:
        """Chooses a device; the first without a name."""
        if not self._devices:
            return
        if uuid is None:
            self._device, self.before = next(iter(self._devices.values()))
            self.facts["name"] = _text(self._nvml.nvmlDeviceGetName(self._device))
        elif uuid in self._devices:
            self._device, self.before = self._devices[uuid]
        else:
            self.facts["nvml"] = "not read: NVML does not have the device that PyTorch has"

    def memory(self) -> tuple[int, int | None] | None:
        """Bytes in use on the device, and those of this process, None where a container hides its number.

        None without a device.
        """
        if self._device is None:
            return None
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._device)
        self.facts.setdefault("total", int(info.total))
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(info.used), int(process.usedGpuMemory)
        return int(info.used), None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
