"""Files that are made to break a reader: each is refused with its reason, at once, and nothing else is opened."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper, numpy_helper

import staticmem
from staticmem import StaticmemError
from staticmem.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SEED = ROOT / "models" / "seed.pt2"
posix = pytest.mark.skipif(os.name != "posix", reason="pipes and devices of POSIX")
FLOAT = TensorProto.FLOAT


def info(name: str, shape: list[Any], kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any] | None = None) -> Any:
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights or [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def relu(x: str, y: str) -> Any:
    return helper.make_node("Relu", [x], [y], f"{x}-{y}")


def archive(document: bytes, name: str = "m/models/model.json") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr(name, document)
    return made.getvalue()


# -- graphs ------------------------------------------------------------------------------------------------------


def cycle() -> Any:
    return model([relu("b", "a"), relu("a", "b")], [info("x", [2])], [info("b", [2])])


def own_output() -> Any:
    return model([relu("a", "a")], [info("x", [2])], [info("a", [2])])


def nested(depth: int) -> Any:
    """If in If in If."""
    body = helper.make_graph([relu("x", "y0")], "b0", [], [info("y0", [2])])
    for k in range(1, depth):
        node = helper.make_node("If", ["c"], [f"y{k}"], then_branch=body, else_branch=body if k < 3 else None)
        body = helper.make_graph([node], f"b{k}", [], [info(f"y{k}", [2])])
    node = helper.make_node("If", ["c"], ["y"], then_branch=body)
    return model([node], [info("x", [2]), info("c", [], TensorProto.BOOL)], [info("y", [2])])


def functions_that_call_themselves() -> Any:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    functions = [
        helper.make_function("f", name, ["x"], ["y"], [helper.make_node(other, ["x"], ["y"], domain="f")], opsets)
        for name, other in (("A", "B"), ("B", "A"))
    ]
    graph = helper.make_graph(
        [helper.make_node("A", ["x"], ["y"], domain="f")], "g", [info("x", [2])], [info("y", [2])]
    )
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def functions_that_double(depth: int = 40) -> Any:
    """2**40 nodes in forty functions of two nodes."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    functions = []
    for k in range(depth):
        domain, op = ("f", f"F{k - 1}") if k else ("", "Relu")
        nodes = [helper.make_node(op, [a], [b], domain=domain) for a, b in (("x", "h"), ("h", "y"))]
        functions.append(helper.make_function("f", f"F{k}", ["x"], ["y"], nodes, opsets))
    node = helper.make_node(f"F{depth - 1}", ["x"], ["y"], domain="f")
    graph = helper.make_graph([node], "g", [info("x", [2])], [info("y", [2])])
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def endless_loop() -> Any:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Relu", ["a"], ["a2"])], "body",
        [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("a", [2])],
        [info("c2", [], TensorProto.BOOL), info("a2", [2])],
    )  # fmt: skip
    trips = helper.make_tensor("n", TensorProto.INT64, [], [2**62])
    node = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    return model([node], [info("x", [2])], [info("y", [2])], [trips])


def constant_of_shape(sizes: list[int]) -> Any:
    shape = helper.make_tensor("s", TensorProto.INT64, [len(sizes)], sizes)
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["h"], value=helper.make_tensor("v", FLOAT, [1], [0.0])),
        helper.make_node("Add", ["h", "x"], ["y"]),
    ]
    return model(nodes, [info("x", [1])], [info("y", ["a"] * len(sizes))], [shape])


def huge_range() -> Any:
    scalars = [helper.make_tensor(n, TensorProto.INT64, [], [v]) for n, v in (("a", 0), ("b", 2**62), ("c", 1))]
    nodes = [helper.make_node("Range", ["a", "b", "c"], ["h"]), helper.make_node("Shape", ["h"], ["y"])]
    return model(nodes, [info("x", [1])], [info("y", [1], TensorProto.INT64)], scalars)


