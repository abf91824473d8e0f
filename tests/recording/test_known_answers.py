"""Code that asks for the contents of tensors is recorded with the answer of real ones."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from staticmem.recording.tracing import FIND, GENERIC, MASKS, REGION

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


def test_regions_without_autocast_are_regions_on_the_meta_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers has it: where autocast is not on, or the device is meta, the region is left out."""
    from contextlib import nullcontext

    from staticmem.recording.record import record

    def maybe_autocast(device_type: str, enabled: bool = True) -> Any:
        if device_type == "meta":
            return nullcontext()
        on = torch.is_autocast_enabled(device_type) or enabled
        return torch.autocast(device_type, enabled=enabled) if on else nullcontext()

    generic, user = ModuleType(GENERIC), ModuleType("transformers.models.own")
    for module in (generic, user):
        setattr(module, REGION, maybe_autocast)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, x: Any) -> Any:
            half = x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled() else x
            with getattr(user, REGION)(x.device.type, enabled=False):
                return half.exp().sum() + (half @ half.T).sum()

    document = record(Net(), (torch.empty(2, 4, device="meta"),))
    modes = {tuple(mode): program["ops"] for program in document["programs"] for mode in program["modes"]}
    assert set(modes) == {(t, amp) for t in (True, False) for amp in (None, "bfloat16")}
    half = [document["targets"][op[0]] for op in modes[True, "bfloat16"]]
    assert half == [
        "aten::to.dtype",
        "aten::exp",
        "aten::sum",
        "aten::numpy_T",
        "aten::matmul",
        "aten::sum",
        "aten::add.Tensor",
    ]
    flags = [op[5] if len(op) > 5 else 0 for op in modes[True, "bfloat16"]]
    assert flags[0] == 0  # as in most ops of the mode: under autocast
    assert all(flags[1:])
    assert getattr(user, REGION) is maybe_autocast
