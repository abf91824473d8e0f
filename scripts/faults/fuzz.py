"""Feeds the readers thousands of damaged files and lists what is not a clear error.

    python scripts/faults/fuzz.py --seconds 300            # all kinds
    python scripts/faults/fuzz.py --kind onnx --seed 7 --count 2000
    python scripts/faults/fuzz.py --replay findings/onnx-7-1234.onnx

A file may be analysed, or refused with a StaticmemError (exit code 2). Everything else is a finding and is kept in
`findings/`: another exception, more than --limit seconds, more than --memory GiB. Files are made from those of models/
by mutations of bytes and of structure (a node of the JSON or of the protobuf message is changed, moved, repeated or
removed), or end at a boundary: of a field of the message, of a part of the zip, of a token of the JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import pickletools
import random
import re
import resource
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import fuzz_targets as targets  # noqa: E402 - beside this file

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

    made = yaml.safe_dump(document_of(targets.CONFIG, rng), allow_unicode=True).encode("utf-8", "surrogatepass")
    return bytes_of(made, rng) if rng.random() < 0.5 else made


def report_of(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(document_of(json.loads(data), rng)).encode() if rng.random() < 0.7 else bytes_of(data, rng)


# -- what is fed to what ----------------------------------------------------------------------------------------------

Kind = tuple[
    str, Callable[[bytes, random.Random], bytes], Callable[[str, random.Random], None], Callable[[], list[bytes]]
]


def _changed_yaml(data: bytes, rng: random.Random) -> bytes:
    """The document with a node changed, or the text with its bytes."""
    import yaml

    if rng.random() < 0.3:
        return bytes_of(data, rng)
    document = document_of(json.loads(json.dumps(yaml.safe_load(data), default=str)), rng)
    return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")


KINDS: dict[str, Kind] = {
    "pt2": ("pt2", archive_of, targets.analyse, targets.files("resnet18.pt2", "mobilenet_v2.pt2", "resnet50_hw.pt2")),
    "pt2-bytes": ("pt2", bytes_of, targets.analyse, targets.files("resnet18.pt2", "seed.pt2")),
    "onnx": ("onnx", proto_of, targets.analyse, targets.files("resnet18.onnx", "mobilenet_v2.onnx", "seed.onnx")),
    "onnx-bytes": ("onnx", bytes_of, targets.analyse, targets.files("resnet18.onnx", "seed.onnx")),
    "onnx-cut": ("onnx", cut_proto, targets.analyse, targets.files("resnet18.onnx", "seed.onnx")),
    "onnx-graphs": ("onnx", graph_of, targets.analyse, targets.graphs),
    "pt2-cut": ("pt2", cut_archive, targets.analyse, targets.files("resnet18.pt2", "seed.pt2")),
    "pt2-verbs": ("pt2", archive_of, targets.look, targets.files("seed.pt2", "resnet18.pt2")),
    "onnx-verbs": ("onnx", graph_of, targets.look, targets.graphs),
    "snapshot": ("pickle", pickle_of, targets.snapshot, targets.snapshots),
    "config": ("yaml", yaml_of, targets.config, lambda: [b""]),
    "report": ("json", report_of, targets.report, targets.reports),
    "record": ("json", report_of, targets.record, targets.records),
    "profile": ("yaml", _changed_yaml, targets.profile, targets.profiles),
    "gpus": ("yaml", _changed_yaml, targets.gpus, targets.catalogs),
    "prices": ("yaml", _changed_yaml, targets.prices, targets.price_lists),
    "toml": ("toml", bytes_of, targets.config, targets.tables),
    "session": ("onnx", graph_of, targets.session, targets.graphs),
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
        return traceback.format_exc(limit=-16)
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
    targets.check_modules()
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
