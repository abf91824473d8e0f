"""The report of a session of the ONNX Runtime: frozen values, as `model.py` has them for a step of PyTorch.

It is a report of its own: a session executes ONNX nodes, so it has no phases, no gradients and no ATen ops. Field names
are those of the JSON (`schemas/session-1.schema.json`). Bytes are integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from staticmem.report.model import GpuFit, NoteInfo, TensorInfo

SCHEMA = "staticmem.session/1"

ARENA_CATEGORIES = ("weights", "packed_weights", "pattern_block", "tensors", "cached")
CUDA_CATEGORIES = (*ARENA_CATEGORIES, "context", "libraries")
CPU_CATEGORIES = (*ARENA_CATEGORIES, "weights_outside", "inputs")


@dataclass(frozen=True, slots=True)
class SessionModel:
    """The file, and how many nodes of it the runtime executes. `sha256` is None for a file of more than 8 MiB."""

    path: str
    format: str
    producer: str
    file_bytes: int
    sha256: str | None
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[str, ...]
    nodes: int


@dataclass(frozen=True, slots=True)
class SessionScenario:
    """What was asked, with defaults filled in. `options` has the session's options under the runtime's names; those of
    CUDA are null for the CPU. `version` is the runtime whose rules were followed."""

    runtime: str
    version: str
    provider: str
    mode: str
    batch: int | None
    resolution: tuple[int, ...] | None
    dims: Mapping[str, int]
    runs: int
    executed_graph: str
    options: Mapping[str, str | int | bool | None]


@dataclass(frozen=True, slots=True)
class SessionBand:
    """Bounds in bytes. `high` is null where nothing bounds it."""

    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class SessionPeak:
    """The meters of a session.

    `tensors_bytes` is the largest sum of buffers of intermediate values and results at the end of a node in the first
    run, at the node `at_node`; `requested_bytes` is what is asked of the arena in the last run, in which the memory
    pattern has its block, weights in the arena included; `workspace_bytes` is the most that one kernel takes for itself
    (null where that is not known: CUDA); `held_bytes` is what the arena holds after the last run and gives to nobody
    else. `device_bytes` is for CUDA: held, context and libraries; `host_bytes` for the CPU: held, weights outside the
    arena and inputs, without the code of the process. `bands` has bounds: on CUDA of `device` and `held`, on the CPU of
    `requested`, `held` and `host` where the session is not `exact`.
    `by_category` adds up to `device_bytes` or `host_bytes`.
    """

    tensors_bytes: int
    at_node: str | None
    at_op: str | None
    requested_bytes: int
    workspace_bytes: int | None
    held_bytes: int
    device_bytes: int | None
    host_bytes: int | None
    bands: Mapping[str, SessionBand]
    by_category: Mapping[str, int] = field(metadata={"keys": ARENA_CATEGORIES})


@dataclass(frozen=True, slots=True)
class SessionNode:
    """A node of the first run, with what is requested of the arena when it ends (weights not counted)."""

    name: str
    op: str
    requested_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class SessionReport:
    """A session after `SessionScenario.runs` runs of the same sizes.

    `exact` is true where nothing was assumed: the CPU provider, and known are the graph that is executed, all sizes,
    the memory of every kernel, and the number of threads where it counts.
    `device` is the card that `device_bytes` is for, `gpu` whether it has the memory, where one was named.
    """

    schema: str
    model: SessionModel
    scenario: SessionScenario
    peak: SessionPeak
    exact: bool
    top_nodes: tuple[SessionNode, ...]
    device: str | None
    gpu: GpuFit | None
    assumptions: tuple[NoteInfo, ...]
    warnings: tuple[NoteInfo, ...]
