"""Ops that PyTorch has several names for: a model takes the same memory by any of them."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

import staticmem

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Attention(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, product: Any, softmax: Any, join: Any, scale: Any) -> None:
        super().__init__()
        self.calls = product, softmax, join, scale
        self.query, self.key, self.out = (torch.nn.Linear(wide, 64) for wide in (64, 64, 128))

    def forward(self, x: Any) -> Any:
        product, softmax, join, scale = self.calls
        weights = softmax(scale(product(self.query(x), self.key(x).transpose(-1, -2)), 8.0), -1)
        values = product(weights, x)
        parts = [values, x * values]
        return self.out(join(parts, -1))


@pytest.mark.parametrize("mode", [{"mode": "infer"}, {"optimizer": "adam", "amp": "bf16"}])
@pytest.mark.parametrize("file", ["a.pt2", "a.onnx"])
def test_figures_are_those_of_the_other_name(file: str, mode: dict[str, str], tmp_path: Path) -> None:
    names = (torch.matmul, torch.softmax, torch.cat, torch.div)
    aliases = (torch.linalg.matmul, torch.special.softmax, torch.concatenate, torch.true_divide)
    peaks = []
    logging.disable(logging.WARNING)
    for calls in (names, aliases):
        net = torch.nn.Sequential(*(Attention(*calls) for _ in range(2)))
        path, inputs = str(tmp_path / file), (torch.zeros(8, 128, 64),)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if file.endswith("pt2"):
                torch.export.save(torch.export.export(net, inputs), path)
            else:
                torch.onnx.export(net, inputs, path, dynamo=True, verbose=False)
        peaks.append(staticmem.analyze(path, **mode).peak.live_bytes)  # type: ignore[arg-type]
    logging.disable(logging.NOTSET)
    assert peaks[0] == peaks[1]
