"""Frozen dataclasses that are cheap to make: a graph of a million nodes has several million of them.

`frozen=True` sets each field through `object.__setattr__`, which makes an `Op` take seven times as long (1.7 against
0.23 microseconds, Python 3.11). So type checkers see a frozen dataclass and reject every assignment, and at run time
the class has slots and is hashed by its fields, as a frozen one is, without the guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    from dataclasses import dataclass

    def record(**_words):
        """`dataclass(frozen=True, slots=True)` as above."""
        return lambda cls: dataclass(slots=True, unsafe_hash="__hash__" not in vars(cls))(cls)


__all__ = ["record"]
