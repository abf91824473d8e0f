"""Frozen dataclasses that are cheap to define and to make.

To make: a graph of a million nodes has several million of them. `frozen=True` sets each field through
`object.__setattr__`, which makes an `Op` take seven times as long (1.7 against 0.23 microseconds, Python 3.11). So type
checkers see a frozen dataclass in a `record` and reject every assignment, and at run time it is hashed by its fields,
as a frozen one is, without the guard. What users are given is `guarded`: frozen at run time too.

To define: each start of the program defines about ninety, and `dataclass` compiles six methods of each, which takes
half a millisecond. Here only `__init__` is compiled (0.13 ms); what compares and shows them is one code for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as guarded
    from dataclasses import dataclass as record
else:
    from dataclasses import dataclass, fields
    from operator import attrgetter
    from reprlib import recursive_repr

    def record(slots=False, kw_only=False, **_words):
        """`dataclass(frozen=True)` without the guard."""
        return lambda cls: _compared(dataclass(eq=False, repr=False, slots=slots, kw_only=kw_only)(cls))

    def guarded(slots=False, **_words):
        """`dataclass(frozen=True)`."""
        return lambda cls: _compared(dataclass(eq=False, repr=False, slots=slots, frozen=True)(cls))

    def _compared(cls):
        names = [field.name for field in fields(cls) if field.compare]
        values = attrgetter(*names) if names else lambda self: ()

        shown = [field.name for field in fields(cls) if field.repr]

        def equal(self, other):
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        def hashed(self):
            return hash(values(self))

        @recursive_repr()
        def text(self):
            said = ", ".join([f"{name}={getattr(self, name)!r}" for name in shown])
            return f"{self.__class__.__qualname__}({said})"

        for name, method in (("__eq__", equal), ("__hash__", hashed), ("__repr__", text)):
            inherited = name == "__repr__" and getattr(cls.__repr__, "__module__", __name__) != __name__
            if name not in vars(cls) and not inherited:
                setattr(cls, name, method)
        return cls


__all__ = ["guarded", "record"]
