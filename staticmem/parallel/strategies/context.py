"""Context parallelism (`torch.distributed.tensor.experimental.context_parallel`): the sequence over ranks.

Every activation is that of a part of the sequence; what attention does is `ops.ring_attention`. `context_parallel`
changes inputs and targets in place, and a storage that is resized keeps its size: they stay as long as the whole
sequence. Its frame holds the parts that it copied from, and the last copy, until the region ends with the backward.
The trainer of transformers 5.24 (`_prepare_context_parallel_inputs`, by Accelerate 1.15's `maybe_context_parallel`) and
torchtitan 0.2.1 (`create_context_parallel_ctx`) call it so, with inputs and labels in `no_restore_buffers`.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py of PyTorch 2.13 (`context_parallel`,
`_context_parallel_buffers`), _load_balancer.py (`_HeadTailLoadBalancer`: two chunks a rank),
torch/distributed/tensor/placement_types.py (`Shard._split_tensor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from staticmem.errors import DimensionError, UsageError
from staticmem.ir.model_file import Binding, ModelFile, describe_inputs
from staticmem.ops.experts import ALL_TO_ALL
from staticmem.ops.ring_attention import GATHER, ROWS
from staticmem.parallel.rewrite import BEFORE, COMMUNICATION, END_OF_PHASE, Rewrite
from staticmem.scenario.request import Request
from staticmem.scenario.strategies import ContextShare

CHUNKS = 2  # of each rank: one from the head of the sequence, one from its tail


def parts(request: Request, model: ModelFile, binding: Binding) -> list[Request]:
    """The requests of ranks, one of which needs the most memory, with the sizes of their parts of the sequence.

    The first rank has half of its queries with all keys of the others, the last one all queries with half of their
    keys; those between take turns of both kinds, the second kind first, and need the same (measured of 4 and 8 ranks).

    Raises:
        UsageError: no dimension of the inputs is a sequence that is open.
        DimensionError: the ranks cannot share a sequence of this length.
    """
    ranks = request.context_parallel or 1
    names, size = _sequence(model, binding, ranks)
    if size % (CHUNKS * ranks):
        raise DimensionError(
            f"a sequence of {size:,} tokens cannot be divided over {ranks} ranks",
            f"PyTorch's load balancing gives each rank {CHUNKS} parts of one length, and raises an error otherwise.",
            f"Choose a multiple of {CHUNKS * ranks}.",
            code="SM243",
        )
    length = size // ranks
    axes = {f"{spec.name}[1]" for spec in model.inputs if len(spec.shape or ()) > 1 and (spec.shape or ())[1] in names}
    given = {name: size for name, size in (request.dims or {}).items() if name not in axes}
    dims = {**given, **dict.fromkeys(names, length)}
    one = replace(request, dims=dims, context_parallel=None, rotate_method=Request.rotate_method)
    shares = [ContextShare(ranks, rank, request.rotate_method, length) for rank in dict.fromkeys((0, 1, ranks - 1))]
    return [replace(one, context=share) for share in shares]


def unit_of_lengths(request: Request) -> int:
    """Lengths that are tried are multiples of it: PyTorch merges results of all kernels at these."""
    ranks = request.context_parallel or 1
    return CHUNKS * ranks * ROWS if ranks > 1 else 1


def _sequence(model: ModelFile, binding: Binding, ranks: int) -> tuple[list[str], int]:
    """The open dimensions behind the batch that are the sequence, and its length."""
    batches = {spec.shape[0] for spec in model.inputs if spec.shape}
    second = [spec.shape[1] for spec in model.inputs if spec.shape and len(spec.shape) > 1]
    names = [name for name in dict.fromkeys(second) if isinstance(name, str) and name not in batches]
    if not names:
        raise UsageError(
            f"--context-parallel {ranks} does not apply to this model",
            f"It divides the sequence, which is the second dimension of an input, and none is open: "
            f"{describe_inputs(model)}.",
            "Export the model with its sequence open.",
            code="SM243",
        )
    size = binding.symbols[names[0]]
    return [name for name in names if binding.symbols[name] == size], size


def apply(rewrite: Rewrite, share: ContextShare) -> None:
    """Inputs and targets, and what the collectives fill."""
    for piece in rewrite.pieces:
        if piece.kernel is not None and rewrite.trace.kernels[piece.kernel].name in (ALL_TO_ALL, GATHER):
            piece.category = COMMUNICATION
    given = [p for p in rewrite.pieces if p.category == "input" and p.kernel is not None and p.born[0] < rewrite.first]
    divided = [p for p in given if len(p.shape) > 1 and p.shape[1] == share.length]
    call, holder = "context_parallel", "the parts of inputs and targets in context_parallel"
    for start, end in _regions([*rewrite.trace.phases, ("", rewrite.trace.ticks)]):
        life = (start, BEFORE), (end, END_OF_PHASE)
        for p in [*divided, *divided[-1:]]:
            rewrite.add(f"part of {p.name}", p.nbytes, p.dtype, life[0], call, holder, died=life[1], category="input")
    for piece in divided:
        piece.nbytes *= share.ranks


def _regions(starts: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """From the beginning of each forward to the end of its backward, or of the forward alone."""
    regions: list[tuple[int, int]] = []
    for (name, tick), (_, end) in pairwise(starts):
        if name == "forward":
            regions.append((tick, end))
        elif name == "backward" and regions:
            regions[-1] = (regions[-1][0], end)
    return regions
