"""The strategies of several GPUs: what of each is a fact, wherever it is asked.

How a strategy changes the step of a rank, and what its ranks send, is in its file of `parallel/strategies/`. Options of
ranks are here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.scenario.options import LEVERS, RANKS, option

SAMPLES, STATES, GRADIENTS, PARAMETERS = "samples", "states", "gradients", "parameters"
WEIGHT_ONLY = "weight-only"
MODEL, BLOCKS = "model", "blocks"
PYTORCH, DEEPSPEED = "pytorch", "deepspeed"


@dataclass(frozen=True)
class StrategyFacts:
    """What is known of a strategy.

    Attributes:
        title: how it is written.
        room: its module in `parallel/strategies/`.
        divides: what each rank has a share of: samples of a step, and of the model's `PARAMETERS`, their `GRADIENTS`
            and the optimizer's `STATES`. A rank that has no share of the samples runs a part of the model.
        library: who has it: PyTorch or DeepSpeed; empty for what every library writes itself.
        casts: options that mean its own mixed precision, in place of autocast or of a cast of the model.
        compiles: what torch.compile is covered for under it: the whole `MODEL`, or its `BLOCKS` alone.
        packed: packed weights that it leaves whole, or whose division is covered: `WEIGHT_ONLY`, or bits.
        accelerate: what accelerate calls it (`DistributedType` of accelerate/utils/dataclasses.py).
        experts: whether ranks may share experts beside it.
        sequences: whether ranks may share sequences beside it.
        shards_modules: whether the repeated blocks are sharded one by one, each with its parameters.
        takes_micro_batches: whether the micro-batches of `accumulate` are in flight at once.
        for_inference: whether it is a way to run a model that one device does not hold.
        worth_trying: whether a search tries it: ZeRO-1 saves little where ZeRO-2 communicates as much.
    """

    title: str
    room: str
    divides: frozenset[str]
    library: str = ""
    casts: tuple[str, ...] = ()
    compiles: str = ""
    packed: tuple[str | int, ...] = ()
    accelerate: str = ""
    experts: bool = False
    sequences: bool = False
    shards_modules: bool = False
    takes_micro_batches: bool = False
    for_inference: bool = False
    worth_trying: bool = True

    @property
    def shares_samples(self) -> bool:
        return SAMPLES in self.divides

    @property
    def runs_parts(self) -> bool:
        """Whether its ranks run parts of layers, or some of the layers."""
        return not self.shares_samples

    @property
    def divides_parameters(self) -> bool:
        return PARAMETERS in self.divides

    @property
    def keeps_whole(self) -> bool:
        """Whether every rank has all parameters, gradients and states, as on one device."""
        return self.divides == {SAMPLES}


_MODEL_STATES = frozenset({STATES, GRADIENTS, PARAMETERS})

STRATEGIES: Mapping[str, StrategyFacts] = {
    "ddp": StrategyFacts(
        "DDP", "ddp", frozenset({SAMPLES}), PYTORCH, compiles=MODEL, packed=(WEIGHT_ONLY, 8, 4), accelerate="MULTI_GPU"
    ),
    "zero1": StrategyFacts(
        "ZeRO-1",
        "zero",
        frozenset({SAMPLES, STATES}),
        DEEPSPEED,
        casts=("amp", "dtype"),
        packed=(8, 4),
        accelerate="DEEPSPEED",
        worth_trying=False,
    ),
    "zero2": StrategyFacts(
        "ZeRO-2",
        "zero",
        frozenset({SAMPLES, STATES, GRADIENTS}),
        DEEPSPEED,
        casts=("amp", "dtype"),
        packed=(8, 4),
        accelerate="DEEPSPEED",
    ),
    "zero3": StrategyFacts(
        "ZeRO-3",
        "zero",
        frozenset({SAMPLES, *_MODEL_STATES}),
        DEEPSPEED,
        casts=("amp", "dtype"),
        accelerate="DEEPSPEED",
    ),
    "fsdp": StrategyFacts(
        "FSDP2",
        "fsdp",
        frozenset({SAMPLES, *_MODEL_STATES}),
        PYTORCH,
        casts=("amp",),
        compiles=BLOCKS,
        packed=(4,),
        accelerate="FSDP",
        experts=True,
        sequences=True,
        shards_modules=True,
        for_inference=True,
    ),
    "tp": StrategyFacts("tensor parallel", "tensor", _MODEL_STATES, for_inference=True),
    "pp": StrategyFacts("pipeline parallel", "pipeline", _MODEL_STATES, takes_micro_batches=True, for_inference=True),
}
DATA_PARALLEL = tuple([name for name, facts in STRATEGIES.items() if facts.shares_samples])


def facts_of(name: str | None) -> StrategyFacts | None:
    """What is known of a strategy; None without one."""
    return STRATEGIES[name] if name is not None else None


def titles(names: tuple[str | None, ...]) -> str:
    """`DDP, FSDP2`."""
    return ", ".join([STRATEGIES[name].title for name in names if name is not None])


MOST_RANKS = 1024  # that share a sequence, or experts; a step runs as many turns
# how keys and values come from other ranks: `set_rotate_method`
ROTATES_AT_ONCE, ROTATES_IN_TURNS = "allgather", "alltoall"
ROTATE_METHODS = (ROTATES_AT_ONCE, ROTATES_IN_TURNS)


@record(frozen=True)
class ExpertShare:
    """The experts of a layer are divided over `ranks`. `worst`: all tokens that can go to those of one rank do."""

    ranks: int
    worst: bool = False


@record(frozen=True)
class ContextShare:
    """The sequence is divided over `ranks`, of which this is number `rank`, with `length` tokens of it. `rotate`, one
    of `ROTATE_METHODS`: how the others' keys and values come to it."""

    ranks: int
    rank: int = 0
    rotate: str = ROTATES_AT_ONCE
    length: int = 0


