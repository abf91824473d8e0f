"""Symbolic sizes of fake tensors as text that `staticmem.ir.expressions` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# sympy's names of relations, as the parser of expressions has them
_RELATIONS = {"Equality": "Eq", "Unequality": "Ne", "GreaterThan": "Ge", "LessThan": "Le"}
_RELATIONS |= {"StrictGreaterThan": "Gt", "StrictLessThan": "Lt"}

_MOST_DIVIDED = 1 << 16  # by a larger number than the sides of images and patches a size is not divided


class Sizes:
    """Writes the sizes of one recording: an integer, or an expression of the names that the open axes have."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        self.names = dict(names)  # sympy symbol -> name
        self.bounds: dict[str, list[Any]] = {}  # of sizes that are in the data: [shape, op]
        self.counted: dict[str, list[int]] = {}  # of the example: the size, and the most that it can be

    def of(self, size: Any) -> int | str:
        """A size of a shape, or an integer argument of an op."""
        if isinstance(size, int):
            return size
        node = getattr(size, "node", None)
        if node is None:
            return int(size)
        expr = node.expr  # a SymInt that was specialised is an Integer
        if expr.is_Integer:
            return int(expr)
        return self.text(expr)

    def bound(self, sizes: Any, most: Any, op: str) -> None:
        """Sizes that an op reads from its data are at most the number of elements of its input."""
        for size in sizes:
            text = self.of(size)
            if isinstance(text, str) and text.startswith("u") and text[1:].isdigit():
                self.bounds.setdefault(text, [self.shape(most), op])

    def in_data(self) -> dict[str, list[int] | None]:
        """The sizes that are in the data, with what is known of the example."""
        unbacked = [name for name in self.names.values() if name.startswith("u") and name[1:].isdigit()]
        return {name: self.counted.get(name) for name in unbacked}

    def shape(self, sizes: Any) -> list[int | str]:
        return [self.of(size) for size in sizes]

    def text(self, expr: Any) -> str:
        """A sympy expression in the function notation that `torch.export` archives have too."""
        import sympy

        if isinstance(expr, sympy.Symbol):
            name = self.names.get(expr)
            if name is None:
                name = self.names[expr] = str(expr)
            return name
        if isinstance(expr, sympy.Integer):
            return str(int(expr))
        if isinstance(expr, sympy.Float):  # what Python calculated: `h / 4`
            expr = _fraction_of(float(expr))
            if expr.is_Integer:
                return str(int(expr))
        if isinstance(expr, sympy.Rational):
            return f"Rational({expr.p},{expr.q})"
        name = type(expr).__name__
        name = _RELATIONS.get(name, name)
        return f"{name}({','.join(self.text(arg) for arg in expr.args)})"


def _fraction_of(value: float) -> Any:
    """The fraction that Python divided to a number: sizes are divided without rounding when they are compared to it."""
    import sympy

    exact = sympy.Rational(value)
    simple = exact.limit_denominator(_MOST_DIVIDED)
    return simple if float(simple) == value else exact


def number(value: Any) -> float | int | bool:
    """A symbolic number that is no size, at the sizes of the example: scales and flags do not change bytes. One that
    comes out of a tensor is 1."""
    node = getattr(value, "node", None)
    if node is None:
        return value  # type: ignore[no-any-return]
    return node.pytype(1) if node.hint is None else node.hint  # type: ignore[no-any-return]
