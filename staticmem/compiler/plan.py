"""What the code that Inductor writes for a graph does to memory, call by call: the plan that the engine runs.

Storages are numbered: those of the inputs first, in the order of the graph's placeholders, then those that the code
allocates. A value that takes the memory of a dead one, in place or from the pool of the wrapper, has its number.
"""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

from staticmem.eager.strides import Form
from staticmem.eager.trace import Read
from staticmem.ir.record import record

# The kernels that Inductor is expected to make; none fused with another; nor a result that writes over what dies in it;
# the expected ones, with all that can be in the template of a product.
Kernels: TypeAlias = Literal["expected", "apart", "fresh", "templates"]
NO_TRACE = "no trace"  # the code of a note whose text is an op that is one extern call because it has no trace


@record(frozen=True, slots=True)
class PlannedBuffer:
    """A storage that the code allocates.

    Attributes:
        form: of the first value in it.
        op: index of the op in `Graph.ops` that this value is computed for; -1: none.
        what: what it is, for reports: "aten::convolution", "weight in channels last".
        recomputed: the backward computes it again, in place of saving it.
    """

    form: Form
    op: int
    what: str
    recomputed: bool = False


@record(frozen=True, slots=True)
class Step:
    """One kernel, or one call of an extern kernel: it allocates, runs, and frees.

    Attributes:
        kernel: as ATen names it for extern kernels (`aten.convolution.default`), else `triton: ` and the ops in it.
        op: index of an op in `Graph.ops`; -1: none.
        allocates: numbers of storages that it allocates, in order.
        frees: numbers of storages that have their last reader here, inputs included: the code lets go of them.
        reads: what the memory that an extern kernel takes for itself depends on.
    """

    kernel: str
    op: int
    allocates: tuple[int, ...]
    frees: tuple[int, ...]
    reads: tuple[Read, ...] = ()


@record(frozen=True, slots=True)
class Output:
    """A tensor that the code returns, in a storage. An output that is no tensor is None in its place."""

    storage: int
    form: Form


@record(frozen=True)
class Plan:
    """One compiled graph.

    Attributes:
        inputs: how many storages are inputs.
        buffers: the storages that it allocates; `buffers[k]` has the number `inputs + k`.
        steps: calls in order. Inputs that no step frees are not read, and let go of at the start.
        outputs: what it returns, which stays alive.
        notes: codes and texts of what is not decided without a card.
    """

    inputs: int
    buffers: tuple[PlannedBuffer, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output | None, ...]
    notes: tuple[tuple[str, str], ...] = ()

    @cached_property
    def unread(self) -> tuple[int, ...]:
        """The inputs that no step frees and that are not returned."""
        used = {number for step in self.steps for number in step.frees if number < self.inputs}
        used.update(output.storage for output in self.outputs if output is not None)
        return tuple([number for number in range(self.inputs) if number not in used])


class Plans(Protocol):
    """The graphs of a region, from which plans are made."""

    def plans(self, kernels: Kernels = "expected") -> tuple[Plan, Plan | None]:
        """The plans of the forward and of the backward; see `inductor.plan`."""
        ...


@record(frozen=True)
class CompiledCall:
    """A region of a graph that `torch.compile` compiles: what it reads and gives, and the plans of its two graphs.

    Attributes:
        start, end: the ops [start, end) of the graph.
        inputs: names of values, in the order of the forward's inputs: parameters, buffers, inputs.
        outputs: names of values that it returns, in the order of the forward's first outputs.
        forward: its outputs are those of `outputs`, then `saved`.
        backward: None in inference. Its inputs are `saved`, then the gradients of those of `outputs` that
            `differentiable` lists; its outputs are gradients of `inputs`, None where one needs none.
        saved: what each saved tensor is, for reports: "aten::convolution of layer1.0.conv1".
        differentiable: positions in `outputs`.
        padded: ops with a matrix product that Inductor may pad, or divide where it times kernels, each with the bytes
            that this would take while it runs.
        recomputed_bytes: of the values that the backward computes again and would read from memory else.
        graphs: what other plans of the same region are made from.
        on_ctx: how many of `saved`, the last ones, are attributes of the `ctx` of custom autograd functions.
        choices: of kernels: what was chosen, and why.
        written_inputs, unsafe_ops: why a CUDA graph of it is not recorded, or cut (`compiler.region`); only asked
            where it is to be one.
        recomputed_flops: of the products, convolutions and attentions that it computes again.
    """

    start: int
    end: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    forward: Plan
    backward: Plan | None
    saved: tuple[str, ...] = ()
    differentiable: tuple[int, ...] = ()
    recomputed_bytes: int = 0
    recomputed_flops: int = 0
    graphs: Plans | None = field(default=None, repr=False, compare=False)
    padded: tuple[tuple[int, int], ...] = ()
    written_inputs: tuple[str, ...] = ()
    unsafe_ops: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    on_ctx: int = 0
    choices: tuple[tuple[str, str], ...] = ()
