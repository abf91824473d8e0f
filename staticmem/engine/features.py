"""What a step may have beside its model and its optimizer: a class for each, in a file of its subject.

A step knows no feature by name. It calls every moment of `Feature` for those that are asked for, in the order of
FEATURES. A new one is a class and a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from staticmem.ir.record import record
from staticmem.scenario.checkpointing import Policy
from staticmem.scenario.step import HELD, ON_GPU, Scenario

if TYPE_CHECKING:
    from staticmem.compiler.plan import Kernels
    from staticmem.eager.context import Eager
    from staticmem.eager.tensor import Owner, Tensor
    from staticmem.engine.interpreter import Interpreter
    from staticmem.engine.kept_history import KeptHistories
    from staticmem.engine.optimizers import Optimizer, OptimizersOfGroups
    from staticmem.ir.graph import Graph, Note, Region, Value


class LossOfStep(Protocol):
    """The feature that is the loss of a training step."""

    values: Sequence[str]  # names of the outputs that it is of
    name: str
    is_output: bool  # it is one of the outputs
    ops_after_model: int  # how many ops at the graph's end are of the training loop
    targets: dict[str, Tensor]

    def compute(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """What backward starts from: the loss, or all outputs."""


class RunningStep(Protocol):
    """The parts of `step.StepRun` that features read, and those that they set."""

    graph: Graph
    scenario: Scenario
    training: bool
    kernels: Kernels
    e: Eager
    interpreter: Interpreter
    criterion: LossOfStep
    has_own_loss: bool  # the recording has the loss of the code
    loss: Owner  # variables of the loop
    outputs: Owner
    deletes_batch: bool  # the loop does, once it has the loss
    keeps_loss: bool  # when backward is over
    in_function: bool
    grads: dict[int, Tensor]
    with_gradient: Sequence[Tensor]
    histories: KeptHistories
    notes: list[Note]
    checkpoints: tuple[Region, ...]
    recomputed: tuple[int, ...]
    moved: int  # bytes that one micro-batch moves between the GPU and the CPU
    overwritten: int
    compiled: Any
    compiled_policies: Collection[Policy]

    def place(self, value: Value, category: str, name: str, cast: bool = True) -> Tensor: ...
    def kept_of_ctx(self) -> dict[str, str]: ...
    def owners_of_graph(self) -> tuple[Owner, ...]: ...


class Feature:
    """The moments of a step, at which most features do nothing."""

    def __init__(self, step: RunningStep) -> None:
        self.step = step
        self.e = step.e

    def place(self) -> None:
        """The model is on the device, and the optimizer's state: places what the step before has left."""

    def begin_forward(self) -> None:
        """The model is about to be called."""

    def end_forward(self, outputs: list[Tensor]) -> list[Tensor]:
        """The model returns `outputs`; gives those that its caller has."""
        return outputs

    def begin_backward(self) -> None:
        """The loss is there."""

    def scale(self, losses: Sequence[Tensor]) -> Sequence[Tensor]:
        """What backward starts from in place of the losses."""
        return losses

    def end_backward(self) -> None:
        """`backward()` has returned."""

    def end_step(self) -> None:
        """All micro-batches have run, and an inference has returned."""

    def begin_update(self, optimizer: Optimizer | OptimizersOfGroups | None) -> None:
        """The training loop after backward: the optimizer's step is next."""

    def end_update(self) -> None:
        """The optimizer's step is done."""

    def notes(self) -> Sequence[Note]:
        """What a report says of it."""
        return ()


@record(frozen=True)
class Row:
    """What makes a feature, the class or function `name` in the file `module` here, and which steps have it."""

    module: str
    name: str
    applies: Callable[[RunningStep], object]
    infers: bool = False  # inferences have it too


def _holds_outputs(step: RunningStep) -> bool:
    return step.scenario.outputs == HELD and step.graph.generated is None  # generate() returns numbers of tokens


FEATURES = (  # in the order in which they act at one moment
    Row("grad_scaler", "GradScaler", attrgetter("scenario.grad_scaler")),
    Row("old_gradients", "OldGradients", attrgetter("scenario.gradients_at_start")),
    Row("old_gradients", "InputGradients", attrgetter("scenario.input_grad")),
    Row("losses", "make_criterion", attrgetter("training")),
    Row("compiled_step", "CompiledCode", attrgetter("scenario.compile"), infers=True),
    Row("checkpointing", "CheckpointedCode", lambda step: step.checkpoints or step.scenario.checkpoint_save),
    Row("held_outputs", "Float32Outputs", lambda step: step.scenario.float32_outputs and step.scenario.amp),
    Row("offloading", "OffloadedActivations", lambda step: step.scenario.offload_activations != ON_GPU),
    Row("held_outputs", "HeldOutputs", _holds_outputs, infers=True),
    Row("held_outputs", "PreviousLoss", attrgetter("keeps_loss")),
    Row("dropped_batch", "DroppedBatch", attrgetter("deletes_batch")),
    Row("grad_scaler", "ClippedGradients", attrgetter("scenario.clip_grad_norm")),
)


def features_of(step: RunningStep) -> list[Feature]:
    """The features that a step has. The file of a feature is read when a step has it."""
    features: list[Feature] = []
    for row in FEATURES:
        if (step.training or row.infers) and row.applies(step):
            make_feature = getattr(import_module(f"staticmem.engine.{row.module}"), row.name)
            features.append(make_feature(step))
    return features