def tiled() -> Any:
    """A constant that folding would make of 2**60 elements."""
    weights = [
        helper.make_tensor("t", TensorProto.INT64, [1], [7]),
        helper.make_tensor("r", TensorProto.INT64, [1], [2**60]),
    ]
    nodes = [helper.make_node("Tile", ["t", "r"], ["h"]), helper.make_node("Shape", ["h"], ["y"])]
    return model(nodes, [info("x", [1])], [info("y", [1], TensorProto.INT64)], weights)


def many_axes() -> Any:
    return model([relu("x", "y")], [info("x", [1] * 100_000)], [info("y", [1] * 100_000)])


def lying_payload() -> Any:
    weight = helper.make_tensor("w", FLOAT, [2], [1.0, 2.0])
    weight.dims[:] = [2**40, 2**40]
    return model([helper.make_node("Add", ["x", "w"], ["y"])], [info("x", [2])], [info("y", [2])], [weight])


# What may be analysed (a cycle-free graph with odd names is one) and what has to be refused.
REFUSED: dict[str, Callable[[], Any]] = {
    "a cycle": cycle,
    "a node that reads itself": own_output,
    "functions that call themselves": functions_that_call_themselves,
    "functions that double": functions_that_double,
    "more bytes than there are": lying_payload,
    "a size of 2**62": lambda: model([relu("x", "y")], [info("x", [2**62, 8])], [info("y", [2**62, 8])]),
    "sizes whose product overflows": lambda: constant_of_shape([2**31, 2**31, 2**31]),
}
BOUNDED: dict[str, Callable[[], Any]] = {
    "nested branches": lambda: nested(30),
    "a loop of 2**62 turns": endless_loop,
    "a negative size": lambda: model([relu("x", "y")], [info("x", [-5, 3])], [info("y", [-5, 3])]),
    "a range of 2**62": huge_range,
    "a tile of 2**60": tiled,
    "a hundred thousand axes": many_axes,
    "one name for all": lambda: model([relu("x", "x")] * 2, [info("x", [2]), info("x", [3])], [info("x", [2])]),
    "a product of zero and 2**62": lambda: constant_of_shape([0, 2**62]),
}  # fmt: skip


def attempt(path: str, **words: Any) -> StaticmemError | None:
    try:
        staticmem.analyze(path, **words)
    except StaticmemError as error:
        return error
    return None


@pytest.mark.parametrize("kind", REFUSED)
def test_graphs_that_are_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(REFUSED[kind]().SerializeToString())
    error = attempt(str(path), optimizer="adam")
    assert error is not None


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("words", [{}, {"optimizer": "adam"}])
def test_graphs_that_are_bounded(kind: str, words: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(BOUNDED[kind]().SerializeToString())
    attempt(str(path), **words)


# -- external data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "location", ["../../../../etc/passwd", "/etc/passwd", "../secret", "pipe", "", "\x00", "x" * 9999]
)
def test_external_data_elsewhere_is_never_opened(location: str, tmp_path: Path) -> None:
    """Small tensors are read from ordinary files beside the model; what else the path names is not opened."""
    (tmp_path.parent / "secret").write_bytes(b"\x00" * 64)
    if os.name == "posix":
        os.mkfifo(tmp_path / "pipe")
    weight = helper.make_tensor("w", FLOAT, [4, 4], [0.0] * 16)
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "64")):
        weight.external_data.add(key=key, value=value)
    shape = helper.make_tensor("s", TensorProto.INT64, [2], [2, 8])
    shape.ClearField("int64_data")
    shape.data_location = TensorProto.EXTERNAL
    shape.external_data.add(key="location", value=location)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "s"], ["y"])]
    path = tmp_path / "m.onnx"
    path.write_bytes(model(nodes, [info("x", [4, 4])], [info("y", [2, 8])], [weight, shape]).SerializeToString())
    opened: list[str] = []
    active = [True]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event == "open" and isinstance(arguments[0], str):
            opened.append(arguments[0])

    sys.addaudithook(watch)
    attempt(str(path))
    active.clear()
    assert str(path) in opened
    assert not [name for name in opened if name.endswith(("passwd", "secret", "pipe")) or "x" * 99 in name]


