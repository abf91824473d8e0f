"""A path or an object and a request become a `Report`, for the command line and for Python (api.py)."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from staticmem.report.model import Report
from staticmem.scenario.request import ALL, Request, request_of
from staticmem.studies.study import Study

__all__ = ["ALL", "Request", "Study", "request_of", "run", "without_cycle_search"]


@contextmanager
def without_cycle_search() -> Iterator[None]:
    """Python's cyclic collector off: an analysis makes many objects that all live to its end, so that each of its
    searches finds nothing and costs a third of the time. What the analysis leaves, later searches find.

    At the end survivors move to the oldest generation: else the first search after it would go through every object of
    the report.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def run(model: object, request: Request, inputs: Sequence[Any] | None = None) -> Report:
    """The report of a request on a file or on an object."""
    with without_cycle_search():
        return Study.open(model, request, inputs).report
