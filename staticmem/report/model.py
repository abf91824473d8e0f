"""The report: what is known of one step, as frozen values. All reporters read it and none computes.

Field names are the names in the JSON (`schemas/report-1.schema.json` is generated from these classes). Bytes are
integers; shapes are lists of sizes in elements. Within schema major 1, fields are only added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from staticmem.errors import UsageError
from staticmem.ir.record import guarded
from staticmem.report.shown import Shown

if TYPE_CHECKING:
    import networkx as nx

SCHEMA = "staticmem.report/1"

MOST_BATCH = 1 << 20  # samples: where a card takes more than a million of them, its memory is not the limit
METERS = ("live", "allocated", "reserved", "device")
CATEGORIES = ("parameter", "buffer", "gradient", "optimizer_state", "activation", "temporary", "input")
BEYOND_LIVE = ("workspace", "rounding", "cached", "context", "libraries")
SHARED_BATCHES = "batches in shared memory"  # of workers of a data loader: a part of the host's memory
DEVICE_CATEGORIES = (*CATEGORIES, *BEYOND_LIVE)


@guarded(frozen=True, slots=True)
class TensorInfo:
    """A graph input or output. `symbolic` is its shape in the file, with names for open dimensions."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    symbolic: tuple[int | str, ...] | None = None


@guarded(frozen=True, slots=True)
class ModelInfo:
    """The file: `path` as given, `ops` in the graph that PyTorch runs, `file_bytes` on disk.

    `sha256` is of the file, None for one of more than 8 MiB.
    """

    path: str
    format: str
    producer: str
    file_bytes: int
    sha256: str | None
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    ops: int


@guarded(frozen=True, slots=True)
class ScenarioInfo:
    """What was asked, with defaults filled in. `dims` are the sizes of the file's symbols.

    `compile` has the modules under torch.compile by class or path, "all" for the whole model, `compile_mode` its mode.
    """

    mode: str
    batch: int | None
    resolution: tuple[int, ...] | None
    dims: Mapping[str, int]
    optimizer: str | None
    optimizer_impl: str | None
    momentum: float
    loss: str | None
    dtype: str | None
    amp: str | None
    parallel: str | None = None
    devices: int | None = None
    compile: tuple[str, ...] = ()
    compile_optimizer: bool = False
    compile_mode: str = "default"
    expert_parallel: int | None = None
    context_parallel: int | None = None
    replicas: int | None = None


@guarded(frozen=True, slots=True)
class TensorEntry:
    """A tensor that is alive at the peak. `bytes` is rounded up to 512; `why` says who holds it."""

    name: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    category: str
    why: tuple[str, ...]


@guarded(frozen=True, slots=True)
class ModuleBytes:
    """Bytes alive at the peak that belong to a module (its own, not those of its children)."""

    module: str
    bytes: int
    by_category: Mapping[str, int]


@guarded(frozen=True, slots=True)
class Band:
    """Bounds in bytes of a number that the file does not settle; equal where it does."""

    low: int
    high: int


@guarded(frozen=True, slots=True)
class Peak:
    """The moment at which most is alive. `at_op` is the kernel that allocates then; `node` the graph's op.

    `bands` has the bounds of each meter; that of `live` is open in inference where the file has no stack traces,
    because the names that the model's code keeps are not known then. The other meters are expected bytes of three steps
    from the start of a process; `context_bytes` is the part of `device_bytes` that exists before the first tensor.
    `device_by_category` adds up to `device_bytes`: live tensors at the peak of allocated memory, and beyond them
    `workspace` (what kernels hold for themselves then), `rounding` (what blocks are larger than tensors), `cached`
    (what the allocator holds in reserve: cached blocks and fragmentation), `context` and `libraries`. All of these are
    null or empty where the graph is too large for a replay that nobody asked for (SM406).
    """

    live_bytes: int
    phase: str
    at_op: str
    node: str | None
    module: str | None
    tensors: int
    by_category: Mapping[str, int] = field(metadata={"keys": CATEGORIES})
    by_module: tuple[ModuleBytes, ...]
    bands: Mapping[str, Band]
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    context_bytes: int | None = None
    device_by_category: Mapping[str, int] = field(default_factory=dict)


