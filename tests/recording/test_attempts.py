"""Which sizes of a recording are left open: the order in which it is tried."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from staticmem.errors import ModelFileError  # noqa: E402
from staticmem.recording import attempts  # noqa: E402
from staticmem.recording.record import record  # noqa: E402

pytestmark = pytest.mark.torch


SEEN: list[int] = []  # how many sizes are open in each call; what a module has is put back after each


class Counted(torch.nn.Module):  # type: ignore[misc]
    """Fails while it has sizes that are open, as many as it is told."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.most = most

    def forward(self, x: Any) -> Any:
        count = sum(isinstance(n, torch.SymInt) for n in x.shape)
        SEEN.append(count)
        if count > self.most:
            raise ValueError("no such sizes")
        return x * self.scale


@pytest.mark.parametrize(
    ("most", "batch", "seen", "open_axes"),
    [
        (4, 2, [4], 4),
        (1, 2, [4, 0, 2, 1], 1),  # with all fixed it runs: then what stays open is looked for
        (0, 2, [4, 0, 2, 1], 0),  # the recording with all fixed is kept
        (-1, 2, [4, 0], None),  # nor does it run so: no other is tried
        (-1, 1, [4, 2, 1, 0], None),  # a batch of 1 is recorded as 2 where it is open
    ],
)
def test_what_fails_with_fixed_sizes_is_tried_no_further(
    most: int, batch: int, seen: list[int], open_axes: int | None
) -> None:
    module, inputs = Counted(most), [torch.zeros(batch, 3, 8, 16)]
    SEEN.clear()
    if open_axes is None:
        with pytest.raises(ModelFileError, match="no such sizes"):
            record(module, inputs, part="inference")
    else:
        shape = record(module, inputs, part="inference")["inputs"][0][2]
        assert sum(isinstance(n, str) for n in shape) == open_axes
    assert list(dict.fromkeys(SEEN)) == seen


@pytest.mark.parametrize("on_demand", [True, False])
def test_sizes_that_take_too_long_are_closed(on_demand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "OPEN_SECONDS", 0.0)
    module, inputs = Counted(4), [torch.zeros(2, 3, 8, 16)]
    with attempts.closed_when_late() if on_demand else contextlib.nullcontext():
        shape = record(module, inputs, part="inference")["inputs"][0][2]
    assert sum(isinstance(n, str) for n in shape) == (0 if on_demand else 4)
