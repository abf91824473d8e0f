"""The largest batch and levers from Python, in the words of `staticmem.analyze`."""

from __future__ import annotations

import os
from typing import Any

from staticmem.errors import UsageError
from staticmem.report.model import LargestBatch
from staticmem.report.sweep import Levers
from staticmem.studies import Study, request_of
from staticmem.units import parse_bytes


def max_batch(path: str | os.PathLike[str], gpu: str, **words: Any) -> LargestBatch:
    """The largest batch of a model on a card, confirmed by full analyses of it and of the next.

    Args:
        path: an ONNX file or an archive of torch.export.
        gpu: a card by name or size.
        words: as for `staticmem.analyze`: optimizer, resolution, dims, amp, checkpoint, ...

    Raises:
        StaticmemError: the batch of the model is fixed, or it cannot be analysed.
    """
    from staticmem.studies.sweeps.largest import largest_batch

    return largest_batch(Study.open(path, request_of(words)), gpu)


def levers(path: str | os.PathLike[str], *, budget: int | str | None = None, **words: Any) -> Levers:
    """What would make a step smaller, those levers first that save most.

    Args:
        path: an ONNX file or an archive of torch.export.
        budget: bytes that the step may need, or text such as "16GiB": looks for a set of checkpoints that reaches it.
        words: as for `staticmem.analyze`; with `gpu` it is device memory that is saved.

    Raises:
        StaticmemError: the step cannot be analysed as it was asked for.
    """
    from staticmem.studies.sweeps.levers import levers as found

    limit = parse_bytes(budget) if isinstance(budget, str) else budget
    if budget is not None and not limit:
        raise UsageError(f"the budget {budget!r} is not a size", "It is bytes, or text.", "Example: '16GiB'", "SM195")
    request = request_of(words)
    return found(Study.open(path, request), request.gpu, limit)