@guarded(frozen=True, slots=True)
class DeviceInfo:
    """What the meters beyond `live` are for: the card, the software on it, and when reserved memory peaks.

    `assumed` is True where no card was named. `workspaces` says who was asked for workspaces of convolutions: "tables"
    or "library". `reserved_in_step` is 1 to 3 (0: before the first), of three steps from the start of the process;
    On a card that is named `retries` counts how often the allocator has to give cached memory back and try again, and
    `returned_bytes` is what goes back in all.
    """

    assumed: bool
    name: str
    architecture: str
    torch_version: str
    cudnn_version: str
    workspaces: str
    tf32: bool
    channels_last: bool
    cudnn_benchmark: bool
    alloc_conf: str | None
    reserved_in_step: int
    reserved_in_phase: str
    retries: int
    returned_bytes: int


@guarded(frozen=True, slots=True)
class GpuFit:
    """Whether a card runs the step. `fit` is "fits", "tight", "does not fit" or "cannot run it"; `why` says why it is
    tight or cannot run.

    `headroom_bytes` is what the expected need leaves of the usable memory, 0 where `missing_bytes` are short. Those are
    what a card would have to have more: `least_usable_bytes` is the usable memory of the smallest that holds the step.
    It is tight where the band reaches beyond 95 % of that memory, or the allocator has to give cached memory back
    (`DeviceInfo.retries`). `obstacle` says why the card cannot run the step, whatever its memory; `condition` on which
    condition it runs it, as a build of PyTorch. `assumed` names figures of the card that have no source.
    """

    slug: str
    name: str
    architecture: str
    usable_bytes: int
    fit: str
    headroom_bytes: int
    missing_bytes: int
    assumed: tuple[str, ...]
    why: str = ""
    obstacle: str = ""
    condition: str = ""
    least_usable_bytes: int | None = None


@guarded(frozen=True, slots=True)
class LargestBatch:
    """The largest batch of a configuration on a card.

    `batch` is the largest that does not run out of memory, 0 where even the least does;
    `device_bytes` is its need on the device, and `next_device_bytes` that of the batch behind it (None: the model
    takes none, or `batch` is 2^20, beyond which none is tried). `safe_batch` is the largest whose whole band is
    within 95 % of the usable memory. `live_batch` is what live tensors and the context alone would allow.
    """

    gpu: str
    batch: int
    device_bytes: int | None
    next_device_bytes: int | None
    safe_batch: int
    live_batch: int


@guarded(frozen=True, slots=True)
class LargestSize:
    """The largest size of an open dimension on a card; the other fields are those of `LargestBatch`.

    `dim` is its name, `next_size` the size behind `size` that was tried, of which `next_device_bytes` is the need.
    """

    gpu: str
    dim: str
    size: int
    device_bytes: int | None
    next_size: int
    next_device_bytes: int | None
    safe_size: int
    live_size: int

    @classmethod
    def of_batch(cls, largest: LargestBatch) -> LargestSize:
        """The same of a batch."""
        batch, behind = largest.batch, largest.next_device_bytes
        return cls(
            largest.gpu, "batch", batch, largest.device_bytes, batch + 1, behind, largest.safe_batch, largest.live_batch
        )

    def as_batch(self) -> LargestBatch:
        """A batch under the names that it has in reports."""
        return LargestBatch(
            self.gpu, self.size, self.device_bytes, self.next_device_bytes, self.safe_size, self.live_size
        )


@guarded(frozen=True, slots=True)
class DTypeBytes:
    count: int
    bytes: int


@guarded(frozen=True, slots=True)
class Parameters:
    """Elements and bytes of the parameters, unrounded, in the precision of the step; shared ones count once. Weights of
    few bits count with the numbers that they stand for, and with the bytes that they take."""

    count: int
    bytes: int
    trainable_count: int
    tensors: int
    by_dtype: Mapping[str, DTypeBytes]


@guarded(frozen=True, slots=True)
class PhasePeak:
    peak_bytes: int
    at_op: str | None
    node: str | None
    module: str | None


