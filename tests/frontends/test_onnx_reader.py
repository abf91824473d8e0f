"""The weight-skipping reader: what it keeps, what it drops, and what it says of files that are no models."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx_models import ints, model, node, value, weight

import staticmem
from staticmem.cli.main import main
from staticmem.errors import ModelFileError
from staticmem.frontends.onnx import looks_like_onnx, open_onnx
from staticmem.frontends.onnx.model import OnnxModel
from staticmem.frontends.onnx.reader import parse, read
from staticmem.frontends.onnx.wire import strip


def mlp(size: int = 64) -> bytes:
    """A model with a large weight, a small one, a constant in a node and one in a branch."""
    big = onnx.numpy_helper.from_array(np.ones((size, size), np.float32))
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["b"], value=big)], "branch", [], [helper.make_empty_tensor_value_info("b")]
    )
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Constant", [], ["c"], value=big),
        node("Add", ["h", "c"], ["s"]),
        node("Reshape", ["s", "shape"], ["y"]),
        node("If", ["flag"], ["z"], then_branch=branch, else_branch=branch),
    ]
    tensors = [weight("w", size, size), ints("shape", -1, size), weight("flag", dtype=onnx.TensorProto.BOOL)]
    data: bytes = model(nodes, [value("x", ["n", size])], ["y"], tensors).SerializeToString()
    return data


def test_large_payloads_are_dropped_and_everything_else_is_kept() -> None:
    data = mlp()
    stripped = strip(data)
    assert len(data) > 4 * 64 * 64 * 4
    assert len(stripped) < 2000
    proto = parse(stripped)
    full = onnx.load_model_from_string(data)
    assert [n.op_type for n in proto.graph.node] == [n.op_type for n in full.graph.node]
    assert list(proto.graph.initializer[0].dims) == [64, 64]
    assert not proto.graph.initializer[0].raw_data
    assert onnx.numpy_helper.to_array(proto.graph.initializer[1]).tolist() == [-1, 64]
    assert not proto.graph.node[4].attribute[0].g.node[0].attribute[0].t.raw_data


def test_small_models_come_through_unchanged() -> None:
    data = mlp(8)
    assert strip(data) == data


def test_pages_may_go_behind_each_payload() -> None:
    """What lies before the end of a payload is not looked at again: here it is overwritten."""
    data = mlp()
    changing, ends = bytearray(data), list[int]()

    def passed(end: int) -> None:
        ends.append(end)
        changing[:end] = bytes(end)

    assert strip(memoryview(changing), passed) == strip(data)
    assert ends == sorted(ends)
    assert len(ends) == 4  # a weight, and a constant in a node and in each of two branches
    assert all(data[end - 4 : end] == np.float32(1).tobytes() for end in ends[:3])


def test_time_and_memory_do_not_depend_on_weights(tmp_path: Path) -> None:
    path = tmp_path / "big.onnx"
    proto = onnx.load_model_from_string(mlp(8))
    # a sparse file: one initializer of 400 MB that is never written
    tensor = proto.graph.initializer[0]
    tensor.dims[:] = [10_000, 10_000]
    tensor.ClearField("raw_data")
    head = proto.SerializeToString()
    body = tensor.SerializeToString()
    size = 400_000_000
    data = b"\x4a" + _varint(size)  # field 9, raw_data
    inner = body + data
    at = head.index(body)
    outer_old = len(body)
    assert head[at - 1] == outer_old
    graph = onnx.load_model_from_string(head).graph
    del graph.initializer[0]
    rest = graph.SerializeToString()
    tensor_field = b"\x2a" + _varint(len(inner) + size) + inner
    with path.open("wb") as file:
        file.write(
            b"\x08\x0a\x42\x02\x10\x11\x3a" + _varint(len(rest) + len(tensor_field) + size) + rest + tensor_field
        )
        file.truncate(file.tell() + size)
    start = time.perf_counter()
    opened = read(str(path))
    assert time.perf_counter() - start < 0.5
    assert list(opened.graph.initializer[-1].dims) == [10_000, 10_000]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


@pytest.mark.parametrize("step", [1, 7, 61])
def test_truncated_files_are_errors_in_three_sentences(tmp_path: Path, step: int) -> None:
    data = mlp(8)
    path = tmp_path / "cut.onnx"
    for end in range(1, len(data) - 1, step * 5):
        path.write_bytes(data[:end])
        error = _failure(str(path))
        assert error is None or all((error.what, error.why, error.hint))


def _failure(path: str) -> ModelFileError | None:
    """How a file fails; None where the part of it that is there is a model. Anything else fails the test."""
    try:
        open_onnx(path)
    except ModelFileError as error:
        return error
    return None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_damaged_bytes_never_raise_anything_else(noise: bytes, at: int) -> None:
    data = mlp(8)
    damaged = data[:at] + noise + data[at + len(noise) :]
    with contextlib.suppress(ModelFileError):
        parse(strip(damaged))


def test_deep_nesting_is_bounded() -> None:
    data = b"\x12" + _varint(5000) + bytes(5000)  # GraphProto.name, so that every level is looked into
    for _ in range(200):  # graph in attribute (6) in node (5) in graph (1)
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            data = tag + _varint(len(data)) + data
    with pytest.raises(ModelFileError, match="damaged"):
        strip(b"\x3a" + _varint(len(data)) + data)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_onnx(str(tmp_path / "nothing.onnx"))
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ModelFileError, match="empty"):
        open_onnx(str(tmp_path / "empty.onnx"))


@pytest.mark.parametrize(
    "head", [b"", b"PK\x03\x04rest", b"hello world, this is text", b"\x80\x04\x95abc", b'{"a": 1}', bytes(64)]
)
def test_other_files_do_not_look_like_onnx(head: bytes) -> None:
    assert not looks_like_onnx(head)


def test_onnx_files_look_like_onnx() -> None:
    data = mlp(8)
    assert looks_like_onnx(data[:4096])
    assert looks_like_onnx(data[:40])


def test_external_data_is_not_needed(tmp_path: Path) -> None:
    proto = onnx.load_model_from_string(mlp())
    tensor = proto.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, "absent.bin")
    tensor.ClearField("raw_data")
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    assert not os.path.exists(tmp_path / "absent.bin")
    model = open_onnx(str(path), recordings=False)
    assert isinstance(model, OnnxModel)
    assert model.weights.parameters["w"].shape == (64, 64)


def test_weights_without_shapes_are_named(tmp_path: Path) -> None:
    proto = onnx.load_model_from_string(mlp(8))
    del proto.graph.initializer[0]
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelFileError, match=r"1 tensors .* neither a value nor a shape: w"):
        open_onnx(str(path))


def test_two_inputs_of_one_name(tmp_path: Path) -> None:
    """onnx.checker refuses them too."""
    proto = model([node("Relu", ["x"], ["y"])], [value("x", [1, 2]), value("x", [1, 3])], ["y"], [])
    proto.graph.output[0].CopyFrom(value("y", [1, 2]))
    onnx.save(proto, tmp_path / "twice.onnx")
    with pytest.raises(onnx.checker.ValidationError, match="single static assignment"):
        onnx.checker.check_model(proto)
    with pytest.raises(ModelFileError, match=r"two inputs of .* are called 'x'") as caught:
        open_onnx(str(tmp_path / "twice.onnx"))
    assert caught.value.code == "SM157"


@pytest.mark.parametrize("words", [("-f", "html"), ("-f", "html", "--optimizer", "adam"), ("--runtime", "onnxruntime")])
def test_a_size_of_0_is_a_size(tmp_path: Path, words: tuple[str, ...]) -> None:
    """An empty cache, or no rows at all: the ONNX Runtime takes 0 for a fixed size too."""
    nodes = [node("Concat", ["x", "past"], ["c"], axis=1), node("MatMul", ["c", "w"], ["y"])]
    given = [value("x", [0, 3, 4]), value("past", [0, 0, 4])]
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes, given, ["y"], [weight("w", 4, 5)]).SerializeToString())
    opened = open_onnx(str(path))
    assert isinstance(opened, OnnxModel)
    assert [spec.shape for spec in opened.inputs] == [(0, 3, 4), (0, 0, 4)]
    assert staticmem.analyze(str(path)).model.outputs[0].shape == (0, 3, 5)
    assert main(["analyze", str(path), *words]) == 0


def test_a_size_of_0_has_parts(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    proto = model([node("Split", ["x"], ["a", "b"], axis=0)], [value("x", [0, 3])], ["a", "b"], opset=12)
    path.write_bytes(proto.SerializeToString())
    assert [out.shape for out in staticmem.analyze(str(path)).model.outputs] == [(0, 3), (0, 3)]
