"""The workspaces of a trace's kernels: what the allocator replay asks for (`allocators.WorkspaceModel`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from staticmem.allocators.process import FIRST, LAST, Workspace
from staticmem.devices import conv_ops, temporaries
from staticmem.devices.conv import BACKWARD_DATA, BACKWARD_FILTER, Convolution
from staticmem.devices.conv_ops import Shape
from staticmem.devices.conv_workspace import fastest_plan, largest_plan, plans, stray_bounds, workspace
from staticmem.devices.gpus import DEFAULT_ARCHITECTURE
from staticmem.devices.profile import DEFAULT_TORCH, Profile, load, version
from staticmem.devices.reductions import Multiprocessors, reduction_buffer
from staticmem.eager.trace import Trace
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph
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
    channels_last: bool = False  # the model and its inputs were moved to torch.channels_last
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


@lru_cache(maxsize=4096)  # networks repeat convolutions, and a process that analyses one repeats them all
def _conv_needs(
    conv: Convolution,
    after: int,
    what: str,
    architecture: str,
    version: str,
    benchmark: bool,
    cudnn: Cudnn | None,
) -> tuple[Need, ...]:
    """What one pass of a convolution takes, with the smaller plans that are tried where it does not fit."""
    band = workspace(conv, architecture, version, cudnn)
    sizes = plans(conv, architecture, version, cudnn)
    if benchmark:
        band = fastest_plan(band, sizes)
    fallbacks = (*(size for size in sizes[1:] if size < band.expected), 0) if band.expected else ()
    strays = None if cudnn is not None else stray_bounds(conv, architecture, band)
    known = band == NOTHING and strays is None
    needs = () if known else (Need(band, after, fallbacks=fallbacks, what=f"cuDNN {what}", strays=strays),)
    return (*_search(conv, after, what, architecture, cudnn), *needs) if benchmark else needs


@lru_cache(maxsize=4096)
def _backward_needs(
    forward: Convolution,
    x: Shape,
    w: Shape,
    results: tuple[Shape, ...],
    architecture: str,
    version: str,
    benchmark: bool,
    cudnn: Cudnn | None,
) -> tuple[Need, ...]:
    """What the backward of a convolution takes that makes gradients of these sizes."""
    needs: list[Need] = []
    waiting = [(x, BACKWARD_DATA, "backward data"), (w, BACKWARD_FILTER, "backward filter")]
    for place, result in enumerate(results):
        found = next((i for i, (shape, _, _) in enumerate(waiting) if shape == result), None)
        if found is not None:
            _, direction, what = waiting[found]
            del waiting[: found + 1]
            conv = conv_ops.of_pass(forward, direction)
            needs += _conv_needs(conv, place, what, architecture, version, benchmark, cudnn)
    return tuple(needs)


def _search(conv: Convolution, after: int, what: str, architecture: str, cudnn: Cudnn | None) -> tuple[Need, ...]:
    """`cudnn.benchmark`, before the first call: a buffer for the largest plan, halved until it fits; when the fastest
    is known, the cache is emptied (Conv_v8.cpp, generate_and_filter_plans and run_single_conv)."""
    band = largest_plan(conv, architecture, cudnn)
    if band == NOTHING:
        return ()
    halves = tuple(band.expected >> n for n in range(1, band.expected.bit_length()))
    return (Need(band, after, fallbacks=halves, what=f"cuDNN {what}: search", once=f"search {conv}"),)


class _Said(NamedTuple):
    """What a graph says of its convolutions: sizes of values, which of them lie in channels_last, and by the index of
    each convolution the names of its input and its weight. `forward` has those that were made of it so far."""

    shapes: Mapping[str, Shape]
    channels_last: frozenset[str]
    operands: Mapping[int, tuple[str, str]]
    forward: dict[Any, Convolution | None]


def _said(graph: Graph, channels_last: bool) -> _Said:
    key = f"convolutions channels_last={channels_last}"
    known: _Said | None = graph.derived.get(key)
    if known is None:
        shapes = conv_ops.shapes_of(graph)
        convolutions = [
            (i, conv_ops.operands(op)) for i, op in enumerate(graph.ops) if op.base in conv_ops.CONVOLUTIONS
        ]
        known = graph.derived[key] = _Said(
            shapes,
            conv_ops.channels_last_values(graph, shapes, channels_last),
            {index: names for index, names in convolutions if names is not None},
            {},
        )
    return known


class Made(NamedTuple):
    """What counts of a buffer that a kernel makes."""

    shape: Shape
    dtype: DType
    nbytes: int


class KernelWorkspaces:
    """Workspaces of one trace. `bound` picks low, expected or high of every band."""

    def __init__(self, trace: Trace, graph: Graph, setup: Setup | None = None, bound: str = "expected") -> None:
        if bound not in Band._fields:
            raise ValueError(f"bound is {bound!r}")
        self.trace, self.graph, self.setup, self.bound = trace, graph, setup or Setup(), bound
        self._names, self._ops = trace.kernels.names, trace.kernels.ops
        self._known = {name: _RULES.get(name) for name in set(self._names)}
        self._takers = [kernel for kernel, name in enumerate(self._names) if self._known[name] is not None]
        if trace.reductions or trace.copies:
            self._takers = sorted({*self._takers, *trace.reductions, *trace.copies})
        self._buffers: dict[int, list[Made]] = {kernel: [] for kernel in self._takers}
        buffers = trace.buffers
        for id, kernel in enumerate(buffers.kernels):
            if kernel in self._buffers:
                form = buffers.forms[id]
                self._buffers[kernel].append(Made(form.shape, form.dtype, buffers.nbytes[id]))
        said = _said(graph, self.setup.channels_last)
        self._shapes, self._last, self._operands = dict(said.shapes), said.channels_last, said.operands
        self._made = said.forward
        self._forward: dict[int, Convolution | None] = {}
        self._results: dict[int, tuple[int, int]] = {}  # of recurrent layers: bytes of the result and of the reserve
        self._cublas = self.setup.profile.cublas(self.setup.torch)
        cudnn_version = self.setup.profile.cudnn(self.setup.torch)
        self._conv_words = (self.setup.architecture, cudnn_version, self.setup.benchmark, self.setup.cudnn)
        self._learn_inputs()

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
        rule = self._known[self._names[kernel]]
        needs = rule(self, kernel) if rule is not None else ()
        if kernel in self.trace.reductions:
            needs = (*needs, *self._reduction(kernel))
        if kernel in self.trace.copies:
            copies = self.trace.copies[kernel]
            needs = (*[Need(exactly(n), FIRST, held=True, what="contiguous copy") for n in copies], *needs)
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

    # -- convolutions --------------------------------------------------------------------------------------------

    def _learn_inputs(self) -> None:
        """Sizes of convolution inputs that the graph does not state, from the gradients that their backward makes."""
        for kernel in self._takers:
            index = self._ops[kernel]
            if self._names[kernel] != "aten.convolution_backward.default" or not 0 <= index < len(self.graph.ops):
                continue
            names = self._operands.get(index)
            buffers = self._buffers.get(kernel, [])
            if names and names[0] not in self._shapes and buffers:
                self._shapes[names[0]] = buffers[0].shape

    def _convolution_of(self, kernel: int) -> Convolution | None:
        """The forward pass that a convolution kernel belongs to."""
        index = self._ops[kernel]
        if index in self._forward or not 0 <= index < len(self.graph.ops):
            return self._forward.get(index)
        op, result = self.graph.ops[index], self._buffers.get(kernel, [])
        names = self._operands.get(index)
        conv = None
        if names and result and all(name in self._shapes for name in names):
            x, w = (self._shapes[name] for name in names)
            y, dtype = result[0].shape, result[0].dtype
            key = (index, x, w, y, dtype.name, self.setup.allow_tf32)
            if key not in self._made:
                last = any(name in self._last for name in (*names, *op.outputs))
                self._made[key] = conv_ops.convolution(op, x, w, y, dtype, last, self.setup.allow_tf32)
            conv = self._made[key]
        self._forward[index] = conv
        return conv

    def _conv_forward(self, kernel: int) -> Sequence[Need]:
        conv = self._convolution_of(kernel)
        return _conv_needs(conv, 0, "forward", *self._conv_words) if conv is not None else ()

    def _conv_backward(self, kernel: int) -> Sequence[Need]:
        """Data gradient and its workspace, given back, then weight gradient and its workspace (ConvShared.cpp)."""
        forward = self._convolution_of(kernel)
        names = self._operands.get(self._ops[kernel]) if forward is not None else None
        if forward is None or names is None:
            return ()
        x, w = (self._shapes[name] for name in names)
        results = tuple([buffer.shape for buffer in self._buffers.get(kernel, ())])
        return _backward_needs(forward, x, w, results, *self._conv_words)

    # -- attention -----------------------------------------------------------------------------------------------

    def _attention(self, kernel: int) -> Sequence[Need]:
        """Backward of fused attention: sizes from the gradients of query and key."""
        buffers = self._buffers.get(kernel, [])
        if len(buffers) < 2 or len(buffers[0].shape) != 4 or len(buffers[1].shape) != 4:
            return ()
        (b, h, queries, head), (_, key_heads, keys, _) = buffers[0].shape, buffers[1].shape
        name = self._names[kernel]
        itemsize = buffers[0].dtype.itemsize
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
        found = {}
        for kernel in self._takers:
            needs: list[Need] = []
            if self._known[self._names[kernel]] is KernelWorkspaces._layer_norm_backward:
                needs += self._layer_norm_backward(kernel)
            if kernel in self.trace.reductions:
                needs += self._reduction(kernel)
            if needs:
                found[kernel] = sum(need.band.expected for need in needs)
        return found

    def _reduction(self, kernel: int) -> list[Need]:
        """Partial results of blocks that share an output, and their semaphores."""
        shape, strides, axes = self.trace.reductions[kernel]
        buffers = self._buffers.get(kernel)
        return self._sum(shape, strides, axes, buffers[-1].dtype.itemsize) if buffers else []

    def _sum(self, shape: Shape, strides: Shape, axes: tuple[int, ...], itemsize: int) -> list[Need]:
        accumulator = max(itemsize, 4)
        found = reduction_buffer(shape, strides, axes, self.setup.multiprocessors, accumulator)
        names = ("partial sums", "semaphores")
        return [Need(exactly(n), held=True, what=what) for n, what in zip(found, names, strict=True) if n]

    def _layer_norm_backward(self, kernel: int) -> Sequence[Need]:
        """Many short rows: gradients of weight and bias as partial sums of 32 rows, and then a sum over these."""
        buffers = self._buffers.get(kernel, [])
        parameters = buffers[1:]
        if not parameters or version(self.setup.torch) < temporaries.LAYER_NORM_PARTIALS_SINCE:
            return ()
        columns, itemsize = conv_ops.numel(parameters[0].shape), parameters[0].dtype.itemsize
        rows = conv_ops.numel(buffers[0].shape) // max(columns, 1)
        blocks = temporaries.layer_norm_blocks(rows, columns, self.setup.multiprocessors.count)
        if not blocks:
            return ()
        partial = Need(exactly(blocks * columns * itemsize), held=True, what="layer_norm backward: partial sums")
        return [*[partial for _ in parameters], *self._sum((blocks, columns), (columns, 1), (0,), itemsize)]

    def _recurrent(self, kernel: int) -> Sequence[Need]:
        """cuDNN's workspace of a recurrent layer, from its result: of the forward for the backward too."""
        call = self.trace.kernels[kernel]
        if call.phase != "backward":
            buffers = self._buffers.get(kernel, [])
            self._results[call.op] = (buffers[0].nbytes, buffers[-1].nbytes) if buffers else (0, 0)
        result, reserve = self._results.get(call.op, (0, 0))
        band = temporaries.recurrent(result, reserve)
        return (Need(band, held=True, what="cuDNN recurrent layer"),) if band != NOTHING else ()

    # -- indices -------------------------------------------------------------------------------------------------

    def _indices(self, kernel: int, of: int) -> int | None:
        """Number of elements of the index tensor: argument `of` of the graph's op."""
        index = self._ops[kernel]
        if not 0 <= index < len(self.graph.ops):
            return None
        names = conv_ops.tensors(self.graph.ops[index], of)
        counts = [conv_ops.numel(self._shapes[name]) for name in names if name in self._shapes]
        return max(counts, default=None)

    def _embedding_backward(self, kernel: int) -> Sequence[Need]:
        count, buffers = self._indices(kernel, 1), self._buffers.get(kernel, [])
        if count is None or not buffers or len(buffers[0].shape) != 2:
            return ()
        rows, width = buffers[0].shape
        segments = temporaries.embedding_segments(count, rows, width)
        needs = [
            Need(temporaries.embedding_sort(count), FIRST, held=True, what="embedding backward: sort"),
            Need(segments, held=True, what="embedding backward: segments"),
        ]
        return [need for need in needs if need.band != NOTHING]

    def _index_put(self, kernel: int) -> Sequence[Need]:
        """Only in backward: there indices accumulate."""
        if self.trace.kernels[kernel].phase != "backward":
            return ()
        count = self._indices(kernel, 1)
        return (Need(temporaries.index_put_accumulate(count), what="index_put: sort"),) if count else ()

    def _sort(self, kernel: int) -> Sequence[Need]:
        buffers = self._buffers.get(kernel, [])
        if not buffers or not buffers[0].shape or buffers[0].dtype is dtypes.bool_:
            return ()
        shape = buffers[0].shape
        band = temporaries.sort(conv_ops.numel(shape), max(shape), buffers[0].dtype.itemsize)
        return (Need(band, what="sort"),) if band != NOTHING else ()


# Matrix products: those that call cuBLAS (aten/src/ATen/native/cuda/Blas.cpp). `addmm` with a bias calls cublasLt.
_GEMMS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_trilinear")

_RULES: dict[str, Callable[[KernelWorkspaces, int], Sequence[Need]]] = {
    **{f"aten.{name}.default": KernelWorkspaces._gemm for name in _GEMMS},
    "aten.convolution.default": KernelWorkspaces._conv_forward,
    "aten.convolution_backward.default": KernelWorkspaces._conv_backward,
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
