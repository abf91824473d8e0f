"""What is told of a serving engine: frozen values, as `report.model` has them for a step of PyTorch. Field names are
those of the JSON (`schemas/serve-1.schema.json`). Bytes are integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from staticmem.report.model import Band, NoteInfo

SCHEMA = "staticmem.serve/1"
PARTS = ("weights", "activation", "non_torch", "cuda_graph", "at_start", "kv_cache")


@dataclass(frozen=True, slots=True)
class ServeModel:
    """The config: its path, the kind of model, its element type, and how its weights are packed ("" where they are
    not)."""

    path: str
    kind: str
    dtype: str
    packing: str
    layers: int


@dataclass(frozen=True, slots=True)
class ServeScenario:
    """What was asked, with the engine's defaults filled in. `rules` is the version whose files were read."""

    engine: str
    version: str
    rules: str
    gpu: str
    tensor_parallel: int
    pipeline_parallel: int
    utilization: float
    max_len: int
    max_seqs: int
    max_batched_tokens: int
    kv_dtype: str
    load_as: str
    enforce_eager: bool
    lengths: str


@dataclass(frozen=True, slots=True)
class Serve:
    """The parts of one rank: of a pipeline of the stage that holds the fewest blocks, `rank`.

    `requested_bytes` is the engine's share of the card; `weights_bytes`, `activation_bytes` (what its profile run adds
    at its peak) and `non_torch_bytes` (modules of kernels, and buffers of NCCL) come off it, and `kv_cache_bytes` is
    left. Beside that share stand `cuda_graph_bytes`, and `at_start_bytes` that the driver and NCCL hold before the
    engine looks at the card. `kv_cache_tokens` are blocks times their tokens, and
    `max_concurrency` how many requests of the greatest length those hold, as the engine reports both.
    `at_once` is how many requests of `lengths` fit on average, `at_once_95` in 95 of 100 draws; null without them.
    `peak_at` says where the profile run has its peak. `starts` is false where the engine ends with an error: `message`
    has it in short, `missing_bytes` what it lacks (0 where it refuses what it is asked), `change` the smallest change
    with which it starts ("" where none was found). `certain` is true where both ends of the bands say the same. `bands`
    has bounds in bytes, and of `kv_cache_tokens` in tokens.
    """

    rank: int
    requested_bytes: int
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    cuda_graph_bytes: int
    at_start_bytes: int
    kv_cache_bytes: int
    kv_cache_blocks: int
    kv_cache_tokens: int
    block_bytes: int
    max_concurrency: float
    at_once: float | None
    at_once_95: int | None
    peak_at: str
    starts: bool
    certain: bool
    message: str
    missing_bytes: int
    change: str
    largest_max_len: int
    largest_max_seqs: int
    bands: Mapping[str, Band] = field(metadata={"keys": (*PARTS, "kv_cache_tokens")})


@dataclass(frozen=True, slots=True)
class ServeStage:
    """A stage of a pipeline: its layers, and the parts of its rank."""

    rank: int
    layers: int
    weights_bytes: int
    activation_bytes: int
    kv_cache_bytes: int
    kv_cache_blocks: int


@dataclass(frozen=True, slots=True)
class ServeReport:
    """An engine that has started with a model on cards of one kind."""

    schema: str
    model: ServeModel
    scenario: ServeScenario
    serve: Serve
    stages: tuple[ServeStage, ...]
    sources: Mapping[str, str]
    assumptions: tuple[NoteInfo, ...]
    warnings: tuple[NoteInfo, ...]

    def to_json(self) -> str:
        """The report as JSON text, indented."""
        from staticmem.report import json

        return json.dumps(self)