# -- archives ----------------------------------------------------------------------------------------------------


def pt2_json() -> dict[str, Any]:
    with zipfile.ZipFile(SEED) as source:
        name = next(n for n in source.namelist() if "/models/" in n)
        document: dict[str, Any] = json.loads(source.read(name))
    return document


def with_size(value: Any) -> bytes:
    document = pt2_json()
    for meta in document["graph_module"]["graph"]["tensor_values"].values():
        meta["sizes"][0] = value
    return archive(json.dumps(document).encode())


def overlapping() -> bytes:
    """A zip whose directory names one member a thousand times."""
    data = archive(b"{}" * 1000)
    start = data.index(b"PK\x01\x02")
    end = data.index(b"PK\x05\x06")
    entry = data[start:end]
    tail = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1000, 1000, len(entry) * 1000, start, 0)
    return data[:start] + entry * 1000 + tail


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "a bomb": lambda: archive(b" " * (64 << 20)),
    "deep lists": lambda: archive(b"[" * 1_000_000),
    "deep objects": lambda: archive(b'{"a":' * 500_000),
    "a number of a million digits": lambda: archive(b"1" * 1_000_000),
    "no archive directory": lambda: archive(b"{}")[:-22],
    "one member a thousand times": overlapping,
    "a path out of the archive": lambda: archive(json.dumps(pt2_json()).encode()[:-1], "../../../models/x.json"),
    "an absolute path": lambda: archive(b"[]", "/models/x.json"),
    "a pickle": lambda: archive(pickle.dumps(print), "m/data.pkl"),
    "a pickle beside nothing": lambda: archive(pickle.dumps(print), "m/models/x.json"),
    "a negative size": lambda: with_size({"as_int": -1}),
    "a size of 2**63": lambda: with_size({"as_int": 2**63}),
    "an expression that calls": lambda: with_size({"as_expr": {"expr_str": "__import__('os').system('id')"}}),
    "an expression of a tower": lambda: with_size({"as_expr": {"expr_str": "9**9**9**9"}}),
    "a deep expression": lambda: with_size({"as_expr": {"expr_str": "(" * 100_000}}),
    "a long expression": lambda: with_size({"as_expr": {"expr_str": "s0+" * 300_000 + "s0"}}),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(ARCHIVES[kind]())
    before = sorted(tmp_path.rglob("*"))
    assert attempt(str(path), batch=2) is not None
    assert sorted(tmp_path.rglob("*")) == before


# -- texts -------------------------------------------------------------------------------------------------------

