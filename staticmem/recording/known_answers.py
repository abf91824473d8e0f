"""What packages ask of tensors, answered while a model is recorded as tensors of a GPU with contents would.

Tensors of a recording have no contents, and code that sees so may do what it does for compilers. transformers looks
whether position ids count up without a break, as they do where each row is one sequence; for tensors without data it
makes a mask of packed sequences instead, with which attention runs other kernels. Recorded is the step with real
tensors: one sequence a row. It also leaves regions of `torch.autocast` out on the meta device, which stands for the
GPU here.

Source: transformers/masking_utils.py (`find_packed_sequence_indices`, `_preprocess_mask_arguments`),
transformers/utils/generic.py (`maybe_autocast`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

MASKS = "transformers.masking_utils"
FIND = "find_packed_sequence_indices"
# asked for the expansion of position ids alone, a view that nothing but the search above reads
OF_VIEWS = frozenset(((f"{MASKS.replace('.', '/')}.py", "_preprocess_mask_arguments"),))


GENERIC, REGION = "transformers.utils.generic", "maybe_autocast"


@contextmanager
def known_answers() -> Iterator[None]:
    """Within it code gets the answers of real tensors."""
    find: Any = getattr(sys.modules.get(MASKS), FIND, None)
    region: Any = getattr(sys.modules.get(GENERIC), REGION, None)

    def one_sequence_a_row(position_ids: Any) -> None:
        find(position_ids)  # its ops run

    def on_gpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return region("cuda" if device_type == "meta" else device_type, *args, **kwargs)

    with ExitStack() as stack:
        if find is not None:
            stack.enter_context(mock.patch.object(sys.modules[MASKS], FIND, one_sequence_a_row))
        if region is not None:
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] == "transformers" and vars(module).get(REGION) is region:
                    stack.enter_context(mock.patch.object(module, REGION, on_gpu))
        yield
