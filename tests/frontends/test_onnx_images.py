"""Height and width of images: channels first, and channels last as TensorFlow and Keras keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto
from onnx_models import model, node, value, weight

import staticmem
from staticmem.errors import DimensionError, UsageError
from staticmem.frontends.onnx import open_onnx
from staticmem.ir.model_file import resolve

FIXED = (1, 32, 48, 3)
OPEN = ("n", "h", "w", 3)


def save(folder: Path, nodes: list[Any], shape: tuple[int | str | None, ...], dtype: int = TensorProto.FLOAT) -> str:
    path = folder / "m.onnx"
    proto = model(nodes, [value("x", shape, dtype)], ["y"], [weight("w", 8, 3, 3, 3)], producer="tf2onnx")
    path.write_bytes(proto.SerializeToString())
    return str(path)


def transposed(*before: Any) -> list[Any]:
    return [*before, node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]), node("Conv", ["t", "w"], ["y"])]


def sizes(path: str, **asked: Any) -> tuple[int, ...]:
    return resolve(open_onnx(path), batch=2, **asked).shapes["x"]


@pytest.mark.parametrize("shape", [FIXED, OPEN, (1, "h", "w", None)])
def test_a_transpose_tells_channels_last(shape: tuple[int | str | None, ...], tmp_path: Path) -> None:
    """Nodes that ask for the shape stand before it where the batch is open."""
    path = save(tmp_path, transposed(node("Shape", ["x"], ["s"])), shape)
    dims = {"x[3]": 3} if shape[3] is None else {}
    assert sizes(path, resolution=(64, 96), dims=dims) == (2, 64, 96, 3)
    report = staticmem.analyze(path, batch=2, resolution=(64, 96), dims=dims)
    assert report.scenario.resolution == (64, 96)
    assert report.model.outputs[0].shape == (2, 8, 62, 94)


def test_without_a_transpose_it_asks(tmp_path: Path) -> None:
    path = save(tmp_path, [node("Relu", ["x"], ["y"])], FIXED)
    with pytest.raises(DimensionError) as caught:
        sizes(path, resolution=(64, 96))
    assert caught.value.code == "SM299"
    assert "--dim 'x[1]=64' --dim 'x[2]=96' with channels last" in str(caught.value)
    assert "--dim 'x[2]=64' --dim 'x[3]=96' with channels first" in str(caught.value)
    assert sizes(path, dims={"x[1]": 64, "x[2]": 96}) == (2, 64, 96, 3)
    assert sizes(path) == (2, 32, 48, 3)
    assert staticmem.analyze(path, batch=2).scenario.resolution is None


def test_channels_first_are_as_before(tmp_path: Path) -> None:
    path = save(tmp_path, [node("Conv", ["x", "w"], ["y"])], (1, 3, 32, 48))
    assert sizes(path, resolution=(64, 96)) == (2, 3, 64, 96)
    path = save(tmp_path, [node("Conv", ["x", "w"], ["y"])], ("n", 3, "h", "w"))
    assert sizes(path, resolution=(64, 96)) == (2, 3, 64, 96)
    path = save(tmp_path, [node("Relu", ["x"], ["y"])], (1, 64, 32, 48))
    assert sizes(path, resolution=(64, 96)) == (2, 64, 64, 96)
    path = save(tmp_path, [node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3])], (1, 9, 32, 4))
    assert sizes(path, resolution=(64, 96)) == (2, 9, 64, 96)  # a convolution reads channels first


def test_images_of_integers_take_no_resolution(tmp_path: Path) -> None:
    path = save(tmp_path, [node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], FIXED, TensorProto.UINT8)
    with pytest.raises(UsageError) as caught:
        sizes(path, resolution=(64, 96))
    assert caught.value.code == "SM114"


def test_a_missing_size_names_the_flag_that_gives_it(tmp_path: Path) -> None:
    with pytest.raises(DimensionError, match="--resolution N"):
        sizes(save(tmp_path, transposed(), OPEN))
    with pytest.raises(DimensionError, match="--dim h=N --dim w=N"):
        sizes(save(tmp_path, [node("Relu", ["x"], ["y"])], OPEN))


def test_a_sweep_over_resolutions_moves_height_and_width(tmp_path: Path) -> None:
    path = save(tmp_path, transposed(), FIXED)
    swept = staticmem.sweep(path, {"resolution": [32, 64, 128]}, batch=2)
    alone = [staticmem.analyze(path, batch=2, resolution=size).peak.live_bytes for size in (32, 64, 128)]
    assert [row.live_bytes for row in swept.rows] == alone
    for size, live in zip((32, 64, 128), alone, strict=True):
        assert live >= 2 * size * size * 3 * 4 + 2 * 8 * (size - 2) ** 2 * 4