@guarded(frozen=True, slots=True)
class Phases:
    """`start_bytes` is alive before the step; `forward_end_bytes` when backward begins (or inference returns).

    Of `generate`, `forward` is the prefill, which ends with its token, and `decode` the last step after it.
    `first_call_bytes` is the peak of the first call of an inference, before there is a result that the loop holds; null
    where none is held.
    """

    start_bytes: int
    forward: PhasePeak
    forward_end_bytes: int
    forward_end_activation_bytes: int
    backward: PhasePeak | None
    optimizer: PhasePeak | None
    decode: PhasePeak | None = None
    first_call_bytes: int | None = None


@guarded(frozen=True, slots=True)
class CompiledInfo:
    """What torch.compile made of the step, as the release `torch` does: `graphs` were compiled, with a backward each
    in training. `eager_ops`: ops of the compiled modules that run by themselves.

    `saved_bytes` of buffers wait for the backward. It computes values of `recomputed_bytes` again, which would have
    to be saved else. `cuda_graphs` are recorded, over `copied_bytes` of copies of what they read.
    """

    torch: str
    graphs: int
    eager_ops: int
    saved_bytes: int
    recomputed_bytes: int
    cuda_graphs: int = 0
    copied_bytes: int = 0


@guarded(frozen=True, slots=True)
class GenerationInfo:
    """What `generate` was asked, and its cache of keys and values when the last step is done, in unrounded bytes.

    `cached_tokens` of a sequence are in it: the last new one never gets there. `token_bytes` are those that one token
    of one sequence takes in all `layers`, `sequence_bytes` those of one sequence, and `cache_bytes` of the batch.
    """

    prompt: int
    new_tokens: int
    cache: str
    layers: int
    cached_tokens: int
    token_bytes: int
    sequence_bytes: int
    cache_bytes: int


@guarded(frozen=True, slots=True)
class Multipliers:
    """Ratios; None where they do not apply.

    `peak_over_parameters`: the peak over the parameters' bytes. `state_over_parameters`: parameters, gradients and
    optimizer state over parameters (4 for Adam). `backward_over_forward`: the backward's peak over what is alive at the
    end of the forward. `backward_over_activations`: what the backward's peak adds to that, over the activations alive
    then. `optimizer_step_over_parameters`: what the optimizer's step adds for a moment, over the parameters.
    """

    peak_over_parameters: float | None
    state_over_parameters: float | None
    backward_over_forward: float | None
    backward_over_activations: float | None
    optimizer_step_over_parameters: float | None


@guarded(frozen=True, slots=True)
class OpCount:
    ruled: int
    transparent: int
    unknown: int


@guarded(frozen=True, slots=True)
class UnknownOp:
    """An op without a rule: how often, and the bytes of its results."""

    op: str
    count: int
    bytes: int


@guarded(frozen=True, slots=True)
class Coverage:
    ops: OpCount
    unknown: tuple[UnknownOp, ...]


@guarded(frozen=True, slots=True)
class NoteInfo:
    """`code` is stable; `count` says how many places of the graph it concerns."""

    code: str
    text: str
    count: int


@guarded(frozen=True, slots=True)
class OwnerBytes:
    """A part of the program that holds memory at the peak: the model, the optimizer, a variable of the loop, ...

    `bytes` nothing else holds, and `retained_bytes` would be freed if it let go: these, and what it alone keeps through
    others, as the variable of the loss keeps the backward graph. `kept_by` are the variables that keep the backward
    graph. What several parts hold has a row that names all of them. The `bytes` of all rows add up to the peak;
    `by_module` divides them by the modules that the tensors belong to, or whose backward they wait for.

    An owner may be a module too: its frame and those of modules within it, and the nodes of their backward.
    """

    owner: str
    kept_by: tuple[str, ...]
    bytes: int
    retained_bytes: int
    by_module: tuple[ModuleBytes, ...]


@guarded(frozen=True, slots=True)
class LetGo:
    """Variables to let go of after their last use: `does` is the line to write, `flags` ask for that step, which was
    run, `live_bytes` is its peak, and `saved_bytes` what is saved."""

    does: str
    flags: str
    live_bytes: int
    saved_bytes: int
    note: str


@guarded(frozen=True, slots=True)
class Textbook:
    """The textbook estimate of the same graph, for comparison: no lifetimes, every result added up. Bytes."""

    parameter_bytes: int
    intermediate_bytes_forward: int
    intermediate_bytes_with_backward: int
    total_bytes: int
    why_different: str


