"""Sizes that only the data tells: as large as the inputs' sizes allow, and said; `--dim` sets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pt2_files import document, node, tensor, write

import staticmem
from staticmem.errors import DimensionError

BOOL, INT64 = 12, 5
RANGES: dict[str, tuple[int | None, int | None]] = {"s0": (2, None), "u0": (0, None), "u1": (0, None)}


def selected(tmp_path: Path) -> Path:
    """`y = x[x.sum(1) > 0] * 2; n = nonzero(y)` over x: [s0, 8]."""
    tensors = {
        "x": tensor("s0", 8), "total": tensor("s0"), "mask": tensor("s0", dtype=BOOL), "rows": tensor("u0", 8),
        "y": tensor("u0", 8), "n": tensor("u1", 2, dtype=INT64),
    }  # fmt: skip
    nodes = [
        node("sum.dim_IntList", "x", [1], out="total"),
        node("gt.Scalar", "total", 0, out="mask"),
        node("index.Tensor", "x", ["mask"], out="rows"),
        node("mul.Tensor", "rows", 2, out="y"),
        node("nonzero.default", "y", out="n"),
    ]
    return write(tmp_path / "selected.pt2", document(tensors, nodes, outputs=("y", "n"), ranges=RANGES))


def notes(report: Any) -> list[str]:
    return [note.text for note in report.assumptions if note.code == "SM326"]


def test_the_largest_size_is_taken_and_said(tmp_path: Path) -> None:
    report = staticmem.analyze(str(selected(tmp_path)), batch=1000)
    assert [t.shape for t in report.model.outputs] == [(1000, 8), (8000, 2)]
    assert [text.split(",")[0] for text in notes(report)] == [
        "u0 is in the data and was taken as 1",
        "u1 is in the data and was taken as 8",
    ]


def test_the_user_knows_better(tmp_path: Path) -> None:
    path = str(selected(tmp_path))
    whole = staticmem.analyze(path, batch=1000).peak
    one_row = staticmem.analyze(path, batch=1000, dims={"u0": 1, "u1": 1}).peak
    assert (whole.bands["live"].low, whole.bands["live"].high) == (one_row.bands["live"].low, whole.live_bytes)
    report = staticmem.analyze(path, batch=1000, dims={"u0": 10})
    assert [t.shape for t in report.model.outputs] == [(10, 8), (80, 2)]
    assert len(notes(report)) == 1
    assert report.peak.live_bytes < staticmem.analyze(path, batch=1000).peak.live_bytes


def test_a_number_out_of_a_tensor_has_no_bound(tmp_path: Path) -> None:
    tensors = {"x": tensor("s0"), "y": tensor("u0")}
    nodes = [node("foreign.default", "x", {"as_sym_int": {"as_name": "n"}}, out="y")]
    made = document(tensors, nodes, ranges=RANGES)
    made["graph_module"]["graph"]["sym_int_values"]["n"] = {"as_expr": {"expr_str": "u0"}}
    path = write(tmp_path / "item.pt2", made)
    with pytest.raises(DimensionError, match="u0"):
        staticmem.analyze(str(path), batch=4)
