"""What packages ask of the contents of tensors, answered while a model is recorded.

Tensors of a recording have no contents, and code that sees so may do what it does for compilers. transformers looks
whether position ids count up without a break, as they do where each row is one sequence; for tensors without data it
makes a mask of packed sequences instead, with which attention runs other kernels. Recorded is the step with real
tensors: one sequence a row.

Source: transformers/masking_utils.py (`find_packed_sequence_indices`, `_preprocess_mask_arguments`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

MASKS = "transformers.masking_utils"
FIND = "find_packed_sequence_indices"
# asked for the expansion of position ids alone, a view that nothing but the search above reads
OF_VIEWS = frozenset(((f"{MASKS.replace('.', '/')}.py", "_preprocess_mask_arguments"),))


@contextmanager
def known_answers() -> Iterator[None]:
    """Within it code gets the answers of real tensors."""
    find = getattr(sys.modules.get(MASKS), FIND, None)
    if find is None:
        yield
        return

    def one_sequence_a_row(position_ids: Any) -> None:
        find(position_ids)  # its ops run

    with mock.patch.object(sys.modules[MASKS], FIND, one_sequence_a_row):
        yield