@guarded(frozen=True, slots=True)
class HostInfo:
    """Memory of the host, in bytes, of one process with its data loader's workers, at its largest `moment` ("loading",
    "step" or "saving"), of which `parts` are what is expected.

    `mapped_bytes` of files are mapped besides: the system takes them back where memory is short. `pinned_bytes` of the
    whole cannot be moved. `node_bytes` are those of all `processes`, one for each of `devices`, and `limit_bytes` a
    limit for them that holds with `confidence`.
    """

    bytes: int
    band: Band
    moment: str
    parts: Mapping[str, int]
    mapped_bytes: int
    pinned_bytes: int
    processes: int
    node_bytes: int
    node_band: Band
    confidence: float
    limit_bytes: int


@guarded(frozen=True, slots=True)
class Report(Shown):
    """One step of one model. `alive` has every tensor alive at the peak, largest first; `top_tensors` is its head.
    With `explain_peak`, `owners` says who holds them, and `modules` what the 30 modules hold whose owners hold most;
    `let_go` has the variables that are worth letting go of.

    `meter` is what the bytes mean: "live" is the sum of live tensors, each rounded up to 512 bytes (docs/meters.md).
    """

    kind: ClassVar[str] = "report"

    schema: str
    model: ModelInfo
    scenario: ScenarioInfo
    meter: str
    peak: Peak
    parameters: Parameters
    phases: Phases
    multipliers: Multipliers
    top_tensors: tuple[TensorEntry, ...]
    coverage: Coverage
    assumptions: tuple[NoteInfo, ...]
    warnings: tuple[NoteInfo, ...]
    notes: tuple[NoteInfo, ...]
    textbook: Textbook | None = None
    gpu: GpuFit | None = None
    max_batch: LargestBatch | None = None
    max_dim: LargestSize | None = None
    device: DeviceInfo | None = None
    compiled: CompiledInfo | None = None
    generation: GenerationInfo | None = None
    owners: tuple[OwnerBytes, ...] = ()
    modules: tuple[OwnerBytes, ...] = ()
    let_go: tuple[LetGo, ...] = ()
    host: HostInfo | None = None
    alive: Sequence[TensorEntry] = field(default=(), metadata={"json": False})
    verdict_on: Callable[[str], str] | None = field(default=None, compare=False, repr=False, metadata={"json": False})
    graph_at: Callable[[int | str], Any] | None = field(
        default=None, compare=False, repr=False, metadata={"json": False}
    )

    def fits(self, gpu: str) -> bool:
        """Whether the step is safe on a card, by name or size: it can run there, and the whole band of its device
        memory is within 95 % of what is usable. The first card asked for costs another analysis.

        Raises:
            UsageError: there is no such card (SM402), or the report was read from a file or sent by another process.
        """
        if self.verdict_on is None:
            why = "It has the figures of its GPU alone, and not the graph."
            raise UsageError(
                "this report cannot be asked for other GPUs", why, "Use that of `staticmem.analyze`.", "SM136"
            )
        return self.verdict_on(gpu) == "fits"

    def liveness_graph(self, at: int | str = "whole") -> nx.DiGraph:
        """The step as a `networkx.DiGraph`: kernels, storages and owners (docs/liveness-graph.md). The first call costs
        another analysis.

        Args:
            at: a moment: "peak", the name of a phase for its peak, or a tick; "whole": the whole step.

        Raises:
            UsageError: the step has no such moment (SM291), or too many nodes for a whole graph (SM293), or the report
                was read from a file or sent by another process (SM136).
        """
        if self.graph_at is None:
            why = "It has figures, and not the graph."
            raise UsageError("this report has no step", why, "Use that of `staticmem.analyze`.", "SM136")
        graph: nx.DiGraph = self.graph_at(at)
        return graph

    def _repr_html_(self) -> str:
        """A table, where other results have their text."""
        return self._formats().notebook(self)

    def to_html(self) -> str:
        """The report as a page that works offline, without the sliders of `analyze -o report.html`."""
        return str(self._rendered("html"))

    def to_pandas(self) -> Any:
        """The tensors alive at the peak as a pandas DataFrame, largest first: one row each, bytes rounded up to 512.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        columns = [f.name for f in fields(TensorEntry)]
        return pd.DataFrame([[getattr(t, name) for name in columns] for t in self.alive], columns=columns)
