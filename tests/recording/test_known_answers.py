"""Code that asks for the contents of tensors is recorded with the answer of real ones."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from staticmem.recording.known_answers import FIND, MASKS

torch = pytest.importorskip("torch")


def test_positions_that_count_up_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers asks: with real tensors it finds one sequence a row, with those of a recording it cannot look."""
    from staticmem.recording.record import record

    masks: Any = ModuleType(MASKS)

    def find(position_ids: Any) -> Any:
        mask = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        fake = isinstance(mask, torch._subclasses.FakeTensor)
        return None if not fake and bool((mask[:, -1] == 0).all()) else mask

    setattr(masks, FIND, find)
    monkeypatch.setitem(sys.modules, MASKS, masks)

    class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, x: Any) -> Any:
            packed = getattr(sys.modules[MASKS], FIND)(torch.arange(x.shape[1], device=x.device)[None])
            return x.exp() if packed is None else x.masked_fill(packed == 0, 0.0)

    real = Net()(torch.ones(1, 4))
    assert torch.equal(real, torch.ones(1, 4).exp())
    targets = record(Net(), (torch.empty(2, 4, device="meta"),))["targets"]
    assert "aten::exp" in targets
    assert "aten::cumsum" in targets  # it looked
    assert "aten::masked_fill.Scalar" not in targets
    assert getattr(sys.modules[MASKS], FIND) is find
