"""Sizes that an export leaves open or has otherwise than the user.

- Those that only the data tells (`u0`), as large as they can get at the sizes of the inputs. The ops that make them say
  how large: `nonzero` has at most a row for each element. Where a number is read from a tensor (`item`), nothing bounds
  it, and the user has to.
- Derived input sizes (2*s0), which have to agree with their symbols.
- A batch that the export fixed. A static export repeats its batch size as a number in views (`view(x, [2, 512])`).
  Where the tensor depends on a rebound input and the number is the first one, the number follows. Anything else that
  repeats it ends in an error: of the rule that finds sizes that do not fit, or here, where a `-1` beside it would hide
  that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from staticmem.errors import DimensionError
from staticmem.frontends import fields
from staticmem.ir import dtypes, expressions
from staticmem.ir.graph import Note, Op, Ref, Value
from staticmem.ir.model_file import Binding, InputSpec
from staticmem.ops.registry import RESHAPES
from staticmem.ops.tags import DATA_SIZED


class DataBounds:
    """Gives unbacked symbols a value, and notes it. `symbols` is extended; `sized` gives a tensor's size."""

    def __init__(self, symbols: dict[str, int], tensors: Mapping[str, Any], sized: Callable[[str], Value]) -> None:
        self.symbols, self.tensors, self.sized = symbols, tensors, sized
        self.assumed: dict[str, tuple[int, str]] = {}

    def of(self, node: Mapping[str, Any], target: str, outputs: tuple[str, ...]) -> int | None:
        """The size of the result's dimension that depends on data, for ops that have one."""
        op = target.split(".")[-2] if target.count(".") >= 2 else ""
        if (f"aten::{op}" not in DATA_SIZED and op != "nms") or not outputs or outputs[0] not in self.tensors:
            return None
        symbol = self._symbol(outputs[0])
        if symbol is None:
            return None
        if symbol not in self.symbols:
            try:
                bound = self._most(op, [fields.mapping(item["arg"]) for item in fields.items(node["inputs"])])
            except DimensionError:
                bound = None
            if bound is None:
                return None
            self.symbols[symbol] = bound
            self.assumed[symbol] = (bound, op)
        return self.symbols[symbol]

    def notes(self) -> list[Note]:
        """One note for each symbol that took its largest value."""
        text = "{0} is in the data and was taken as {1:,}, the most that {2} can give (--dim {0}=N sets it)"
        return [
            Note("assumption", "SM326", text.format(symbol, bound, op)) for symbol, (bound, op) in self.assumed.items()
        ]

    def _symbol(self, name: str) -> str | None:
        for size in fields.items(self.tensors[name]["sizes"]):
            if "as_expr" in size:
                parsed = expressions.parse(fields.text(size["as_expr"]["expr_str"]))
                if isinstance(parsed, str) and parsed.startswith("u"):
                    return parsed
        return None

    def _most(self, op: str, args: list[Mapping[str, Any]]) -> int | None:
        shapes = [self._shape(a["as_tensor"]["name"]) for a in args if "as_tensor" in a]
        if op == "index":
            return self._masks(args[1:])
        if op == "masked_select":
            long, short = sorted(shapes[:2], key=len, reverse=True)
            padded = (1,) * (len(long) - len(short)) + short
            return math.prod(map(max, long, padded))
        if op == "nms":
            return shapes[0][0]
        if op == "bincount":
            return None
        if op == "unique_dim":
            return shapes[0][fields.integer(args[1]["as_int"])]
        return math.prod(shapes[0])

    def _masks(self, args: list[Mapping[str, Any]]) -> int | None:
        for arg in args:
            for listed in (fields.items(v) for k, v in arg.items() if k in ("as_tensors", "as_optional_tensors")):
                for item in listed:
                    name = item.get("name") or fields.mapping(item.get("as_tensor") or {}).get("name")
                    if name and self.sized(name).dtype in (dtypes.bool_, dtypes.uint8):
                        return math.prod(self._shape(name))
        return None

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.sized(fields.text(name)).shape
        return shape if shape is not None else ()


def check_derived(tensors: Mapping[str, Any], inputs: Sequence[InputSpec], binding: Binding) -> dict[str, int]:
    """The binding's symbols, with those that derived input sizes (2*s0) determine.

    Raises:
        DimensionError: a size is not one that the expression can have.
    """
    symbols = dict(binding.symbols)
    for spec in inputs:
        for axis, dim in enumerate(spec.shape or ()):
            if dim != f"{spec.name}[{axis}]":
                continue
            text = tensors[spec.name]["sizes"][axis]["as_expr"]["expr_str"]
            expression = expressions.parse(text)
            wanted = binding.shapes[spec.name][axis]
            open_symbols = expressions.symbols_of(expression) - set(symbols)
            if len(open_symbols) == 1:
                (name,) = open_symbols
                at_0, at_1 = (expressions.evaluate(expression, {**symbols, name: n}) for n in (0, 1))
                slope = at_1 - at_0
                symbols[name] = (wanted - at_0) // slope if slope else 1
            if expressions.symbols_of(expression) <= set(symbols):
                actual = expressions.evaluate(expression, symbols)
                if actual != wanted:
                    raise DimensionError(
                        f"dimension '{dim}' cannot be {wanted}",
                        f"The export computes it as {text[:120]}, which is {actual} here.",
                        "Choose a size that the expression can have.",
                        code="SM113",
                    )
    return symbols


class BatchRebinder:
    """Lets views follow batch sizes (axis 0 of inputs) that the export fixed."""

    def __init__(self, inputs: Sequence[InputSpec], binding: Binding) -> None:
        self.sizes: dict[int, int] = {}  # old batch -> new batch
        self.follows: set[str] = set()  # values that depend on a rebound input
        for spec in inputs:
            for axis, (old, new) in enumerate(zip(spec.shape or (), binding.shapes[spec.name], strict=True)):
                if isinstance(old, int) and old != new:
                    self.follows.add(spec.name)
                    if axis == 0:
                        self.sizes[old] = new

    def follow(self, ops: list[Op], recorded: Callable[[str], tuple[int, ...] | None]) -> list[Op]:
        """The ops with their views changed. `recorded` gives a value's shape in the file."""
        if not self.sizes:
            return ops
        return [self._followed(op, recorded) for op in ops]

    def _followed(self, op: Op, recorded: Callable[[str], tuple[int, ...] | None]) -> Op:
        source = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
        depends = any(name in self.follows for name in op.refs())
        if depends:
            self.follows.update(op.outputs)
        size = op.args[1] if len(op.args) == 2 else None
        if not isinstance(size, tuple) or not size or op.base not in (*RESHAPES, "aten::expand"):
            return op
        shape = recorded(source)
        old = size[0] if type(size[0]) is int else -1
        if op.base == "aten::expand":
            # a size-1 tensor that is made as long as the batch; with an old batch of 1 nobody can tell
            lengthens = bool(shape) and shape is not None and len(shape) == len(size) and shape[0] == 1 and old > 1
            if old in self.sizes and (depends or lengthens):
                return replace(op, args=(op.args[0], (self.sizes[old], *size[1:])))
            return op
        if not depends:
            return op
        if old in self.sizes and shape and shape[0] == old:
            return replace(op, args=(op.args[0], (self.sizes[old], *size[1:])))
        if -1 in size and any(type(s) is int and s > 1 and s in self.sizes for s in size):
            raise DimensionError(
                f"node '{op.name}' ({op.target}) repeats a batch size that the export fixed",
                f"Its sizes are {list(size)}, and the -1 among them would hide the contradiction.",
                "Export with that dimension dynamic.",
                code="SM118",
            )
        return op
