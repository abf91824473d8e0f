"""The workspaces of a trace's kernels: what the allocator replay asks for (`allocators.process.WorkspaceModel`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from staticmem.allocators.process import FIRST, LAST, Workspace
from staticmem.devices import temporaries
from staticmem.devices.conv import passes_of
from staticmem.devices.conv_workspace import fastest_plan, largest_plan, plans, stray_bounds, workspace
from staticmem.devices.gpus import DEFAULT_ARCHITECTURE
from staticmem.devices.profile import DEFAULT_TORCH, Profile, load, version
from staticmem.devices.temporaries import Multiprocessors, reduction_buffer
from staticmem.eager.strides import Form, Shape, numel
from staticmem.eager.trace import Convolution, Copies, Indices, Reduction, Trace
from staticmem.ir import dtypes
from staticmem.ir.record import record
from staticmem.units import NOTHING, Band, exactly

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
    """A band for one workspace, and when and how it is taken (`allocators.Workspace`)."""

    band: Band
    after: int = LAST
    held: bool = False
    keep: str | None = None
    fallbacks: tuple[int, ...] = ()
    what: str = "workspace"
    once: str | None = None
    strays: tuple[int, int] | None = None

    @cached_property
    def expected(self) -> Workspace:
        """The expected workspace, which says the bounds too."""
        low, nbytes, high = self.band
        bounds = (low, high) if low != high else None
        return Workspace(
            nbytes, self.after, self.held, self.keep, self.fallbacks, self.what, bounds, self.once, self.strays
        )

    def at(self, bound: str) -> Workspace:
        """The workspace at a bound of its band."""
        if bound == "expected":
            return self.expected
        nbytes = getattr(self.band, bound)
        return Workspace(nbytes, self.after, self.held, self.keep, self.fallbacks, self.what, None, self.once)


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
        what = f"cuDNN {_PASS_NAMES[call.gradients][after]}"
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
        fallbacks = (*(size for size in sizes[1:] if size < band.expected), 0) if band.expected else ()
        strays = None if cudnn is not None else stray_bounds(conv, architecture, band)
        if band != NOTHING or strays is not None:
            needs.append(Need(band, after, fallbacks=fallbacks, what=what, strays=strays))
    return tuple(needs)


class KernelWorkspaces:
    """Workspaces of one trace. `bound` picks low, expected or high of every band."""

    def __init__(self, trace: Trace, setup: Setup | None = None, bound: str = "expected") -> None:
        if bound not in Band._fields:
            raise ValueError(f"bound is {bound!r}")
        self.trace, self.setup, self.bound = trace, setup or Setup(), bound
        self._names, self._ops = trace.kernels.names, trace.kernels.ops
        rules = {name: _RULES.get(name) for name in set(self._names)}
        self._rules = {kernel: rule for kernel, name in enumerate(self._names) if (rule := rules[name]) is not None}
        self._takers = sorted({*self._rules, *trace.reads})
        self._made: dict[int, list[int]] = {kernel: [] for kernel in self._takers}  # places of its buffers
        for place, kernel in enumerate(trace.buffers.kernels):
            if kernel in self._made:
                self._made[kernel].append(place)
        self._results: dict[int, tuple[int, int]] = {}  # of recurrent layers: bytes of the result and of the reserve
        self._cublas = self.setup.profile.cublas(self.setup.torch)
        on = self.setup
        self._convolution_setup = (
            on.channels_last, on.allow_tf32, on.architecture, on.profile.cudnn(on.torch), on.benchmark, on.cudnn,
        )  # fmt: skip

    def _forms(self, kernel: int) -> list[Form]:
        """What a kernel makes."""
        forms = self.trace.buffers.forms
        return [forms[place] for place in self._made[kernel]]

    def workspaces(self, kernel: int) -> Sequence[Workspace]:
        """The workspaces of a kernel in the order in which it takes them."""
        needs = self.needs(kernel)
        if not needs:
            return ()
        listed = "high" if self.bound == "expected" else self.bound
        return tuple([need.at(self.bound) for need in needs if getattr(need.band, listed) or need.strays is not None])

    def taken(self) -> Iterator[tuple[int, Sequence[Workspace]]]:
        """Those of all kernels (`allocators.WorkspaceModel`)."""
        for kernel in self._takers:
            spaces = self.workspaces(kernel)
            if spaces:
                yield kernel, spaces

    def needs(self, kernel: int) -> Sequence[Need]:
        """The same with bands."""
        if kernel not in self._made:
            return ()
        rule = self._rules.get(kernel)
        needs = [] if rule is None else list(rule(self, kernel))
        for read in self.trace.reads.get(kernel, ()):
            if isinstance(read, Convolution):
                if self._made[kernel]:  # without results another stage's rank runs it
                    needs += _convolution_needs(read, *self._convolution_setup)
            elif isinstance(read, Reduction):
                needs += self._reduction(kernel, read)
            elif isinstance(read, Copies):
                needs[:0] = [Need(exactly(n), FIRST, held=True, what="contiguous copy") for n in read.nbytes]
        return needs

    # -- matrix products -----------------------------------------------------------------------------------------

    def _gemm(self, kernel: int) -> Sequence[Need]:
        """The handle's workspace; autograd's thread has a handle of its own (CublasHandlePool.cpp: one a thread)."""
        call = self.trace.kernels[kernel]
        thread = "backward thread" if call.phase == "backward" else "main thread"
        cublas = self._cublas
        size = exactly(cublas.workspace(self.setup.architecture))
        needs = [Need(size, keep=f"cuBLAS, {thread}" if cublas.kept else None, what="cuBLAS workspace")]
        if call.name == "aten.addmm.default" and cublas.lt_nbytes:
            keep = f"cublasLt, {thread}" if cublas.lt_kept else None
            needs.append(Need(exactly(cublas.lt_nbytes), keep=keep, what="cublasLt workspace"))
        return needs

    # -- attention -----------------------------------------------------------------------------------------------

    def _attention(self, kernel: int) -> Sequence[Need]:
        """Backward of fused attention: sizes from the gradients of query and key."""
        made = self._forms(kernel)
        if len(made) < 2 or len(made[0].shape) != 4 or len(made[1].shape) != 4:
            return ()
        (b, h, queries, head), (_, key_heads, keys, _) = made[0].shape, made[1].shape
        name, itemsize = self._names[kernel], made[0].dtype.itemsize
        if "flash" in name:
            bands = temporaries.flash_backward(b, h, queries, keys, head, key_heads, itemsize)
        elif "cudnn" in name:
            bands = (temporaries.cudnn_attention_backward(b, h, queries, head),)
        else:
            bands = temporaries.efficient_backward(b, h, queries, head, itemsize)
            if itemsize == 4:  # the product is gone when its sum is there
                product, *bands_left = bands
                first = Need(product, what="attention backward: product")
                return [first, *[Need(band, held=True, what="attention backward") for band in bands_left]]
        return [Need(band, held=True, what="attention backward") for band in bands]

    # -- sums ----------------------------------------------------------------------------------------------------

    def partial_sums(self) -> dict[int, int]:
        """By kernel the bytes that depend on the card's multiprocessors, and not on its architecture alone."""
        sums = {}
        for kernel in self._takers:
            needs: list[Need] = []
            if self._rules.get(kernel) is KernelWorkspaces._layer_norm_backward:
                needs += self._layer_norm_backward(kernel)
            for read in self.trace.reads.get(kernel, ()):
                if isinstance(read, Reduction):
                    needs += self._reduction(kernel, read)
            if needs:
                sums[kernel] = sum(need.band.expected for need in needs)
        return sums

    def _reduction(self, kernel: int, read: Reduction) -> list[Need]:
        """Partial results of blocks that share an output, and their semaphores."""
        made = self._forms(kernel)
        return self._sum(*read, made[-1].dtype.itemsize) if made else []

    def _sum(self, shape: Shape, strides: Shape, axes: tuple[int, ...], itemsize: int) -> list[Need]:
        sizes = reduction_buffer(shape, strides, axes, self.setup.multiprocessors, max(itemsize, 4))
        names = ("partial sums", "semaphores")
        return [Need(exactly(n), held=True, what=what) for n, what in zip(sizes, names, strict=True) if n]

    def _layer_norm_backward(self, kernel: int) -> Sequence[Need]:
        """Many short rows: gradients of weight and bias as partial sums of 32 rows, and then a sum over these."""
        made = self._forms(kernel)
        parameters = made[1:]
        if not parameters or version(self.setup.torch) < temporaries.LAYER_NORM_PARTIALS_SINCE:
            return ()
        columns, itemsize = numel(parameters[0].shape), parameters[0].dtype.itemsize
        rows = numel(made[0].shape) // max(columns, 1)
        blocks = temporaries.layer_norm_blocks(rows, columns, self.setup.multiprocessors.count)
        if not blocks:
            return ()
        partial = Need(exactly(blocks * columns * itemsize), held=True, what="layer_norm backward: partial sums")
        return [*[partial for _ in parameters], *self._sum((blocks, columns), (columns, 1), (0,), itemsize)]

    def _recurrent(self, kernel: int) -> Sequence[Need]:
        """cuDNN's workspace of a recurrent layer, from its result: of the forward for the backward too."""
        call = self.trace.kernels[kernel]
        if call.phase != "backward":
            sizes = [self.trace.buffers.nbytes[place] for place in self._made[kernel]]
            self._results[call.op] = (sizes[0], sizes[-1]) if sizes else (0, 0)
        result, reserve = self._results.get(call.op, (0, 0))
        band = temporaries.recurrent(result, reserve)
        return (Need(band, held=True, what="cuDNN recurrent layer"),) if band != NOTHING else ()

    # -- indices -------------------------------------------------------------------------------------------------

    def _indices(self, kernel: int) -> int:
        """Number of elements of the index tensor; 0 where the kernel says nothing of it."""
        return next((read.elements for read in self.trace.reads.get(kernel, ()) if isinstance(read, Indices)), 0)

    def _embedding_backward(self, kernel: int) -> Sequence[Need]:
        count, made = self._indices(kernel), self._forms(kernel)
        if not count or not made or len(made[0].shape) != 2:
            return ()
        needs = [
            Need(temporaries.embedding_sort(count), FIRST, held=True, what="embedding backward: sort"),
            Need(temporaries.embedding_segments(count, *made[0].shape), held=True, what="embedding backward: segments"),
        ]
        return [need for need in needs if need.band != NOTHING]

    def _index_put(self, kernel: int) -> Sequence[Need]:
        """Only in backward: there indices accumulate."""
        count = self._indices(kernel) if self.trace.kernels.phases[kernel] == "backward" else 0
        return (Need(temporaries.index_put_accumulate(count), what="index_put: sort"),) if count else ()

    def _sort(self, kernel: int) -> Sequence[Need]:
        made = self._forms(kernel)
        if not made or not made[0].shape or made[0].dtype is dtypes.bool_:
            return ()
        band = temporaries.sort(numel(made[0].shape), max(made[0].shape), made[0].dtype.itemsize)
        return (Need(band, what="sort"),) if band != NOTHING else ()


# Matrix products: those that call cuBLAS (aten/src/ATen/native/cuda/Blas.cpp). `addmm` with a bias calls cublasLt.
_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_trilinear")

_RULES: dict[str, Callable[[KernelWorkspaces, int], Sequence[Need]]] = {
    **{f"aten.{name}.default": KernelWorkspaces._gemm for name in _GEMMS},
    "aten.embedding_dense_backward.default": KernelWorkspaces._embedding_backward,
    "aten.native_layer_norm_backward.default": KernelWorkspaces._layer_norm_backward,
    "aten._cudnn_rnn.default": KernelWorkspaces._recurrent,
    "aten._cudnn_rnn_backward.default": KernelWorkspaces._recurrent,
    "aten.index_put.default": KernelWorkspaces._index_put,
    "aten.index_put_.default": KernelWorkspaces._index_put,
    "aten.sort.default": KernelWorkspaces._sort,
    **{
        f"aten._scaled_dot_product_{kernel}_attention_backward.default": KernelWorkspaces._attention
        for kernel in ("flash", "cudnn", "efficient")
    },
}
