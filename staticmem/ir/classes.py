"""Names of module classes: one, or where a file leaves several possible, `A or B`."""

from __future__ import annotations

from collections.abc import Iterable

OR = " or "


def any_of(classes: Iterable[str]) -> str:
    """The name of a class that is one of these."""
    return OR.join(classes)


def alternatives(cls: str) -> tuple[str, ...]:
    """The classes that a frame's may be."""
    return tuple(cls.split(OR)) if OR in cls else (cls,)


def short(cls: str) -> str:
    """Without modules: `Bottleneck`; `A or B` only where the classes have different names."""
    if OR not in cls:
        return cls.rpartition(".")[2]
    return OR.join(dict.fromkeys(name.rpartition(".")[2] for name in alternatives(cls)))


__all__ = ["alternatives", "any_of", "short"]
