"""The workspaces of a trace's kernels: what the allocator replay asks for (`allocators.process.WorkspaceModel`).

Here is what the device and its libraries decide: plans of cuDNN, handles of cuBLAS, buffers of reductions. What other
kernels of PyTorch take stands in the family of their op (`ops.registry.workspace`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from staticmem.allocators.process import FIRST, LAST, Workspace
from staticmem.devices.conv import passes_of
from staticmem.devices.conv_workspace import fastest_plan, largest_plan, plans, runs_on_cudnn, stray_bounds, workspace
from staticmem.devices.gpus import DEFAULT_ARCHITECTURE
from staticmem.devices.profile import DEFAULT_TORCH, Profile, load
from staticmem.devices.reductions import Multiprocessors, reduction_buffer
from staticmem.eager.strides import Form
from staticmem.eager.trace import Convolution, Copies, Indices, Reduction, Trace
from staticmem.frontends.recent import Recent
from staticmem.ir.record import record
from staticmem.ops.linear import CUBLAS, CUBLASLT
from staticmem.ops.registry import WORKSPACES, KernelCall, WorkspaceRule
from staticmem.ops.softmax import RESULT_FIRST
from staticmem.units import NOTHING, Band, exactly
from staticmem.version import torch_release

if TYPE_CHECKING:
    from staticmem.devices.cudnn import Cudnn


@record(frozen=True)
class Setup:
    """The device and the settings of PyTorch that decide workspaces."""

    architecture: str = DEFAULT_ARCHITECTURE
    torch: str = DEFAULT_TORCH
    allow_tf32: bool = True  # torch.backends.cudnn.allow_tf32
    channels_last: bool = False  # all 2-D convolutions run so; else those that the trace has so
    benchmark: bool = False  # torch.backends.cudnn.benchmark
    cudnn: Cudnn | None = None  # asked instead of the tables of the package
    profile: Profile = field(default_factory=load)
    multiprocessors: Multiprocessors = field(default_factory=Multiprocessors)


@record(frozen=True)
class Need:
    """A band for one workspace, and when and how it is taken (`allocators.process.Workspace`)."""

    band: Band
    after: int = LAST
    held: bool = False
    keep: str | None = None
    fallbacks: tuple[int, ...] = ()
    what: str = "workspace"
    once: str | None = None
    strays: tuple[int, int] | None = None
    plan: Hashable = None

    @cached_property
    def expected(self) -> Workspace:
        """The expected workspace, which says the bounds too."""
        low, nbytes, high = self.band
        bounds = (low, high) if low != high else None
        return Workspace(
            nbytes,
            self.after,
            self.held,
            self.keep,
            self.fallbacks,
            self.what,
            bounds,
            self.once,
            self.strays,
            self.plan,
        )

    def at(self, bound: str) -> Workspace:
        """The workspace at a bound of its band."""
        if bound == "expected":
            return self.expected
        nbytes = getattr(self.band, bound)
        return Workspace(
            nbytes, self.after, self.held, self.keep, self.fallbacks, self.what, None, self.once, plan=self.plan
        )


_PASS_NAMES = {
    None: ("forward",),
    (True, True): ("backward data", "backward filter"),
    (True, False): ("backward data",),
    (False, True): ("backward filter",),
    (False, False): (),
}


@lru_cache(maxsize=4096)  # networks repeat convolutions, and a process that analyses one repeats them all
def _convolution_needs(
    call: Convolution, channels_last: bool, allow_tf32: bool, architecture: str, cudnn_version: str, benchmark: bool,
    cudnn: Cudnn | None,
) -> tuple[Need, ...]:  # fmt: skip
    """What the passes of a kernel take, with the smaller plans that are tried where one does not fit: the first behind
    the kernel's first result, the next behind its second (data gradient, then weight gradient: ConvShared.cpp)."""
    needs: list[Need] = []
    for after, conv in enumerate(passes_of(call, channels_last, allow_tf32)):
        on_cudnn = runs_on_cudnn(conv, architecture) is not False
        what = f"{'cuDNN' if on_cudnn else 'columns of'} {_PASS_NAMES[call.gradients][after]}"
        band = workspace(conv, architecture, cudnn_version, cudnn)
        sizes = plans(conv, architecture, cudnn_version, cudnn)
        if benchmark:
            # before the first call: a buffer for the largest plan, halved until it fits; when the fastest is known, the
            # cache is emptied (Conv_v8.cpp, generate_and_filter_plans and run_single_conv)
            largest = largest_plan(conv, architecture, cudnn)
            if largest != NOTHING:
                halves = tuple([largest.expected >> n for n in range(1, largest.expected.bit_length())])
                needs.append(Need(largest, after, fallbacks=halves, what=f"{what}: search", once=f"search {conv}"))
            band = fastest_plan(band, sizes)
        smaller = [size for size in sizes[1:] if size < band.expected]
        fallbacks = (*smaller, 0) if band.expected and on_cudnn else ()
        strays = None if cudnn is not None else stray_bounds(conv, architecture, band, cudnn_version)
        if band != NOTHING or strays is not None:
            needs.append(Need(band, after, fallbacks=fallbacks, what=what, strays=strays, plan=conv))
    return tuple(needs)


