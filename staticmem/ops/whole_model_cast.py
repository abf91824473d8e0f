"""A whole-model cast (`--dtype bf16`) of a float32 export: how the explicit dtypes in its graph are read.

An export has resolved `x.dtype` to float32. Under a cast model the same code gives another dtype. Source lines tell
which it is (`passes.restoring.upcasts`: `Graph.named_float32` has the ops whose code names float32). Where they do
not, an explicit float32 is read as the code that most plausibly made it (transformers' RMSNorm and rotary embedding are
the patterns):

- `to(float32)` of a low-precision tensor is a real up-cast. In the export it returned its input, so later uses outside
  the module of the cast mean the input (`hidden = hidden.to(float32)` inside, the caller keeps its own variable).
- `to(float32)` of a float32 tensor is "back to the input's dtype": a down-cast.
- `to(float32)` of an integer tensor stays float32.
- `to.dtype_layout` is `x.to(device)`, for which PyTorch writes down the options that `x` has: it keeps the dtype
  (tools/autograd/templates/python_variable_methods.cpp, `dispatch_to` and its note).
- `empty`, `zeros`, `ones`, `full` in float32 follow the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import Graph, Op
from staticmem.ops.registry import kinds_of

TO_DEVICE = "aten::to.dtype_layout"


def cast_of(graph: Graph, dtype: DType | None) -> WholeModelCast | None:
    """The cast of a model to `dtype`; None where that is no 16-bit type, or the parameters of the file are in one
    already, or its code was recorded so: its casts to float32 are real ones then."""
    types = {p.value.dtype for p in graph.parameters if p.value.dtype.is_floating_point}
    if graph.recorded is not None and graph.recorded.cast:
        return None
    if dtype not in dtypes.HALVES or (types and types.issubset(dtypes.HALVES)):
        return None
    return WholeModelCast(dtype, graph.named_float32)


class WholeModelCast:
    """Rewrites explicit float32 dtypes of op arguments for a model cast to `low`, but for the ops in `named`. Tensors
    are what has a `dtype`: those of a step, and the nodes of a trace."""

    def __init__(self, low: DType, named: Set[str] = frozenset()) -> None:
        self.low, self.named = low, named

    def applies(self, op: Op) -> bool:
        return not kinds_of(op.base).isdisjoint(("cast", "factory"))

    def arguments(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with float32 replaced where the cast model would have the low dtype."""
        if op.name in self.named:
            return list(args), kwargs
        if "cast" in kinds_of(op.base):
            source = args[0]
            if op.target == TO_DEVICE and isinstance(getattr(source, "dtype", None), DType):
                kept = [source.dtype if isinstance(a, DType) else a for a in args]
                return kept, {k: source.dtype if isinstance(v, DType) else v for k, v in kwargs.items()}
            if getattr(source, "dtype", None) is not dtypes.float32:
                return list(args), kwargs
        return [self._swap(a) for a in args], {k: self._swap(v) for k, v in kwargs.items()}

    def _swap(self, value: Any) -> Any:
        return self.low if value is dtypes.float32 else value

    def is_upcast(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """A cast that was a no-op in the float32 export and is a real one here."""
        source = args[0] if args else None
        target = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, DType)), None)
        casts = "cast" in kinds_of(op.base) and op.target != TO_DEVICE and target is dtypes.float32
        return casts and getattr(source, "dtype", None) is self.low
