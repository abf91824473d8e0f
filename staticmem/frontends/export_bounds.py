"""Sizes that only the data tells (`u0` in an export), as large as they can get at the sizes of the inputs.

The ops that make them say how large: `nonzero` has at most a row for each element. Where a number is read from a tensor
(`item`), nothing bounds it, and the user has to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from staticmem.errors import DimensionError
from staticmem.frontends import fields
from staticmem.ir import dtypes, expressions
from staticmem.ir.graph import Note, Value

_TARGETS = (
    "nonzero", "argwhere", "masked_select", "index", "_unique2", "unique_dim", "unique_consecutive", "nms", "bincount",
)  # fmt: skip


class DataBounds:
    """Gives unbacked symbols a value, and notes it. `symbols` is extended; `sized` gives a tensor's size."""

    def __init__(self, symbols: dict[str, int], tensors: Mapping[str, Any], sized: Callable[[str], Value]) -> None:
        self.symbols, self.tensors, self.sized = symbols, tensors, sized
        self.assumed: dict[str, tuple[int, str]] = {}

    def of(self, node: Mapping[str, Any], target: str, outputs: tuple[str, ...]) -> int | None:
        """The size of the result's dimension that depends on data, for ops that have one."""
        op = target.split(".")[-2] if target.count(".") >= 2 else ""
        if op not in _TARGETS or not outputs or outputs[0] not in self.tensors:
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
