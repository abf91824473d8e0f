"""What onnx's C++ does with a hostile graph does not reach the process that reads it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import staticmem
from staticmem import StaticmemError
from staticmem.frontends.onnx import isolation, onnx_process

FLOAT = TensorProto.FLOAT
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and limited, on Linux alone")


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    isolation._at_exit()
    yield
    isolation._at_exit()


def model(nodes: list[Any], shape: list[Any], *weights: Any, output: list[Any] | None = None) -> Any:
    x = helper.make_tensor_value_info("x", FLOAT, shape)
    y = helper.make_tensor_value_info("y", FLOAT, output)
    graph = helper.make_graph(nodes, "g", [x], [y], list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def relu() -> Any:
    return model([helper.make_node("Relu", ["x"], ["y"], "first")], [2, 3])


def answering(monkeypatch: pytest.MonkeyPatch, action: Callable[[list[bytes]], list[bytes]]) -> None:
    """In place of onnx's inference, in the other process."""
    monkeypatch.setitem(onnx_process._KINDS, b"model", action)


@linux
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE])
def test_a_signal_is_an_error_that_names_the_node(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(request: list[bytes]) -> list[bytes]:
        if b"Softmax" in request[3]:
            os.kill(os.getpid(), number)
        return [request[3]]

    answering(monkeypatch, crash)
    kinds = ["Relu", "Abs", "Softmax", "Neg", "Exp"]
    names = ["x", *"abcd", "y"]
    nodes = [helper.make_node(kind, [names[i]], [names[i + 1]], f"n{i}") for i, kind in enumerate(kinds)]
    with pytest.raises(StaticmemError) as error:
        staticmem.analyze(model(nodes, [2, 3]))
    assert error.value.code == "SM159"
    assert "node Softmax 'n2'" in error.value.what
    assert signal.Signals(number).name in error.value.why


def test_a_graph_that_ends_a_release_of_onnx() -> None:
    """GatherND asks for a dimension before the first: onnx 1.23 reads memory that is not its own, with any result."""
    node = helper.make_node("GatherND", ["x", "i"], ["y"], "gather", batch_dims=-1)
    damaged = model([node], [2, 2, 2], helper.make_tensor("i", TensorProto.INT64, [0], []))
    with pytest.raises(StaticmemError) as error:
        staticmem.analyze(damaged)
    assert "gather" in str(error.value)
    assert error.value.code == "SM157"


@linux
def test_a_signal_while_contents_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes alone are asked for then."""

    def crash(request: list[bytes]) -> list[bytes]:
        if request[2] == b"1":
            os.kill(os.getpid(), signal.SIGSEGV)
        return onnx_process._model(request)

    answering(monkeypatch, crash)
    assert staticmem.analyze(relu(), outputs="dropped").peak.live_bytes == 1024


@linux
@pytest.mark.parametrize("numel", [10**8, 10**12])
def test_contents_of_long_vectors_are_not_followed(numel: int) -> None:
    """onnx keeps some 70 bytes for each element of a vector that may be a shape."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    node = helper.make_node("Mul", ["x", "two"], ["y"])
    start = time.perf_counter()
    made = model([node], [numel], helper.make_tensor("two", FLOAT, [1], [2.0]), output=[numel])
    report = staticmem.analyze(made, outputs="dropped")
    isolation._at_exit()
    taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert report.peak.live_bytes == 2 * 4 * numel
    assert taken <= max(before, (onnx_process.MEMORY >> 10) + (1 << 20))
    assert time.perf_counter() - start < 30


@linux
def test_too_much_memory_is_not_the_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, lambda request: [bytes(1 << 40)])
    with pytest.raises(StaticmemError) as error:
        staticmem.analyze(relu())
    assert error.value.code == "SM159"
    assert "needs more than" in error.value.why


@linux
def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(request: list[bytes]) -> list[bytes]:
        while True:
            pass

    monkeypatch.setattr(onnx_process, "SECONDS", 0)
    answering(monkeypatch, turn)
    with pytest.raises(StaticmemError) as error:
        staticmem.analyze(relu())
    assert error.value.code == "SM159"
    assert "processor time" in error.value.why


@linux
def test_a_process_that_nobody_asks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_process, "IDLE", 0.05)
    for _ in range(2):
        isolation.infer_shapes(relu().SerializeToString())
        worker = isolation._worker
        assert worker is not None
        deadline = time.monotonic() + 30
        while os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@linux
def test_a_forked_process_has_one_of_its_own() -> None:
    isolation.infer_shapes(relu().SerializeToString())
    pid = os.fork()
    if pid == 0:
        fine = isolation._worker is None and bool(isolation.infer_shapes(relu().SerializeToString()))
        isolation._at_exit()
        os._exit(0 if fine else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert isolation.infer_shapes(relu().SerializeToString())


@pytest.mark.parametrize("forks", [pytest.param(True, marks=linux), False])
def test_answers_are_those_of_onnx(forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "FORKS", forks)
    data = relu().SerializeToString()
    assert isolation.infer_shapes(data) == onnx.shape_inference.infer_shapes(data).SerializeToString()
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    types = {
        "x": helper.make_tensor_type_proto(FLOAT, [2, 6]),
        "s": helper.make_tensor_type_proto(TensorProto.INT64, [2]),
    }
    contents = {"s": onnx.numpy_helper.from_array(np.array([3, -1]))}
    found = isolation.infer_node(node, 17, types, contents, {"": 17})
    assert [d.dim_value for d in found["y"].tensor_type.shape.dim] == [3, 4]
    with pytest.raises(isolation.RefusedError):
        isolation.infer_node(helper.make_node("NoSuch", ["x"], ["y"]), 17, types, {}, {"": 17})
    with pytest.raises(isolation.RefusedError):
        isolation.infer_node(node, 17, {"x": types["x"]}, {}, {"": 17})


def test_without_processes_onnx_runs_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any) -> None:
        raise BlockingIOError

    monkeypatch.setattr(isolation.Worker, "__init__", none)
    assert isolation.infer_shapes(relu().SerializeToString())
