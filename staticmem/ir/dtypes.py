"""Element types: PyTorch's names, with their sizes in bytes.

Sources: `torch.dtype` docs for names and sizes; the code numbers of `torch.export` archives are `ScalarType` of
`torch/_export/serde/schema.py` (schema major 8); ONNX numbers are `TensorProto.DataType` of `onnx/onnx.proto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class DType:
    """An element type, one object each.

    `itemsize` is in bytes (sub-byte types count whole bytes once packed: see `bits`).
    """

    name: str
    bits: int
    kind: str  # "float", "complex", "int" or "bool"

    @property
    def itemsize(self) -> int:
        return max(1, self.bits // 8)

    @property
    def is_floating_point(self) -> bool:
        return self.kind == "float"

    @property
    def is_differentiable(self) -> bool:
        return self.kind in ("float", "complex")

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` packed elements."""
        return (numel * self.bits + 7) // 8

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        return _of_name, (self.name,)  # copies and other processes have the same object


float64 = DType("float64", 64, "float")
float32 = DType("float32", 32, "float")
float16 = DType("float16", 16, "float")
bfloat16 = DType("bfloat16", 16, "float")
float8_e4m3fn = DType("float8_e4m3fn", 8, "float")
float8_e4m3fnuz = DType("float8_e4m3fnuz", 8, "float")
float8_e5m2 = DType("float8_e5m2", 8, "float")
float8_e5m2fnuz = DType("float8_e5m2fnuz", 8, "float")
float8_e8m0fnu = DType("float8_e8m0fnu", 8, "float")
complex64 = DType("complex64", 64, "complex")
complex128 = DType("complex128", 128, "complex")
complex32 = DType("complex32", 32, "complex")
int64 = DType("int64", 64, "int")
int32 = DType("int32", 32, "int")
int16 = DType("int16", 16, "int")
int8 = DType("int8", 8, "int")
uint8 = DType("uint8", 8, "int")
uint16 = DType("uint16", 16, "int")
uint32 = DType("uint32", 32, "int")
uint64 = DType("uint64", 64, "int")
int4 = DType("int4", 4, "int")
uint4 = DType("uint4", 4, "int")
int2 = DType("int2", 2, "int")
uint2 = DType("uint2", 2, "int")
float4_e2m1 = DType("float4_e2m1", 4, "float")
bool_ = DType("bool", 8, "bool")
string = DType("string", 0, "string")

HALVES = (bfloat16, float16)  # the 16-bit types that models train and run in

ALL = {
    d.name: d
    for d in (
        float64, float32, float16, bfloat16, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz,
        float8_e8m0fnu, complex64, complex128, complex32, int64, int32, int16, int8, uint8, uint16, uint32, uint64,
        int4, uint4, int2, uint2, float4_e2m1, bool_, string,
    )
}  # fmt: skip


def _of_name(name: str) -> DType:
    return ALL[name]


ALIASES = {
    "fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32", "fp16": "float16",
    "half": "float16", "bf16": "bfloat16", "long": "int64", "int": "int32",
}  # fmt: skip

# torch/_export/serde/schema.py, class ScalarType
PT2_CODES = {
    1: uint8, 2: int8, 3: int16, 4: int32, 5: int64, 6: float16, 7: float32, 8: float64, 9: complex32,
    10: complex64, 11: complex128, 12: bool_, 13: bfloat16, 28: uint16, 29: float8_e4m3fn, 30: float8_e5m2,
    31: float8_e4m3fnuz, 32: float8_e5m2fnuz,
}  # fmt: skip

# onnx/onnx.proto, TensorProto.DataType
ONNX_CODES = {
    1: float32, 2: uint8, 3: int8, 4: uint16, 5: int16, 6: int32, 7: int64, 8: string, 9: bool_, 10: float16,
    11: float64, 12: uint32, 13: uint64, 14: complex64, 15: complex128, 16: bfloat16, 17: float8_e4m3fn,
    18: float8_e4m3fnuz, 19: float8_e5m2, 20: float8_e5m2fnuz, 21: uint4, 22: int4, 23: float4_e2m1,
    25: uint2, 26: int2,
}  # fmt: skip


def parse(name: str) -> DType | None:
    """The element type of a PyTorch name or a common short name (`fp16`, `bf16`), else None."""
    name = name.removeprefix("torch.").lower()
    return ALL.get(ALIASES.get(name, name))


_ORDER = {"bool": 0, "int": 1, "float": 2, "complex": 3}


def promote(a: DType, b: DType) -> DType:
    """The result type of two tensors of equal priority, as `torch.promote_types` (c10/core/ScalarType.cpp)."""
    if a is b:
        return a
    if _ORDER.get(a.kind, 0) != _ORDER.get(b.kind, 0):
        return a if _ORDER.get(a.kind, 0) > _ORDER.get(b.kind, 0) else b
    if a.bits != b.bits:
        if a.kind == "int" and {a.name, b.name} & {"uint8"}:
            return a if a.bits > b.bits else b
        return a if a.bits > b.bits else b
    if a.kind == "float":  # bfloat16 with float16
        return float32
    if {a.name, b.name} == {"uint8", "int8"}:
        return int16
    return a


_REAL = {complex32: float16, complex64: float32, complex128: float64}
_COMPLEX = {float: value for value, float in _REAL.items()}


def real_of(dtype: DType) -> DType:
    """The type of the real and imaginary part (`c10::toRealValueType`)."""
    return _REAL.get(dtype, dtype)


def complex_of(dtype: DType) -> DType:
    """The complex type of a real one (`c10::toComplexType`); integers are taken as float32, the default type."""
    return dtype if dtype.kind == "complex" else _COMPLEX.get(dtype, complex64)