class _Takers(NamedTuple):
    """The kernels of a trace that may take workspaces, in order, by index; of each its rule, if there is one (None:
    cuBLAS), and the places of its buffers. `forward`: of each with a rule the forward kernel of the same op, which has
    the same rule: it itself, unless it is of the backward."""

    rules: dict[int, WorkspaceRule | None]
    takers: list[int]
    results: dict[int, list[int]]
    forward: dict[int, int]


# of the last traces; those that differ in sizes alone have them in common, as the objects that are their keys
_kept_takers: Recent[tuple[Trace, _Takers]] = Recent(8)


def _find_takers(trace: Trace) -> _Takers:
    names, ops, phases = trace.kernels.names, trace.kernels.ops, trace.kernels.phases
    of_name = {name: WORKSPACES.get(name) for name in set(names)}
    listed = {name for name, rule in of_name.items() if rule is not None or name in CUBLAS}
    rules = {kernel: of_name[name] for kernel, name in enumerate(names) if name in listed}
    takers = sorted({*rules, *trace.reads})
    results: dict[int, list[int]] = {kernel: [] for kernel in takers}
    for place, kernel in enumerate(trace.buffers.kernels):
        if kernel in results:
            results[kernel].append(place)
    latest: dict[tuple[WorkspaceRule, int], int] = {}
    forward = {}
    for kernel, rule in rules.items():
        if rule is None:
            continue
        if phases[kernel] != "backward":
            latest[rule, ops[kernel]] = kernel
        if (rule, ops[kernel]) in latest:
            forward[kernel] = latest[rule, ops[kernel]]
    return _Takers(rules, takers, results, forward)


