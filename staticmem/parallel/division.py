"""What a strategy of several GPUs does with a step: what it is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Note
from staticmem.parallel.rewrite import Rewrite, Weight
from staticmem.scenario.strategies import ContextShare


@dataclass(frozen=True)
class ZeroConfig:
    """`zero_optimization` of DeepSpeed's JSON, in elements; the defaults are DeepSpeed's."""

    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000


DEFAULTS = ZeroConfig()
MOST_DEVICES = 65536  # more is taken for a typing mistake
STREAMS = (
    "what is gathered and reduced is allocated on streams of the collectives, of which the allocator keeps pools that "
    "the step cannot use: they are in reserved memory"
)


@dataclass(frozen=True)
class Strategy:
    """One of `scenario.strategies.STRATEGIES` over `devices` ranks; without a name, the sequence alone is divided.

    `mixed` says that the step was run in 16-bit precision by the strategy's own mixed precision. DeepSpeed's bf16 or
    fp16 has master weights and optimizer state in float32. FSDP2's MixedPrecisionPolicy leaves shards and their state
    in the types that the model has: `model` is the type that it was cast to as a whole, `adapters` that of adapters
    beside its layers (None: as the file has it). `micro_batches` is for pipelines; None: as many as keep every stage
    busy. `replicas` groups of the devices have the whole model each. `expert_ranks` share the experts of each layer, of
    which the step that is split has the share of one; that of `context` has a part of the sequence. `offload`: the
    shards of FSDP2, their gradients and the optimizer are on the CPU.
    """

    name: str
    devices: int
    mixed: bool = False
    micro_batches: int | None = None
    bucket_view: bool = False
    expert_ranks: int = 1
    replicas: int = 1
    context: ContextShare | None = None
    zero: ZeroConfig = DEFAULTS
    model: DType | None = None
    adapters: DType | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise UsageError(
                f"--devices {self.devices} is out of range",
                f"It is a number of GPUs from 1 to {MOST_DEVICES:,}.",
                "Example: --parallel zero3 --devices 8",
                "SM181",
            )


@dataclass(frozen=True)
class WholeStep:
    """The step of one device, which a strategy divides: its result, its trace to be rewritten, its parameters, the
    paths of the blocks that repeat, and whether it trains."""

    result: StepResult
    strategy: Strategy
    rewrite: Rewrite
    weights: list[Weight]
    paths: tuple[str, ...]
    training: bool

    def of_rank(self, notes: Sequence[str]) -> StepResult:
        """The result of the rank, as the trace was rewritten."""
        return with_notes(replace(self.result, trace=self.rewrite.build()), notes)


@dataclass(frozen=True)
class Traffic:
    """What a step has to send and how often, of which a strategy takes its part.

    Attributes:
        devices: ranks that share the work.
        gathered: bytes of all parameters as a forward takes them.
        reduced: bytes of all gradients as they are summed.
        updated: bytes of the trained parameters as a forward takes them.
        micro_batches: forwards of a step.
        replicas: groups of the devices that have the whole model each.
    """

    devices: int
    gathered: int
    reduced: int
    updated: int
    micro_batches: int
    replicas: int = 1

    @property
    def share(self) -> float:
        """The part of all bytes that a rank sends in a ring."""
        return (self.devices - 1) / self.devices


class Division(Protocol):
    """A strategy. Each module of `parallel/strategies/` that `scenario.strategies` names has one as `DIVISION`."""

    def divide(self, step: WholeStep) -> StepResult:
        """The step as the rank that needs the most memory runs it.

        Raises:
            UsageError: the strategy does not apply to this model or this many devices; the message says why.
        """

    def sent_bytes(self, name: str, traffic: Traffic) -> float:
        """Bytes that a rank sends in a step under the strategy of this name.

        Raises:
            ValueError: what this strategy sends is not known here.
        """


def with_notes(result: StepResult, texts: Sequence[str]) -> StepResult:
    """The result with assumptions of the strategy."""
    return replace(result, notes=(*result.notes, *(Note("assumption", "SM350", text) for text in texts)))
