"""What cuBLAS gets from PyTorch 2.15 on an sm_90 device: 32 MiB for each product, taken and given back inside it
(aten/src/ATen/cuda/CublasHandlePool.cpp), and 1 MiB where a linear layer goes to cublasLt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from staticmem.allocators.process import Workspace
from staticmem.eager.trace import Trace

MIB = 2**20


class Products:
    """The workspaces of matrix products, by the names of kernels."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.single = {buffer.kernel: buffer.shape == () for buffer in trace.buffers}  # reductions over everything

    def taken(self) -> Iterator[tuple[int, Sequence[Workspace]]]:
        for kernel in range(len(self.trace.kernels)):
            yield kernel, self.workspaces(kernel)

    def workspaces(self, kernel: int) -> Sequence[Workspace]:
        name = self.trace.kernels[kernel].name
        if name.startswith("aten.addmm"):
            return (Workspace(MIB, what="cublasLt"),)
        if name.startswith("aten.mean") and self.single[kernel]:  # partial sums of the blocks, and a semaphore
            return (Workspace(2560, held=True, what="partial sums"), Workspace(4, held=True, what="semaphore"))
        return (Workspace(32 * MIB, what="cuBLAS"),) if name.startswith(("aten.mm", "aten.bmm")) else ()
