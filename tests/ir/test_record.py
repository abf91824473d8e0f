"""Records are dataclasses to whoever uses them: compared, hashed, shown, copied and pickled by their fields."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import pytest

from staticmem.ir.record import guarded, record


@dataclass(frozen=True)
class Plain:
    size: int
    name: str = "x"
    note: str = field(default="", compare=False)
    key: str = field(default="k", repr=False)


@record(frozen=True)
class Open:
    size: int
    name: str = "x"
    note: str = field(default="", compare=False)
    key: str = field(default="k", repr=False)

    @cached_property
    def double(self) -> int:
        return 2 * self.size


@record(frozen=True, slots=True)
class Slotted:
    size: int
    name: str = "x"
    note: str = field(default="", compare=False)
    key: str = field(default="k", repr=False)


@guarded(frozen=True, slots=True)
class Guarded:
    size: int
    name: str = "x"
    note: str = field(default="", compare=False)
    key: str = field(default="k", repr=False)


@record(frozen=True, slots=True)
class Empty:
    pass


@record(frozen=True, slots=True)
class Own:
    size: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "own"


MADE = pytest.mark.parametrize("made", [Open, Slotted, Guarded])


@MADE
def test_as_a_frozen_dataclass(made: Any) -> None:
    for one, other in (
        ((1,), (1,)),
        ((1,), (2,)),
        ((1, "y"), (1, "z")),
        ((1, "y", "a"), (1, "y", "b")),
        ((1,), (1.0,)),
    ):
        assert (made(*one) == made(*other)) == (Plain(*one) == Plain(*other))
    assert made(1) != Plain(1)
    assert made(1) != (1, "x", "k")
    assert hash(made(3, "y", "a")) == hash(made(3, "y", "b")) != hash(made(4, "y"))
    assert repr(made(3, "y")) == repr(Plain(3, "y")).replace("Plain", made.__name__)
    assert [f.name for f in fields(made)] == [f.name for f in fields(Plain)]
    assert replace(made(3), name="z") == made(3, "z")
    assert pickle.loads(pickle.dumps(made(3, "y"))) == made(3, "y")


def test_one_field_or_none() -> None:
    assert Empty() == Empty()
    assert hash(Empty()) == hash(Empty())
    assert repr(Empty()) == "Empty()"


def test_what_a_class_says_itself_stays() -> None:
    assert Own(1) == Own(2)
    assert hash(Own(1)) == 7
    assert repr(Own(1)) == "own"


def test_what_contains_itself_can_be_shown() -> None:
    inner: list[Any] = []
    outer = Slotted(inner)  # type: ignore[arg-type]
    inner.append(outer)
    assert repr(outer).startswith("Slotted(size=[...")


def test_what_users_are_given_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Guarded(1).size = 2  # type: ignore[misc]


def test_without_slots_there_is_room_for_what_is_worked_out_later() -> None:
    assert Open(2).double == 4
    assert not hasattr(Slotted(2), "__dict__")


def test_a_record_that_extends_another_shows_all_of_its_fields() -> None:
    @record(frozen=True)
    class Base:
        a: int = 1

    @record(frozen=True)
    class Extended(Base):
        b: int = 2

    assert repr(Extended()).endswith("Extended(a=1, b=2)")
