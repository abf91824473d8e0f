"""Losses that match predictions with targets, as those of detectors do, computed without data.

How many pairs there are follows from sizes alone, and which ones there are changes no size: a matching of an (n, m)
matrix of costs has min(n, m) of them (scipy, `linear_sum_assignment`). The code asks that boxes be no wrong ones, which
those of a network that trains are not.

Sources: transformers 5.24, loss/loss_for_object_detection.py, `HungarianMatcher`, `generalized_box_iou`;
models/maskformer/modeling_maskformer.py, `MaskFormerHungarianMatcher`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_MATCH, _OVERLAP = "linear_sum_assignment", "generalized_box_iou"


@contextmanager
def matched_without_data() -> Iterator[None]:
    """Within it the functions of transformers that match take tensors without data."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    with ExitStack() as stack:
        for module in modules:
            own = getattr(module, "__dict__", {})
            if callable(own.get(_MATCH)):
                stack.enter_context(mock.patch.dict(own, {_MATCH: _pairs}))
            if callable(own.get(_OVERLAP)):
                stack.enter_context(mock.patch.dict(own, {_OVERLAP: _of_right_boxes(own[_OVERLAP])}))
        yield


def _pairs(costs: Any, maximize: bool = False) -> tuple[Any, Any]:
    import numpy as np

    count = min(int(n) for n in costs.shape)
    return np.arange(count), np.arange(count)


def _of_right_boxes(overlap: Any) -> Any:
    def computed(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.Tensor, "__bool__", return_value=True):
            return overlap(*args, **kwargs)

    return computed
