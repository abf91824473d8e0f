"""DeepSpeed's ZeRO stages 1 and 2: every rank has all parameters; optimizer state is split, in stage 2 gradients too.

Sources, DeepSpeed 0.19, deepspeed/runtime/zero/stage_1_and_2.py: `__init__` (16-bit parameters flattened into one
buffer of a multiple of 2 x ranks elements; the fp32 master is a clone of the rank's partition, in fp32 training too),
`setup_buckets` (a buffer of `reduce_bucket_size` elements in backward, two with `overlap_comm`, whose default is off in
these stages), `copy_gradients_to_ipg`, `copy_grads_in_partition`, `step` (the partition's gradients, flattened, then in
fp32). Stage 1 without overlap reduces after backward: until then every gradient is there. Defaults are those of
zero/config.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from staticmem.ir.dtypes import DType, float32
from staticmem.parallel.facts import Weight, ceil_div
from staticmem.parallel.rewrite import AFTER, BEFORE, COMMUNICATION, END_OF_PHASE, Piece, Rewrite

ALIGNMENT = 2  # elements; nccl_start_alignment_factor


@dataclass(frozen=True)
class ZeroConfig:
    """`zero_optimization` of DeepSpeed's JSON, in elements; the defaults are DeepSpeed's."""

    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000


@dataclass(frozen=True)
class Partition:
    """One flat tensor of the optimizer: `numel` elements of this rank, of parameters in `dtype`."""

    numel: int
    dtype: DType

    @property
    def master(self) -> DType:
        """The type of the optimizer's own copy, its state and the gradients that it reads."""
        return float32 if self.dtype.itemsize < float32.itemsize else self.dtype


def apply(rewrite: Rewrite, listed: list[Weight], ranks: int, stage: int, config: ZeroConfig) -> list[str]:
    """Stage 1 or 2."""
    trained = [w for w in listed if w.trained]
    if not trained:
        return ["ZeRO: nothing is trained, so every rank has the whole model"]
    dtype = trained[0].storage.dtype
    numel = ceil_div(sum(w.numel for w in trained), ALIGNMENT * ranks) * ALIGNMENT * ranks
    part = Partition(numel // ranks, dtype)
    for weight in trained:
        rewrite.drop(weight.storage)
    rewrite.add(
        "parameters, flat", "parameter", dtype.nbytes(numel), dtype, (0, BEFORE), None, "ZeRO flat parameters",
        "all parameters in one buffer",
    )  # fmt: skip
    master(rewrite, part, "master weights")
    replace_states(rewrite, trained, [part])
    backward = rewrite.span("backward")
    assert backward is not None
    start, end = backward
    bucket = config.reduce_bucket_size
    rewrite.add(
        "reduce bucket", COMMUNICATION, dtype.nbytes(bucket), dtype, (start, BEFORE), (end, END_OF_PHASE),
        "ZeRO bucket", f"gradients on their way to the ranks (reduce_bucket_size {bucket:,})",
    )  # fmt: skip
    own = rewrite.add(
        "gradients of the partition", "gradient", dtype.nbytes(part.numel), dtype,
        (start, BEFORE) if stage == 2 else (end, END_OF_PHASE), None, "ZeRO gradients",
        "gradients of this rank's partition",
    )  # fmt: skip
    for weight in trained:
        for gradient in weight.gradients:
            if stage == 2:
                rewrite.end(gradient, (gradient.born[0], AFTER))
    update(rewrite, trained, [(part, own)])
    return [f"ZeRO-{stage}: a rank updates {part.numel:,} of {numel:,} elements; DeepSpeed's default sizes of buckets"]


def master(rewrite: Rewrite, part: Partition, name: str) -> None:
    """The optimizer's own copy of the partition."""
    rewrite.add(
        name, "optimizer_state", part.master.nbytes(part.numel), part.master, rewrite.setup, None,
        "ZeRO master weights", "the optimizer's copy of this rank's partition",
    )  # fmt: skip


def replace_states(rewrite: Rewrite, trained: list[Weight], parts: list[Partition]) -> None:
    """State of each parameter becomes state of each flat partition; the kinds are those of the first that has all."""
    kinds: dict[str, Piece] = {}
    for weight in trained:
        for piece in weight.states:
            kinds.setdefault(piece.name.rpartition(".")[2], piece)
            rewrite.drop(piece)
    shapes = {w.name: w.shape for w in trained}
    for kind, piece in kinds.items():
        whole = piece.shape == shapes.get(piece.name.rpartition(".")[0])
        for number, part in enumerate(parts):
            dtype = part.master if piece.dtype.is_floating_point else piece.dtype
            numel = part.numel if whole else 1
            rewrite.add(
                f"partition {number}.{kind}", "optimizer_state", dtype.nbytes(numel), dtype, rewrite.setup, None,
                "ZeRO optimizer state", f"optimizer state ({kind}) of this rank's partition",
            )  # fmt: skip


def update(rewrite: Rewrite, trained: list[Weight], parts: list[tuple[Partition, Piece | None]]) -> None:
    """The optimizer's step: one partition after the other; `parts` have the gradients that go when they were read.

    The lists that the implementation makes (`_foreach_sqrt`) have one tensor, the partition.
    """
    span = rewrite.span("optimizer")
    if span is None:
        return
    calls: dict[int, str] = {}
    for weight in trained:
        for gradient in weight.gradients:
            rewrite.end(gradient, (span[0], BEFORE))
        for piece in weight.temporaries:
            if piece.kernel is not None:
                calls[piece.kernel] = rewrite.trace.kernels[piece.kernel].name
            rewrite.drop(piece)
    at = (span[0], AFTER)
    for part, gradients in parts:
        flat = rewrite.add(
            "gradients, flat", "gradient", part.dtype.nbytes(part.numel), part.dtype, at, None, "aten.cat.default",
            "gradients of the partition for the optimizer",
        )  # fmt: skip
        read = flat
        if part.master is not part.dtype:
            read = rewrite.add(
                f"gradients, {part.master.name}", "gradient", part.master.nbytes(part.numel), part.master, at, None,
                "aten._to_copy.default", "gradients of the partition for the optimizer",
            )  # fmt: skip
            rewrite.end(flat, at)
        if gradients is not None:
            rewrite.end(gradients, at)
        nbytes, lists = part.master.nbytes(part.numel), []
        for name in dict.fromkeys(calls.values()):
            why = "a list of the optimizer's step"
            lists.append(rewrite.add(f"({name})", "temporary", nbytes, part.master, at, None, name, why))
        for piece in (*lists, read):
            rewrite.end(piece, at)
