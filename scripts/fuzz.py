"""Feeds the readers thousands of damaged files and lists what is not a clear error.

    python scripts/fuzz.py --seconds 300            # all kinds
    python scripts/fuzz.py --kind onnx --seed 7 --count 2000
    python scripts/fuzz.py --replay findings/onnx-7-1234.onnx

A file may be analysed, or refused with a StaticmemError (exit code 2). Everything else is a finding and is kept in
`findings/`: another exception, more than --limit seconds, more than --memory GiB. Files are made from those of models/
by mutations of bytes and of structure (a node of the JSON or of the protobuf message is changed, moved, repeated or
removed), or end at a boundary: of a field of the message, of a part of the zip, of a token of the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import pickletools
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EXTREMES: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**30, "", "a" * 10_000, "\x00\x1b[31m<script>", "s0", "2**999**9",
    "Symbol('s0')", None, True, [], {}, [[]], {"a": {}}, 1.5, float("nan"), float("inf"),
)  # fmt: skip


# -- mutations -----------------------------------------------------------------------------------------------------


def bytes_of(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, ranges cut, repeated, overwritten; or the end is missing."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not made:
            break
        at = rng.randrange(len(made))
        size = min(rng.choice((1, 2, 4, 8, 64, 512)), len(made) - at)
        kind = rng.randrange(6)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del made[at : at + size]
        elif kind == 2:
            made[at:at] = made[at : at + size]
        elif kind == 3:
            made[at : at + size] = bytes(rng.choice((0, 0xFF, 0x80, 0x7F)) for _ in range(size))
        elif kind == 4:
            made[at : at + size] = rng.randbytes(size)
        else:
            del made[at:]
    return bytes(made)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def document_of(document: Any, rng: random.Random) -> Any:
    """One to four nodes of plain data changed."""
    made = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(made))
        if not places:
            return made
        path = rng.choice(places)
        parent = made
        for key in path[:-1]:
            parent = parent[key]
        kind = rng.randrange(5)
        if kind == 0:
            parent[path[-1]] = rng.choice(EXTREMES)
        elif kind == 1:
            del parent[path[-1]]
        elif kind == 2 and isinstance(parent, list):
            parent.insert(path[-1], json.loads(json.dumps(parent[path[-1]])))
        elif kind == 3:
            other = made
            for key in rng.choice(places):
                try:
                    other = other[key]
                except (KeyError, IndexError, TypeError):
                    break
            parent[path[-1]] = json.loads(json.dumps(other))
        elif isinstance(parent, list):
            rng.shuffle(parent)
        elif isinstance(parent[path[-1]], int):
            parent[path[-1]] += rng.choice((-1, 1, 2**20, -(2**20)))
    return made


def archive_of(data: bytes, rng: random.Random) -> bytes:
    """A `.pt2` with a changed graph, or with a member more, less, or of another name."""
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        members = {name: source.read(name) for name in source.namelist()}
    graph = next(name for name in members if name.endswith(".json") and "/models/" in name)
    kind = rng.randrange(6)
    if kind <= 3:
        members[graph] = json.dumps(document_of(json.loads(members[graph]), rng)).encode()
    elif kind == 4:
        members[graph] = bytes_of(members[graph], rng)
    else:
        members[rng.choice(("../../evil.json", "x/models/model.json", "/etc/passwd", graph + "/"))] = members.pop(graph)
    return _packed(members)


def _packed(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in members.items():
            target.writestr(name, content)
    return made.getvalue()


def proto_of(data: bytes, rng: random.Random) -> bytes:
    """An ONNX message with nodes, attributes, shapes or names changed."""
    import onnx

    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind = rng.randrange(9)
        node = rng.choice(graph.node) if graph.node else None
        value = rng.choice([*graph.input, *graph.value_info, *graph.output])
        if kind == 0 and node is not None:
            node.op_type = rng.choice(["Loop", "If", "Scan", "Conv", "Reshape", "Concat", "Gemm", "NoSuchOp", ""])
        elif kind == 1 and node is not None and node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice([*rng.choice(graph.node).output, "", "gone"])
        elif kind == 2 and node is not None and node.output:
            node.output[rng.randrange(len(node.output))] = rng.choice([*rng.choice(graph.node).output, ""])
        elif kind == 3 and node is not None:
            graph.node.remove(node)
        elif kind == 4:
            dims = value.type.tensor_type.shape.dim
            if dims:
                dims[rng.randrange(len(dims))].dim_value = rng.choice((0, -1, 1, 3, 2**40, 2**62))
        elif kind == 5:
            value.type.tensor_type.elem_type = rng.choice((0, 1, 7, 8, 10, 14, 16, 23, 99))
        elif kind == 6 and node is not None and node.attribute:
            attribute = rng.choice(node.attribute)
            attribute.type = rng.randrange(15)
            attribute.i = rng.choice((0, -1, 2**62))
        elif kind == 7 and graph.initializer:
            tensor = rng.choice(graph.initializer)
            tensor.dims.append(rng.choice((0, -1, 2**40)))
            tensor.data_type = rng.choice((1, 7, 8, 99))
        elif node is not None:
            node.metadata_props.add(
                key="pkg.torch.onnx.fx_node", value=rng.choice(["%a : ((((", "x" * 5000, "[" * 999])
            )
    return model.SerializeToString()


CONFIG = {
    "version": 1, "model": "models/resnet18.pt2", "train": {"optimizer": "adam", "batch": 2}, "gpus": ["l4"],
    "what_if": {"batch": [1, 2], "amp": ["none", "bf16"]}, "budgets": [{"metric": "live", "limit": "1 GiB"}],
}  # fmt: skip


def cut_proto(data: bytes, rng: random.Random) -> bytes:
    """The message up to one of its fields, or one byte before or after."""
    ends, at, end, depth = [0], 0, len(data), 0
    while at < end and len(ends) < 100_000:
        start = at
        tag, at = _varint(data, at)
        if tag & 7 == 2:
            length, at = _varint(data, at)
            if depth < 3 and length > 64 and rng.random() < 0.5:  # into it
                depth += 1
            else:
                at += length
        elif tag & 7 == 0:
            _, at = _varint(data, at)
        else:
            at += 8 if tag & 7 == 1 else 4
        ends += [start, at]
    return data[: max(rng.choice(ends) + rng.choice((-1, 0, 0, 1)), 0)]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80 or shift > 63:
            break
    return value, at


def cut_archive(data: bytes, rng: random.Random) -> bytes:
    """The zip up to a header, a member, the directory; or with a member that ends after a token of the JSON."""
    marks = [m.start() for mark in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06") for m in re.finditer(mark, data)]
    if rng.random() < 0.5:
        return data[: max(rng.choice(marks) + rng.choice((-1, 0, 1, 4, 22, 30)), 0)]
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        members = {name: source.read(name) for name in source.namelist()}
    graph = next(name for name in members if name.endswith(".json") and "/models/" in name)
    tokens = [m.end() for m in re.finditer(rb"[{}\[\],:]", members[graph])]
    members[graph] = members[graph][: rng.choice(tokens)]
    return _packed(members)


def graph_of(data: bytes, rng: random.Random) -> bytes:
    """A node of an ONNX message with subgraphs, functions or quantised ops changed."""
    return cut_proto(data, rng) if rng.random() < 0.1 else proto_of(data, rng)


def pickle_of(data: bytes, rng: random.Random) -> bytes:
    """A snapshot with its bytes, an opcode or its values changed."""
    kind = rng.randrange(4)
    if kind == 0:
        return bytes_of(data, rng)
    if kind == 1:
        made = bytearray(data)
        places = [at for _, _, at in pickletools.genops(data) if at is not None]
        for _ in range(rng.choice((1, 2, 5))):
            made[rng.choice(places)] = rng.choice(b"NK}])(asut\x85\x86\x87\x88\x94h2.0RcR\x93\x81b")
        return bytes(made)
    if kind == 2:
        places = [at for _, _, at in pickletools.genops(data) if at is not None]
        return data[: rng.choice(places) + rng.choice((0, 1))]
    return pickle.dumps(document_of(pickle.loads(data), rng), protocol=4)


def yaml_of(_: bytes, rng: random.Random) -> bytes:
    import yaml

    made = yaml.safe_dump(document_of(CONFIG, rng), allow_unicode=True).encode("utf-8", "surrogatepass")
    return bytes_of(made, rng) if rng.random() < 0.5 else made


def report_of(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(document_of(json.loads(data), rng)).encode() if rng.random() < 0.7 else bytes_of(data, rng)


# -- what is fed to what ----------------------------------------------------------------------------------------------


def analyse(path: str, rng: random.Random) -> None:
    import staticmem

    words = rng.choice(({}, {"batch": 3}, {"optimizer": "adam"}, {"optimizer": "sgd", "amp": "bf16", "batch": 2}))
    staticmem.analyze(path, **words)


def look(path: str, rng: random.Random) -> None:
    """What the verbs beside analyze do with a model, in any of their formats."""
    from staticmem.cli.main import main

    words = rng.choice(([], ["--optimizer", "adam"], ["--optimizer", "sgd", "--batch", "2"]))
    verbs = [
        ["layers"], ["layers", "-f", "csv"], ["trace"], ["trace", "-f", "json"], ["diff", "models/resnet18.pt2"],
        ["analyze", "-f", "html"], ["analyze", "-f", "md"], ["analyze", "-f", "snapshot"],
        ["analyze", "-f", "perfetto"], ["size", "--gpu", "l4"], ["size", "--gpu", "l4", "-f", "html"], ["levers"],
        ["sweep", "--what-if", "batch=1,2"],
    ]  # fmt: skip
    chosen = rng.choice(verbs)
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())), contextlib.redirect_stderr(errors):
        code = main([chosen[0], path, *chosen[1:], *words])
    if code not in (0, 2) or "SM190" in errors.getvalue():
        raise AssertionError(f"{' '.join(chosen)} {' '.join(words)}: {code}\n{errors.getvalue()}")


def snapshot(path: str, _: random.Random) -> None:
    from staticmem.validate import snapshot_compare, snapshots

    found = snapshots.read(path)
    snapshot_compare.to_json(snapshot_compare.compare(found, found))


def config(path: str, _: random.Random) -> None:
    from staticmem.scenarios.config import load
    from staticmem.scenarios.points import points

    points(load(path), None, {}, {})


def report(path: str, _: random.Random) -> None:
    from staticmem.report.load import load_report
    from staticmem.report.report_markdown import render as markdown
    from staticmem.report.table import render

    loaded = load_report(path)
    render(loaded)
    markdown(loaded)


Kind = tuple[
    str, Callable[[bytes, random.Random], bytes], Callable[[str, random.Random], None], Callable[[], list[bytes]]
]


def _files(*names: str) -> Callable[[], list[bytes]]:
    return lambda: [(ROOT / "models" / name).read_bytes() for name in names]


def _reports() -> list[bytes]:
    import staticmem
    from staticmem.report.json import dumps

    return [dumps(staticmem.analyze(ROOT / "models" / "resnet18.pt2", optimizer="adam")).encode()]


def _snapshots() -> list[bytes]:
    from staticmem.cli.main import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        path = Path(folder) / "a.pickle"
        main(["analyze", str(ROOT / "models" / "seed.pt2"), "--optimizer", "adam", "-o", str(path)])
        return [path.read_bytes()]


def _graphs() -> list[bytes]:
    """Exports of TorchScript, and small graphs with what they rarely have."""
    from onnx import TensorProto, helper

    def info(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    whole, truth = TensorProto.INT64, TensorProto.BOOL
    turn = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Relu", ["a"], ["a2"])], "turn",
        [info("i", [], whole), info("c", [], truth), info("a", ["n", 4])],
        [info("c2", [], truth), info("a2", ["n", 4])],
    )  # fmt: skip
    step = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["s2"]), helper.make_node("Identity", ["s2"], ["o"])], "step",
        [info("s", [4]), info("e", [4])], [info("s2", [4]), info("o", [4])],
    )  # fmt: skip
    then = helper.make_graph([helper.make_node("Sigmoid", ["l"], ["t"])], "then", [], [info("t", ["n", 4])])
    other = helper.make_graph([helper.make_node("Tanh", ["l"], ["u"])], "else", [], [info("u", ["n", 4])])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    body = [helper.make_node("Mul", ["p", "p"], ["q"]), helper.make_node("Softplus", ["q"], ["r"])]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"]),
        helper.make_node("Loop", ["turns", "", "xd"], ["l"], body=turn),
        helper.make_node("If", ["flag"], ["f"], then_branch=then, else_branch=other),
        helper.make_node("Square", ["f"], ["q"], domain="f"),
        helper.make_node("Scan", ["start", "q"], ["last", "all"], body=step, num_scan_inputs=1),
        helper.make_node("SequenceConstruct", ["q", "all"], ["many"]),
        helper.make_node("ConcatFromSequence", ["many"], ["y"], axis=0),
    ]
    weights = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [0.1]),
        helper.make_tensor("zero", TensorProto.INT8, [], [0]),
        helper.make_tensor("turns", whole, [], [3]), helper.make_tensor("start", TensorProto.FLOAT, [4], [0.0] * 4),
        helper.make_tensor("flag", truth, [], [True]),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [info("x", ["n", 4])], [info("y", ["m", 4])], weights)
    function = helper.make_function("f", "Square", ["p"], ["r"], body, opsets[:1])
    made = helper.make_model(graph, opset_imports=opsets, functions=[function])
    exports = sorted((ROOT / "tests" / "data" / "graphs").glob("*_ts.onnx"))
    return [made.SerializeToString(), *(path.read_bytes() for path in exports)]


KINDS: dict[str, Kind] = {
    "pt2": ("pt2", archive_of, analyse, _files("resnet18.pt2", "mobilenet_v2.pt2", "resnet50_hw.pt2")),
    "pt2-bytes": ("pt2", bytes_of, analyse, _files("resnet18.pt2", "seed.pt2")),
    "onnx": ("onnx", proto_of, analyse, _files("resnet18.onnx", "mobilenet_v2.onnx", "seed.onnx")),
    "onnx-bytes": ("onnx", bytes_of, analyse, _files("resnet18.onnx", "seed.onnx")),
    "onnx-cut": ("onnx", cut_proto, analyse, _files("resnet18.onnx", "seed.onnx")),
    "onnx-graphs": ("onnx", graph_of, analyse, _graphs),
    "pt2-cut": ("pt2", cut_archive, analyse, _files("resnet18.pt2", "seed.pt2")),
    "pt2-verbs": ("pt2", archive_of, look, _files("seed.pt2", "resnet18.pt2")),
    "onnx-verbs": ("onnx", graph_of, look, _graphs),
    "snapshot": ("pickle", pickle_of, snapshot, _snapshots),
    "config": ("yaml", yaml_of, config, lambda: [b""]),
    "report": ("json", report_of, report, _reports),
}


class TooSlow(BaseException):
    """Not an Exception: no handler may take it for an error of the file."""


def attempt(run: Callable[[str, random.Random], None], path: Path, rng: random.Random, limit: float) -> str | None:
    """What went wrong; None: nothing."""
    from staticmem import StaticmemError

    def stop(_: int, __: FrameType | None) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        run(str(path), rng)
    except StaticmemError as error:
        texts = (error.what, error.why, error.hint, error.code)
        return None if all(isinstance(text, str) for text in texts) and error.what else f"an empty error: {texts}"
    except TooSlow:
        return f"more than {limit:g} s"
    except BaseException:
        return traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Damaged files for the readers.")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="files of each kind")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--limit", type=float, default=20, help="seconds for one file")
    parser.add_argument("--memory", type=float, default=4, help="GiB of address space")
    parser.add_argument("--out", type=Path, default=Path("findings"))
    parser.add_argument("--replay", type=Path)
    given = parser.parse_args()
    most = int(given.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if given.replay is not None:
        kind = KINDS[given.replay.name.rsplit("-", 2)[0]]  # <kind>-<seed>-<number>.<suffix>
        found = attempt(kind[2], given.replay, random.Random(int(given.replay.stem.rsplit("-", 1)[1])), given.limit)
        print(found or "a clear error, or analysed")
        return bool(found)
    started, findings = time.monotonic(), 0
    for name in given.kind or KINDS:
        suffix, mutate, run, seeds = KINDS[name]
        originals, done = seeds(), 0
        for number in range(given.count):
            if time.monotonic() - started > given.seconds:
                break
            rng = random.Random(f"{name} {given.seed} {number}")
            given.out.mkdir(exist_ok=True)
            path = given.out / f"{name}-{given.seed}-{number}.{suffix}"
            path.write_bytes(mutate(rng.choice(originals), rng))
            found = attempt(run, path, random.Random(number), given.limit)
            done += 1
            if found is None:
                path.unlink()
            else:
                findings += 1
                print(f"{path}\n{found}\n", flush=True)
        print(f"{name}: {done:,} files", flush=True)
    print(f"{findings} findings")
    return findings > 0


if __name__ == "__main__":
    raise SystemExit(main())
