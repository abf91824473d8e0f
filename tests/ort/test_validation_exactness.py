"""Sessions of recurrent, quantised, half-precision, fused and other kernels, measured: where `exact` is said it is.

`scripts/sessions/session_exactness.py` does the same with all of its graphs at all levels;
docs/internals/onnxruntime.md has its table.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import onnx
import pytest
from sampling import sampled

from staticmem.ort.options import SessionOptions
from staticmem.ort.validation import validation

SCRIPTS = Path(__file__).parents[2] / "scripts" / "sessions"
ORT = pytest.mark.skipif(not validation.installed(), reason="onnxruntime is not installed: pip install onnxruntime")
EXACT = (
    "one_layer-4", "one_layer-9", "one_layer-14", "lengths_and_states-1", "lstm_without_sequence", "dynamic_mlp-0",
    "dynamic_lstm-1", "dynamic_conv-0", "qlinear_cnn-0", "qlinear_cnn-2", "qlinear_wide-0", "qlinear_gemm", "qdq_cnn-0",
    "qdq_residual-0", "qdq_mlp-1", "half_cnn-1", "half_transformer-0", "scan-1", "if_of_a_constant-0", "unet-1",
    "contrib_activations", "local_response", "softmax_axis", "resize_linear", "grouped", "shapes_of_shapes",
    "conv_multiplied", "qlinear_others-0",
)  # fmt: skip
OPEN = ("nonzero", "if_of_data-0", "contrib_attention-1", "contrib_blockwise-0", "einsum")


def session_graph(name: str) -> Any:
    """A graph of scripts/sessions/session_graphs.py, which registers all of them where it is imported."""
    importlib.import_module("session_graphs")
    return importlib.import_module("session_nets").make(name)


def compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, level: str, cpu: str | None = None, saved: bool = True
) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    path = tmp_path / "model.onnx"
    onnx.save(session_graph(name), path)
    cpu = cpu or validation.this_processor()
    options = SessionOptions(graph_optimization_level=level, intra_op_num_threads=2, processor=cpu)
    return importlib.import_module("session_exactness").compare(str(path), options, saved=saved)


@ORT
@pytest.mark.parametrize("name", sampled(EXACT, 3))
def test_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    if validation.this_processor() != "avx512" and name.startswith(("q", "dynamic")):
        pytest.skip("packed sizes of integer products were compared on AVX-512")
    for level in ("disable", "all"):
        row = compared(monkeypatch, tmp_path, name, level)
        assert (row["said"], row["exact"]) == (True, True), row


@ORT
@pytest.mark.parametrize("name", ["half_mlp-0", "half_cnn-1", "half_recurrent-0", "one_layer-4", "qdq_cnn-0"])
def test_exact_from_the_file_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Without the saved graph: casts of half precision are those that the runtime inserts."""
    row = compared(monkeypatch, tmp_path, name, "disable", saved=False)
    assert (row["said"], row["exact"]) == (True, True), row


@ORT
@pytest.mark.parametrize("name", ["half_transformer-0", "qdq_residual-0"])
def test_not_exact_from_the_file_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    row = compared(monkeypatch, tmp_path, name, "disable", saved=False)
    assert (row["said"], row["in_band"]) == (False, True), row


@ORT
@pytest.mark.parametrize("name", OPEN)
def test_not_said_to_be_exact_and_within_the_band(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    row = compared(monkeypatch, tmp_path, name, "all")
    assert (row["said"], row["in_band"]) == (False, True), row


@ORT
def test_the_band_of_a_cpu_that_nobody_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = compared(monkeypatch, tmp_path, "qlinear_cnn-2", "all", cpu="unknown")
    assert (row["said"], row["in_band"]) == (False, True), row
    low, high = row["bands"]["held"]
    assert low < high


def test_every_graph_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    graphs = importlib.import_module("session_graphs")
    for name in graphs.GRAPHS:
        onnx.checker.check_model(session_graph(name), skip_opset_compatibility_check=True)