# fmt: off
@record(frozen=True, kw_only=True)
class RankOptions:
    """How several GPUs share the work."""

    parallel: str | None = option(
        None, LEVERS, "choice", "STRATEGY", "strategy of several GPUs: the report is of the one that needs the most",
        choices=("none", *STRATEGIES), example="zero3",
        needs="", details="The batch is that of one rank ([parallel](parallel.md))",
    )
    devices: int | None = option(None, LEVERS, "whole", "N", "how many GPUs share the work", example="8", needs=RANKS)
    replicas: int | None = option(
        None, LEVERS, "whole", "N", "groups that have the whole model each (hybrid sharding), with --parallel fsdp",
        example="2", needs="", details="It divides `devices` ([parallel](parallel.md#hybrid-sharding))",
    )
    offload_parameters: bool = option(
        False, LEVERS, "switch", "", "parameters, gradients and optimizer state are on the CPU, with --parallel fsdp",
        needs="", details="`CPUOffloadPolicy` ([parallel](parallel.md#on-the-cpu))",
    )
    expert_parallel: int | None = option(
        None, LEVERS, "whole", "N", "ranks that share the routed experts of each layer, with --parallel fsdp",
        example="4", needs="",
        details="It divides `devices` ([parallel](parallel.md#experts))",
    )
    context_parallel: int | None = option(
        None, LEVERS, "whole", "N", "ranks that share the sequence of each sample, alone or with --parallel fsdp",
        example="4", needs="", details="Sizes are those of the whole sequence ([parallel](parallel.md#long-sequences))",
    )
    rotate_method: str = option(
        ROTATES_AT_ONCE, LEVERS, "choice", "METHOD", "how keys and values come from other ranks that share a sequence",
        choices=ROTATE_METHODS, example=ROTATES_IN_TURNS,
        needs="", details="With `context_parallel`",
    )
    # fmt: on

    def check(self) -> None:
        """Raises:
        UsageError: a number of ranks is out of range.
        """
        ranges = (
            ("--expert-parallel", self.expert_parallel, "SM109"),
            ("--context-parallel", self.context_parallel, "SM243"),
            ("--replicas", self.replicas, "SM244"),
        )
        for flag, ranks, code in ranges:
            if ranks is not None and not 1 <= ranks <= MOST_RANKS:
                why = f"It is a number from 1 to {MOST_RANKS:,}."
                raise UsageError(f"{flag} {ranks} is out of range", why, f"Example: {flag} 4", code)
