"""A refusal blames the file only where onnx.checker refuses it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx_models import model, node, value, weight

import staticmem
from staticmem.errors import DimensionError, ModelFileError, StaticmemError
from staticmem.frontends.onnx import reader


def refusal(path: Path, **words: Any) -> StaticmemError:
    with pytest.raises(StaticmemError) as error:
        staticmem.analyze(str(path), **words)
    return error.value


def saved(folder: Path, *shape: int | str) -> Path:
    path = folder / "model.onnx"
    proto = model([node("MatMul", ["x", "w"], ["y"])], [value("x", shape)], ["y"], [weight("w", 4, 5)])
    proto.ir_version = 8
    proto.graph.output[0].type.tensor_type.shape.dim.add().dim_param = "rows"
    proto.graph.output[0].type.tensor_type.shape.dim.add().dim_param = "columns"
    path.write_bytes(proto.SerializeToString())
    return path


def test_a_file_that_the_checker_refuses_is_blamed(tmp_path: Path) -> None:
    error = refusal(saved(tmp_path, 2, 3))
    assert isinstance(error, DimensionError)
    assert "onnx.checker refuses the file" in error.why


def test_a_rule_of_ours_is_blamed_for_a_file_that_the_checker_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise ModelFileError("node 'n' calls aten::x with arguments that it does not take", "Reason: y.", "z", "SM122")

    path = saved(tmp_path, 2, 4)
    onnx.checker.check_model(path, full_check=True)
    monkeypatch.setattr("staticmem.studies.study.step_of", refuses)
    error = refusal(path)
    assert (error.code, error.what[:8]) == ("SM122", "node 'n'")
    assert "onnx.checker accepts the file" in error.why
    assert "Report it" in error.hint


def test_sizes_that_the_user_chose_are_not_the_files(tmp_path: Path) -> None:
    error = refusal(saved(tmp_path, 2, "features"), dims={"features": 3})
    assert error.code == "SM118"
    assert "checker" not in error.why
    assert "choose others" in error.hint


def test_what_cannot_be_checked_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, 2, 4)
    assert reader.checked(str(path)) == ""
    assert reader.checked(str(tmp_path / "none.onnx")) is None
    monkeypatch.setattr(reader, "LARGEST", 10)
    assert reader.checked(str(path)) is None


def test_tensors_in_a_file_that_is_not_there_break_no_rule(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    proto = onnx.load(saved(tmp_path, 2, 4))
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    assert reader.checked(str(path)) is None
