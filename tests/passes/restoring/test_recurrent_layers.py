"""Recurrent layers of ONNX files: what `nn.LSTM` and `nn.GRU` run is one call, from every exporter."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.ops import kinds_of
from staticmem.studies import Request, Study

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

KINDS = {  # kind, layers, both directions, dropout, whether the last states are read
    "lstm": ("LSTM", 1, False, 0.0, False),
    "lstm of two layers": ("LSTM", 2, False, 0.0, False),
    "lstm in both directions": ("LSTM", 3, True, 0.2, True),
    "gru": ("GRU", 2, False, 0.0, True),
}


def model(kind: str, layers: int, both: bool, dropout: float, final: bool) -> Any:
    class Classifier(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            made = getattr(torch.nn, kind)
            self.embed = torch.nn.Embedding(100, 16)
            self.rnn = made(16, 48, layers, bidirectional=both, batch_first=True, dropout=dropout)
            self.head = torch.nn.Linear(48 * (2 if both else 1) * (layers if final else 1), 5)

        def forward(self, tokens: Any) -> Any:
            result, state = self.rnn(self.embed(tokens))
            if final:
                state = state[0] if isinstance(state, tuple) else state
                return self.head(state.transpose(0, 1).reshape(tokens.shape[0], -1))
            return self.head(result[:, -1])

    return Classifier()


@pytest.mark.parametrize("name", KINDS)
def test_every_export_runs_one_call(name: str, tmp_path: Path) -> None:
    logging.disable(logging.WARNING)
    net, tokens = model(*KINDS[name]).train(), torch.zeros(8, 20, dtype=torch.int64)
    files = [str(tmp_path / f) for f in ("a.pt2", "dynamo.onnx", "script.onnx")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(net, (tokens,)), files[0])
        torch.onnx.export(net, (tokens,), files[1], dynamo=True, verbose=False)
        torch.onnx.export(net.eval(), (tokens,), files[2], dynamo=False, do_constant_folding=False)
    logging.disable(logging.NOTSET)
    peaks: dict[str, list[int]] = {}
    for file in files:
        study = Study.open(file, Request(optimizer="sgd"))
        calls = [op for op in study.graph.ops if "recurrent" in kinds_of(op.base)]
        assert [op.args[4] for op in calls] == [KINDS[name][1]], file
        assert not [op for op in study.graph.ops if op.base == "aten::cat"], file  # of gates
        for optimizer in ("sgd", "adam", None):
            peaks.setdefault(str(optimizer), []).append(staticmem.analyze(file, optimizer=optimizer).peak.live_bytes)
    # biases that an exporter joined are rounded up once; a state that is handed out is copied by a view's reshape
    for optimizer, (first, *others) in peaks.items():
        state = 3 * 2 * 8 * 48 * 4 * 2 if optimizer == "None" else 0
        assert others == pytest.approx([first] * len(others), abs=24 * 512 + state), optimizer
