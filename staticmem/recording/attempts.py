"""In which order a recording is tried with sizes open and closed, and for how long each time.

Arithmetic of open sizes is a hundred times that of numbers where code loops over them or pads images to windows: a
recording that takes too long with some open has them closed. Who asks for other sizes gets another recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from staticmem.recording.tracing import Axes

OPEN_SECONDS = 20.0  # of CPU with sizes open, after which they are closed: DaViT then takes 50 in all, and took 600

_limits: list[float] = []  # where a recording is made on demand
_ends: list[float] = []  # of attempts that are under way


class TooLongError(BaseException):
    """A recording with open sizes has used its time. No error of the code, which nobody may catch on the way."""


def check_time() -> None:
    """Called at every op.

    Raises:
        TooLongError: the time is over.
    """
    if _ends and time.process_time() > _ends[-1]:
        raise TooLongError


@contextmanager
def closed_when_late() -> Iterator[None]:
    """Within it sizes are closed that take long: of models that are recorded on demand, anew for other sizes."""
    _limits.append(OPEN_SECONDS)
    try:
        yield
    finally:
        _limits.pop()


@contextmanager
def _limited(opened: Sequence[Axes]) -> Iterator[None]:
    """Within it a recording has so much time; all it needs where no size is open."""
    seconds = _limits[-1] if _limits and any(opened) else float("inf")
    _ends.append(time.process_time() + seconds)
    try:
        yield
    finally:
        _ends.pop()


def first_accepted(
    attempts: Sequence[list[Axes]],
    documents: Callable[[list[Axes]], Iterator[dict[str, Any]]],
    accept: Callable[[dict[str, Any]], bool],
    probes: bool,
) -> dict[str, Any] | None:
    """The document of the first attempt that has one. Where code fails with all sizes open, and `probes`, it is tried
    with all of them closed first: what fails then too needs no other attempt. An attempt that takes too long is
    followed by one with the sides of images closed, and that by one with all of them closed."""
    rungs, closed, of_closed = list(attempts), attempts[-1], None
    while rungs:
        opened, answered = rungs.pop(0), False
        try:
            with _limited(opened):
                for document in documents(opened):
                    answered = True
                    if accept(document):
                        if opened is not closed or not rungs:
                            return document
                        of_closed = document
                        break
        except TooLongError:
            if of_closed is not None:
                return of_closed
            rungs = [rung for rung in rungs[:1] if _has_images(opened) and rung is not closed] + [closed]
            continue
        if opened is closed and not answered:
            return None
        if probes and not answered and opened is attempts[0] and rungs:
            rungs.insert(0, rungs.pop())
    return of_closed


def _has_images(axes: Sequence[Axes]) -> bool:
    return any(name.startswith(("height", "width")) for names in axes for name in names.values())
