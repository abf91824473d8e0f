"""Runs of compiled code as CUDA graphs (`mode="reduce-overhead"`): what they read is copied to places of their own, and
all that they allocate is in a pool of their own.

Parameters and buffers stay where they are, and so does what another CUDA graph has made. Every other input is copied
before the graph runs, into memory of the pool that the code frees as it frees its inputs. The caller's tensor goes when
it is copied, where nobody else holds it.

Source: torch/_inductor/cudagraph_trees.py of PyTorch 2.15 (`CUDAGraphNode.__init__`: `static_input_idxs`,
`cudagraph_managed_idxs`; `_allocate_and_copy_recording_inputs`; `_copy_inputs_and_remove_from_src`),
torch/_inductor/compile_fx.py (`static_input`, `get_static_input_idxs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Tensor
from staticmem.eager.trace import CudaGraph

End = Callable[[], object]  # ends a hold
COPY = "aten.empty_strided.default"  # `static_input`; `_foreach_copy_` follows
STATIC = ("parameter", "buffer")  # categories of what has one place in all steps


class Capture:
    """One run of compiled code as a CUDA graph.

    Attributes:
        inputs: what the code reads.
        ends: what lets go of each of them; None where the caller keeps it.
    """

    def __init__(
        self, e: Eager, inputs: Sequence[Tensor], ends: Sequence[End | None], names: Sequence[str], kind: Reason
    ) -> None:
        """`names` are of the inputs, for reports, and `kind` is that of the holds on copies."""
        self.e, self.start = e, len(e.trace.kernels)
        self.inputs, self.ends = list(inputs), list(ends) or [None] * len(inputs)
        self.copied: dict[int, int] = {}  # copy -> what it is of, as buffers
        places = [at for at, tensor in enumerate(inputs) if not is_static(e, tensor)]
        for at in places:
            tensor = inputs[at]
            copy = e.empty(tensor.shape, tensor.dtype, tensor.strides, COPY)
            e.trace.buffers.names[copy.storage.id] = f"{names[at] or 'input'}, copied for the CUDA graph"
            self.copied[copy.storage.id] = tensor.storage.id
            self.inputs[at] = copy
        given_up = [self.ends[at] for at in places]
        for at in places:
            copy = self.inputs[at]
            hold = e.take(copy, kind, "input of the CUDA graph")
            self.ends[at] = partial(self._end, at, copy, hold)
        for end in given_up:
            if end is not None:
                end()
        self.body = len(e.trace.kernels)

    def _end(self, at: int, copy: Tensor, hold: int) -> None:
        self.ends[at] = None
        self.e.end(copy, hold)

    def leave(self) -> None:
        """The code has returned. Copies that it returns live on as long as somebody holds them."""
        trace = self.e.trace
        for at, tensor in enumerate(self.inputs):
            end = self.ends[at]
            if end is not None and tensor.storage.id in self.copied:
                end()
        trace.cuda_graphs.append(CudaGraph(self.start, self.body, len(trace.kernels), self.copied))


def is_static(e: Eager, tensor: Tensor) -> bool:
    """Whether a CUDA graph reads a tensor where it is."""
    buffers, id = e.trace.buffers, tensor.storage.id
    return buffers.categories[id] in STATIC or e.trace.in_cuda_graph(buffers.kernels[id])
