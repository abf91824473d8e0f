"""Files all of whose tensors are in another file: sizes follow from small ones, which are read where that is safe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import ints, model, node, value, weight

import staticmem
from staticmem.errors import ModelFileError


def proto() -> Any:
    """A convolution, a resize by scales, a reshape: two of its three tensors decide sizes."""
    nodes = [
        node("Conv", ["x", "conv.weight"], ["c"], pads=[1, 1, 1, 1]),
        node("Resize", ["c", "", "scales"], ["r"], mode="nearest"),
        node("Reshape", ["r", "shape"], ["y"]),
    ]
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")
    tensors = [weight("conv.weight", 8, 3, 3, 3), scales, ints("shape", 0, -1)]
    return model(nodes, [value("x", [2, 3, 16, 16])], ["y"], tensors)


def apart(folder: Path, location: str = "weights.bin") -> Path:
    path = folder / "model.onnx"
    onnx.save(proto(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    if location != "weights.bin":
        saved = onnx.load(path, load_external_data=False)
        for tensor in saved.graph.initializer:
            tensor.external_data[0].value = location
        path.write_bytes(saved.SerializeToString())
    return path


def refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        staticmem.analyze(str(path))
    assert error.value.code == "SM177"
    return f"{error.value.what} {error.value.why}"


def test_small_tensors_are_read_where_they_are(tmp_path: Path) -> None:
    whole = tmp_path / "whole.onnx"
    onnx.save(proto(), whole)
    inline, outside = staticmem.analyze(str(whole)), staticmem.analyze(str(apart(tmp_path)))
    assert outside.model.outputs[0].shape == (2, 8 * 32 * 32)
    assert outside.peak.live_bytes == inline.peak.live_bytes


def test_without_the_file_the_tensor_is_named(tmp_path: Path) -> None:
    path = apart(tmp_path)
    (tmp_path / "weights.bin").unlink()
    assert "tensor 'scales'" in refused(path)


def test_weights_that_decide_no_size_may_be_absent(tmp_path: Path) -> None:
    nodes = [node("Gemm", ["x", "fc.weight", "fc.bias"], ["g"], transB=1), node("Add", ["g", "one"], ["y"])]
    tensors = [weight("fc.weight", 4, 8), weight("fc.bias", 4), weight("one", 1)]
    path = tmp_path / "model.onnx"
    onnx.save(model(nodes, [value("x", [2, 8])], ["y"], tensors), path, save_as_external_data=True, size_threshold=0,
              location="w.bin")  # fmt: skip
    (tmp_path / "w.bin").unlink()
    assert staticmem.analyze(str(path)).model.outputs[0].shape == (2, 4)


def test_sizes_through_arithmetic(tmp_path: Path) -> None:
    """The target of the reshape is joined of a size of the input and a constant in the other file."""
    nodes = [
        node("Shape", ["x"], ["s"], end=1),
        node("Concat", ["s", "rest"], ["t"], axis=0),
        node("Reshape", ["x", "t"], ["y"]),
    ]
    path = tmp_path / "model.onnx"
    onnx.save(model(nodes, [value("x", [2, 8])], ["y"], [ints("rest", 4, 2)]), path, save_as_external_data=True,
              size_threshold=0, location="w.bin")  # fmt: skip
    assert staticmem.analyze(str(path)).model.outputs[0].shape == (2, 4, 2)
    (tmp_path / "w.bin").unlink()
    assert "tensor 'rest'" in refused(path)


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "sub/../../weights.bin", "", "a\0b", "c:w.bin"])
def test_places_outside_of_the_folder_are_not_opened(
    tmp_path: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    path = apart(folder, location)
    os.replace(folder / "weights.bin", tmp_path / "weights.bin")
    opened: list[object] = []
    real = os.open

    def noted(name: Any, *rest: Any, **more: Any) -> int:
        opened.append(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", noted)
    assert "its location is not below the folder of the model" in refused(path)
    assert all(str(name).endswith("model.onnx") for name in opened)


def test_links_are_followed_within_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    path = apart(folder)
    os.replace(folder / "weights.bin", tmp_path / "weights.bin")
    os.symlink(tmp_path / "weights.bin", folder / "weights.bin")
    assert "a link to another folder" in refused(path)
    os.unlink(folder / "weights.bin")
    os.replace(tmp_path / "weights.bin", folder / "real.bin")
    os.symlink("real.bin", folder / "weights.bin")
    assert staticmem.analyze(str(path)).model.outputs[0].shape == (2, 8 * 32 * 32)


def test_pipes_and_short_files(tmp_path: Path) -> None:
    path = apart(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"short")
    assert "ends before it" in refused(path)
    (tmp_path / "weights.bin").unlink()
    os.mkfifo(tmp_path / "weights.bin")
    assert "is not an ordinary file" in refused(path)


@pytest.mark.parametrize(("key", "number"), [("offset", "-8"), ("length", "7"), ("offset", "9" * 30), ("offset", "x")])
def test_places_that_make_no_sense(tmp_path: Path, key: str, number: str) -> None:
    path = apart(tmp_path)
    saved = onnx.load(path, load_external_data=False)
    for tensor in saved.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = number
    path.write_bytes(saved.SerializeToString())
    refused(path)


def test_a_model_in_memory_has_no_folder(tmp_path: Path) -> None:
    loaded = onnx.load(apart(tmp_path), load_external_data=False)
    with pytest.raises(ModelFileError) as error:
        staticmem.analyze(loaded)
    assert error.value.code == "SM177"