class KernelWorkspaces:
    """Workspaces of one trace. `bound` picks low, expected or high of every band."""

    def __init__(self, trace: Trace, setup: Setup | None = None, bound: str = "expected") -> None:
        if bound not in Band._fields:
            raise ValueError(f"bound is {bound!r}")
        self.trace, self.setup, self.bound = trace, setup or Setup(), bound
        key = id(trace.kernels), id(trace.buffers.kernels), tuple(trace.reads)
        kept = _kept_takers.get(key) or (trace, _find_takers(trace))
        _kept_takers.put(key, kept)
        self._rules, self._takers, self._results, self._forward = kept[1]
        self._torch = torch_release(self.setup.torch)
        self._cublas = self.setup.profile.cublas(self.setup.torch)
        on = self.setup
        self._convolution_setup = (
            on.channels_last, on.allow_tf32, on.architecture, on.profile.cudnn(on.torch), on.benchmark, on.cudnn,
        )  # fmt: skip

    def _forms(self, kernel: int) -> list[Form]:
        """What a kernel makes."""
        forms = self.trace.buffers.forms
        return [forms[place] for place in self._results[kernel]]

    def workspaces(self, kernel: int) -> Sequence[Workspace]:
        """The workspaces of a kernel in the order in which it takes them."""
        needs = self.needs(kernel)
        if not needs:
            return ()
        listed = "high" if self.bound == "expected" else self.bound
        return tuple([need.at(self.bound) for need in needs if getattr(need.band, listed) or need.strays is not None])

    def taken(self) -> Iterator[tuple[int, Sequence[Workspace]]]:
        """Those of all kernels (`allocators.process.WorkspaceModel`)."""
        for kernel in self._takers:
            spaces = self.workspaces(kernel)
            if spaces:
                yield kernel, spaces

    def needs(self, kernel: int) -> Sequence[Need]:
        """The same with bands."""
        if kernel not in self._results:
            return ()
        needs: list[Need] = []
        if kernel in self._rules:
            rule = self._rules[kernel]
            needs += self._gemm(kernel) if rule is None else self._temporaries(kernel, rule)
        for read in self.trace.reads.get(kernel, ()):
            if isinstance(read, Convolution):
                if self._results[kernel]:  # without results another stage's rank runs it
                    needs += _convolution_needs(read, *self._convolution_setup)
            elif isinstance(read, Reduction):
                needs += self._reduction(kernel, read)
            elif isinstance(read, Copies):
                after = LAST if self.trace.kernels.names[kernel] in RESULT_FIRST else FIRST
                needs[:0] = [Need(exactly(n), after, held=True, what="contiguous copy") for n in read.nbytes]
        return needs

    # -- matrix products -----------------------------------------------------------------------------------------

    def _gemm(self, kernel: int) -> Sequence[Need]:
        """The handle's workspace; autograd's thread has a handle of its own (CublasHandlePool.cpp: one a thread)."""
        call = self.trace.kernels[kernel]
        thread = "backward thread" if call.phase == "backward" else "main thread"
        cublas = self._cublas
        size = exactly(cublas.workspace(self.setup.architecture))
        needs = [Need(size, keep=f"cuBLAS, {thread}" if cublas.kept else None, what="cuBLAS workspace")]
        if call.name in CUBLASLT and cublas.lt_nbytes:
            keep = f"cublasLt, {thread}" if cublas.lt_kept else None
            needs.append(Need(exactly(cublas.lt_nbytes), keep=keep, what="cublasLt workspace"))
        return needs

    # -- what the op's family states -----------------------------------------------------------------------------

    def _temporaries(self, kernel: int, rule: WorkspaceRule) -> list[Need]:
        results = self._forms(kernel)
        if len(results) < rule.results:
            return []
        trace, before = self.trace, self._forward.get(kernel, -1)
        call = KernelCall(
            kernel=trace.kernels.names[kernel],
            phase=trace.kernels.phases[kernel],
            results=tuple(results),
            indices=next((read.elements for read in trace.reads.get(kernel, ()) if isinstance(read, Indices)), 0),
            forward=tuple(self._forms(before)) if before in self._results else (),
            multiprocessors=self.setup.multiprocessors.count,
            torch=self._torch,
        )
        needs = []
        for taken in rule.function(call):
            if isinstance(taken, Reduction):
                needs += self._reduction(kernel, taken)
            elif taken.band != NOTHING:
                needs.append(Need(taken.band, FIRST if taken.first else LAST, taken.held, what=taken.what))
        return needs

    # -- sums ----------------------------------------------------------------------------------------------------

    def partial_sums(self) -> dict[int, int]:
        """By kernel the bytes that depend on the card's multiprocessors, and not on its architecture alone."""
        sums = {}
        for kernel in self._takers:
            rule = self._rules.get(kernel)
            needs = self._temporaries(kernel, rule) if rule is not None and rule.by_card else []
            for read in self.trace.reads.get(kernel, ()):
                if isinstance(read, Reduction):
                    needs += self._reduction(kernel, read)
            if needs:
                sums[kernel] = sum(need.band.expected for need in needs)
        return sums

    def _reduction(self, kernel: int, read: Reduction) -> list[Need]:
        """Partial results of blocks that share an output, and their semaphores."""
        results = self._forms(kernel)
        if not results:
            return []
        itemsize = max(results[-1].dtype.itemsize, 4)
        sizes = reduction_buffer(*read, self.setup.multiprocessors, itemsize)
        names = ("partial sums", "semaphores")
        return [Need(exactly(n), held=True, what=what) for n, what in zip(sizes, names, strict=True) if n]
