"""What rules of kernels are given: a node with the graph around it, and the CPU that weights are packed for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from staticmem.ir.graph import Value
from staticmem.ort.memory.graph import ExecGraph, ExecNode, PlannedType
from staticmem.ort.memory.sizes import RunSizes
from staticmem.units import round_up


@dataclass(frozen=True, slots=True)
class Processor:
    """How MLAS packs the right side of integer products: rows are padded to a multiple of these numbers, by the signs
    of both sides; 0 where it is not packed. `filters`: of what convolutions with symmetric weights are a multiple.

    Source: onnxruntime/core/mlas/lib/platform.cpp, qgemm_kernel_avx2.cpp, qgemm_kernel_amx.cpp, convsym.cpp (PackedK,
    KernelOutputChannelAlignment); the numbers of AVX-512 were measured on onnxruntime 1.32.
    """

    u8s8: int = 4
    u8u8: int = 2
    s8: int = 0
    filters: int = 4

    def rows(self, left_signed: bool, right_signed: bool) -> int:
        """The multiple of rows for the signs of the two sides."""
        if left_signed:
            return self.s8
        return self.u8s8 if right_signed else self.u8u8


AVX512 = Processor()
AVX2 = Processor(filters=8)
WIDEST = Processor(64, 64, 64)  # AMX pads to 64 rows; AVX-VNNI-INT8 packs signed products too
PROCESSORS = {"avx512": AVX512, "avx2": AVX2}  # what a user can name
BOUNDS = {**PROCESSORS, "widest": WIDEST}  # where nobody does


@dataclass(frozen=True, slots=True)
class Packing:
    """What a kernel does when the session is made. `kept` are bytes that stay in the arena, reserved beside its regions
    or, where `within`, a piece of them; `temporary` are requests that it gives back at once."""

    kept: int
    temporary: tuple[int, ...] = ()
    within: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A node as its rules see it. `sizes` are those of a run; a rule of packing has none."""

    node: ExecNode
    graph: ExecGraph
    sizes: RunSizes | None = None
    threads: int = 1
    processor: Processor = AVX512

    def constant(self, index: int) -> PlannedType | None:
        """The type of an input that is a constant of the graph or of one around it: such weights are packed."""
        name = self.name(index)
        return self.graph.constants.get(name) if name else None

    def name(self, index: int) -> str:
        """The name of an input, empty where there is none."""
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def value(self, index: int) -> Value | None:
        """An input in a run, None where it is missing or its sizes depend on data."""
        return self._value(self.name(index))

    def result(self, index: int) -> Value | None:
        """A result in a run."""
        return self._value(self.node.outputs[index] if index < len(self.node.outputs) else "")

    def shape(self, index: int) -> tuple[int, ...] | None:
        """The sizes of an input in a run."""
        value = self.value(index)
        return None if value is None else value.shape

    def result_shape(self, index: int = 0) -> tuple[int, ...] | None:
        """The sizes of a result in a run."""
        value = self.result(index)
        return None if value is None else value.shape

    def given(self, index: int) -> bool:
        """Whether a result is asked for."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def text(self, name: str, default: str = "") -> str:
        """An attribute that is a text."""
        attribute = next((a.s for a in self.node.proto.attribute if a.name == name), None)
        return attribute.decode("utf-8", "replace") if attribute is not None else default

    def signed(self, index: int) -> bool | None:
        """Whether an input has signed bytes, None where its type is not known."""
        kind = self.graph.planned(self.name(index))
        return None if kind is None else kind.dtype.name == "int8"

    def _value(self, name: str) -> Value | None:
        value = self.sizes.values.get(name) if name and self.sizes is not None else None
        sized = value is not None and value.shape is not None and min(value.shape, default=0) >= 0
        return value if sized else None


PackRule = Callable[[Kernel], Packing | None]  # None: not known
WorkRule = Callable[[Kernel], Sequence[int] | None]  # requests in bytes; None: not known


def matrix(kind: PlannedType | None, rank: int | None = None) -> tuple[int, ...] | None:
    """The sizes of a constant, None where it is none or has another rank."""
    if kind is None or kind.dims is None or (rank is not None and len(kind.dims) != rank):
        return None
    sizes = tuple(d for d in kind.dims if isinstance(d, int))
    return sizes if len(sizes) == len(kind.dims) and min(sizes, default=0) >= 0 else None


_COLUMNS = 16  # MLAS_SGEMM_STRIDEN_THREAD_ALIGN, MLAS_QGEMM_STRIDEN_THREAD_ALIGN
_ALIGNMENT = 64  # MlasGetPreferredBufferAlignment


def float_pack(columns: int, rows: int) -> int:
    """Bytes of a packed right side of float32 (MlasGemmPackBSize of core/mlas/lib/sgemm.cpp)."""
    return round_up(round_up(columns, _COLUMNS) * rows * 4, _ALIGNMENT)


def integer_pack(columns: int, rows: int, multiple: int) -> int:
    """Bytes of a packed right side of bytes, with the sums of its columns (MlasGemmPackBSize of qgemm.cpp)."""
    if not multiple:
        return 0
    wide = round_up(columns, _COLUMNS)
    return round_up(wide * 4 + wide * round_up(rows, multiple), _ALIGNMENT)


def elements(shape: Sequence[int]) -> int:
    return math.prod(shape)