_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + k)}: &{chr(98 + k)} [{','.join(['*' + chr(97 + k)] * 9)}]\n" for k in range(9)
)
TEXTS: dict[str, bytes] = {
    "deep lists": b"[" * 100_000,
    "deep maps": b"{a: " * 50_000,
    "aliases that multiply": _LAUGHS.encode(),
    "aliases in a list": b"- " + _LAUGHS.replace("\n", "\n- ").rstrip("- ").encode(),
    "an alias of itself": b"&a [*a]",
    "an object": b"!!python/object/apply:os.system [id]",
    "a key that is a list": b"? [a, b]\n: 1\n",
    "no date": b"a: 2020-99-99",
    "a number of 5,000 digits": b"a: " + b"9" * 5000,
    "no UTF-8": b"\xff\xfe\x00\xd8",
    "nulls": b"\x00" * 100,
    "too large": b"# " + b"x" * (5 << 20),
}
READERS: dict[str, list[str]] = {
    "config": ["check", "--config"],
    "profile": ["analyze", str(SEED), "--gpu", "l4", "--profile"],
    "cards": ["gpus", "--gpus-file"],
    "prices": ["size", str(SEED), "--prices"],
    "report": ["report"],
    "snapshot": ["compare-snapshot", str(SEED)],
    "records": ["reconcile"],
    "model": ["analyze"],
}


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "SM190" not in captured.err
    assert len(captured.err) < 5000


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", TEXTS)
def test_texts(reader: str, kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(TEXTS[kind])
    refused(capsys, [*READERS[reader], str(path)])


@posix
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "null", "zero", "loop", "folder"])
def test_what_is_no_ordinary_file(reader: str, kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A pipe that nobody writes to does not wait, and a device without end does not fill the memory."""
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else f"/dev/{kind}")
    refused(capsys, [*READERS[reader], str(path)])


# -- pickles -----------------------------------------------------------------------------------------------------

_START = b"\x80\x04"
_DOUBLED = b")\x94" + b"".join(b"h" + bytes([k]) + b"\x86\x94" for k in range(60))
PICKLES: dict[str, bytes] = {
    "a call": pickle.dumps(print),
    "a reduction": pickle.dumps(Path("x")),
    "a set": pickle.dumps({1}),
    "a key that hashes for ever": _START + b"}" + _DOUBLED + b"Ns.",
    "a key that is deep": _START + b"})" + b"\x85" * 300_000 + b"Ns.",
    "a deep value": _START + b"}\x8c\rdevice_traces)" + b"\x85" * 300_000 + b"s\x8c\x08segments]s.",
    "a list in itself": _START + b"]\x94h\x00a.",
    "a dict in itself": _START + b"}\x94\x8c\x08segmentsh\x00s\x8c\rdevice_tracesh\x00s.",
    "a length beyond the end": _START + b"X\xff\xff\xff\xff",
    "eight bytes of length": _START + b"\x8d" + b"\xff" * 8 + b"a.",
    "a number of a gigabyte": _START + b"\x8b\xff\xff\xff\x3f.",
    "marks": _START + b"(" * 1_000_000,
    "values": _START + b"N" * 3_000_000,
    "a number as text": b"\x80\x02I999999\n.",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_snapshots(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(PICKLES[kind])
    refused(capsys, ["compare-snapshot", str(SEED), str(path)])


# -- memory ------------------------------------------------------------------------------------------------------


def wire_bombs() -> Iterator[tuple[str, bytes]]:
    yield "a length of 2**60", b"\x08\x08\x3a" + b"\xff" * 8 + b"\x0f" + b"x" * 100
    yield "nested messages", b"\x08\x08" + _nest(200)


def _nest(depth: int) -> bytes:
    """graph { node { attribute { g { node ... as deep as it goes, with 5,000 bytes of a name in each."""
    inner = b"\x12\x88\x27" + b"n" * 5000
    for _ in range(depth):
        inner = _field(1, _field(5, _field(6, inner)))
    return _field(7, inner)


def _field(number: int, data: bytes) -> bytes:
    size, out = len(data), bytearray([number << 3 | 2])
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out) + data


@pytest.mark.parametrize(
    ("kind", "data"), list(wire_bombs()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_protobuf(kind: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    assert attempt(str(path)) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS as Linux counts it")
@pytest.mark.parametrize("kind", ["a tile of 2**60", "a range of 2**62", "a hundred thousand axes"])
def test_memory_stays_bounded(kind: str, tmp_path: Path) -> None:
    """In 1.5 GiB of address space, most of which is libraries."""
    path = tmp_path / "m.onnx"
    path.write_bytes(BOUNDED[kind]().SerializeToString())
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))\n"
        "from staticmem.cli.main import main; sys.exit(main(['analyze', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 2), done.stderr[-500:]
    assert "Traceback" not in done.stderr
    assert "SM190" not in done.stderr
    assert "SM191" not in done.stderr


def test_the_helpers_make_valid_models() -> None:
    """A file that is refused has to be refused for what is wrong with it."""
    plain = model([relu("x", "y")], [info("x", [2])], [info("y", [2])])
    assert staticmem.analyze(plain).peak.live_bytes == 3 * 512
    assert numpy_helper.to_array(helper.make_tensor("t", FLOAT, [1], [1.0]))[0] == 1.0
