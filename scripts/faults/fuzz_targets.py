"""What `fuzz.py` and `fuzz_coverage.py` feed: for each kind of file small sound ones, and what is done with it."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Seeds = Callable[[], list[bytes]]
Run = Callable[[str, random.Random], None]

# -- what is done with a file ------------------------------------------------------------------------------------------


def command(*words: str) -> None:
    """A command line of staticmem: exit code 0, 1 or 2, and a StaticmemError or none."""
    from staticmem import StaticmemError
    from staticmem.cli.main import main

    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main([*words, "--debug"])  # without its net for bugs
        except StaticmemError:
            return
    assert code in (0, 1, 2), f"{words[0]} {' '.join(words[2:])}: {code}"


def analyse(path: str, rng: random.Random) -> None:
    import staticmem

    words = rng.choice(({}, {"batch": 3}, {"optimizer": "adam"}, {"optimizer": "sgd", "amp": "bf16", "batch": 2}))
    staticmem.analyze(path, **words)


def look(path: str, rng: random.Random) -> None:
    """What the verbs beside analyze do with a model, in any of their formats."""
    words = rng.choice(([], ["--optimizer", "adam"], ["--optimizer", "sgd", "--batch", "2"]))
    verbs = [
        ["layers"], ["layers", "-f", "csv"], ["trace"], ["trace", "-f", "json"], ["diff", "models/resnet18.pt2"],
        ["analyze", "-f", "html"], ["analyze", "-f", "md"], ["analyze", "-f", "snapshot"],
        ["analyze", "-f", "perfetto"], ["size", "--gpu", "l4"], ["size", "--gpu", "l4", "-f", "html"], ["levers"],
        ["sweep", "--what-if", "batch=1,2"],
    ]  # fmt: skip
    chosen = rng.choice(verbs)
    command(chosen[0], path, *chosen[1:], *words)


def session(path: str, rng: random.Random) -> None:
    command("analyze", path, "--runtime", "onnxruntime", *rng.choice(([], ["--batch", "2"], ["-f", "json"])))


def snapshot(path: str, _: random.Random) -> None:
    from staticmem.report.text import PLAIN
    from staticmem.validate import snapshot_compare, snapshots

    found = snapshots.read(path)
    compared = snapshot_compare.compare(found, found)
    for form in snapshot_compare.FORMATS:
        form.render(compared, PLAIN)


def config(path: str, _: random.Random) -> None:
    from staticmem.config.discover import read
    from staticmem.studies.points import points

    points(read(path), None, {}, {})


def report(path: str, _: random.Random) -> None:
    from staticmem.report.formats.report import render
    from staticmem.report.formats.report_markdown import render as markdown
    from staticmem.report.html import render as page
    from staticmem.report.json import dumps
    from staticmem.report.load import load_report
    from staticmem.report.text import View

    loaded = load_report(path)
    render(loaded, View(explain=True))
    markdown(loaded)
    dumps(loaded)
    page(loaded)


def diff(path: str, _: random.Random) -> None:
    command("diff", path, str(ROOT / "tests" / "report" / "golden" / "vgg16-amp.json"))
    command("diff", path, str(ROOT / "tests" / "report" / "golden" / "resnet50-adam.json"), "-f", "md")


def record(path: str, _: random.Random) -> None:
    for format_ in ("table", "md", "csv", "json"):
        command("reconcile", path, "-f", format_)
    command("calibrate", path)
    command("calibrate", path, path, path, "--gpu", "l4")


def profile(path: str, _: random.Random) -> None:
    from staticmem.devices import profile as profiles
    from staticmem.devices.gpus import cards

    profiles.load.cache_clear()
    found = profiles.load(Path(path))
    for card in list(cards().values())[:4]:
        found.overhead(card)
    for torch in ("2.6", "2.13"):
        found.cublas(torch).workspace("sm_90")
        found.cudnn(torch)
        found.loaded(torch, "EAGER").libraries  # noqa: B018 - is worked out


def gpus(path: str, _: random.Random) -> None:
    command("gpus", "--gpus-file", path)
    command("gpus", "--gpus-file", path, "-f", "csv")


def prices(path: str, _: random.Random) -> None:
    from staticmem.devices.gpus import cards
    from staticmem.studies.prices import load

    load(path, cards())


# -- small sound files -------------------------------------------------------------------------------------------------


def files(*names: str) -> Seeds:
    """Of models/."""
    return lambda: [(ROOT / "models" / name).read_bytes() for name in names]


def reports() -> list[bytes]:
    import staticmem
    from staticmem.report.json import dumps

    return [dumps(staticmem.analyze(ROOT / "models" / "resnet18.pt2", optimizer="adam")).encode()]


def small_reports() -> list[bytes]:
    """One for each shape that a report has: inference, training, with a device, with ranks, of the textbook."""
    import staticmem
    from staticmem.report.json import dumps

    model = ROOT / "models" / "seed.pt2"
    words: list[dict[str, Any]] = [
        {}, {"optimizer": "adam", "gpu": "l4"}, {"method": "textbook"},
        {"optimizer": "sgd", "parallel": "ddp", "devices": 2, "gpu": "l4"},
    ]  # fmt: skip
    return [dumps(staticmem.analyze(model, **given)).encode() for given in words]


def snapshots() -> list[bytes]:
    from staticmem.cli.main import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        path = Path(folder) / "a.pickle"
        main(["analyze", str(ROOT / "models" / "seed.pt2"), "--optimizer", "adam", "-o", str(path)])
        return [path.read_bytes()]


CONFIG = {
    "version": 1, "model": "models/resnet18.pt2", "train": {"optimizer": "adam", "batch": 2}, "gpus": ["l4"],
    "what_if": {"batch": [1, 2], "amp": ["none", "bf16"]}, "budgets": [{"metric": "live", "limit": "1 GiB"}],
}  # fmt: skip


def configs() -> list[bytes]:
    """The file that `staticmem init` writes, those of the documentation, and one as JSON."""
    import re

    from staticmem.config.template import template

    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    made = [json.dumps(CONFIG), template("m.pt2", "schemas/config-1.schema.json"), *examples]
    return [text.encode() for text in made]


def tables() -> list[bytes]:
    text = (
        b'[tool.staticmem]\nmodel = "m.pt2"\ntrain = {optimizer = "adam", batch = 2}\ngpus = ["l4"]\n'
        b'[tool.staticmem.what_if]\nbatch = [1, 2]\n[[tool.staticmem.budgets]]\nmetric = "live"\nlimit = "1 GiB"\n'
    )
    return [text]


def profiles() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "staticmem" / "devices" / "profiles").glob("*.yaml"))]


def price_lists() -> list[bytes]:
    return [b"version: 1\ncurrency: EUR\nprices:\n  l40s: {buy: 8000, hour: 1.05}\n  h100-sxm-80gb: {hour: 2.4}\n"]


def catalogs() -> list[bytes]:
    """The first cards of the package's catalog, and one with everything that a card may say."""
    import yaml

    document = yaml.safe_load((ROOT / "staticmem" / "devices" / "gpus.yaml").read_bytes())
    document["checked"] = str(document["checked"])
    cards = sorted(document["cards"].items(), key=lambda item: -len(str(item[1])))
    made = [{**document, "cards": dict([card])} for card in (cards[0], cards[len(cards) // 2], cards[-1])]
    return [yaml.safe_dump(one, sort_keys=False).encode() for one in made]


def records() -> list[bytes]:
    """Those of records/ without most of what they list, and one of a card."""
    found = []
    for path in sorted((ROOT / "records").glob("*.json")):
        document = json.loads(path.read_bytes())
        document["nodes"]["worst"] = document["nodes"]["worst"][:2]
        found.append(document)
    card = json.loads(json.dumps(found[0]))
    card["device"] = {"kind": "cuda", "name": "NVIDIA L4", "memory": 23 << 30, "driver": "580.95"}
    probes = ("context", "libraries", "cuBLAS workspace", "cublasLt workspace", "workspaces kept")
    card["meters"] += [{"name": name, "predicted": None, "measured": 300 << 20, "note": ""} for name in probes]
    return [json.dumps(document).encode() for document in (*found, card)]


def graphs() -> list[bytes]:
    """Exports of TorchScript, and a small graph with what they rarely have."""
    exports = sorted((ROOT / "tests" / "data" / "graphs").glob("*_ts.onnx"))
    return [uncommon(), *(path.read_bytes() for path in exports)]


def uncommon() -> bytes:
    """Loop, If, Scan, a sequence, a function, quantised values."""
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
    made: bytes = helper.make_model(graph, opset_imports=opsets, functions=[function]).SerializeToString()
    return made


def external() -> bytes:
    """A product whose weight, and the shape behind it, are in files beside the model."""
    from onnx import TensorProto, helper

    tensors = [
        helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16),
        helper.make_tensor("s", TensorProto.INT64, [2], [2, 8]),
    ]
    for tensor in tensors:
        for field in ("float_data", "int64_data"):
            tensor.ClearField(field)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights.bin"), ("offset", "4096"), ("length", "64")):
            tensor.external_data.add(key=key, value=value)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "s"], ["y"])]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["n", 4]), ("y", [2, 8]))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    made: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
    return made


def small_graphs() -> list[bytes]:
    """Exports of both kinds, without the payload of their weights; external data; what exports rarely have."""
    import onnx

    found = [uncommon(), external()]
    for path in (ROOT / "models" / "seed.onnx", *sorted((ROOT / "tests" / "data" / "graphs").glob("*.onnx"))):
        made = onnx.ModelProto.FromString(path.read_bytes())
        for tensor in made.graph.initializer:
            if len(tensor.raw_data) > 64:
                tensor.raw_data = b""
        data = made.SerializeToString()
        if len(data) < 40_000:
            found.append(data)
    return found


def member(data: bytes) -> bytes:
    """The graph of a `.pt2`: JSON."""
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        name = next(n for n in source.namelist() if n.endswith(".json") and "/models/" in n)
        return source.read(name)


def archive(document: bytes) -> bytes:
    """A `.pt2` of a graph."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as target:
        target.writestr("m/models/model.json", document)
    return made.getvalue()


def small_exports() -> list[bytes]:
    """Pieces of six nodes of real exports, so that each kind of operator is in a small one."""
    found, seen = [member((ROOT / "models" / "seed.pt2").read_bytes())], set[str]()
    for path in sorted((ROOT / "tests" / "data" / "graphs").glob("*.pt2")):
        document = json.loads(member(path.read_bytes()))
        for piece in pieces(document, 6):
            targets = {node["target"] for node in piece["graph_module"]["graph"]["nodes"]}
            if not targets <= seen:
                seen |= targets
                found.append(json.dumps(piece).encode())
    return found


def pieces(document: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Graphs of `size` nodes in a row. What they read from before is an input, or a parameter as it was one."""
    module = document["graph_module"]
    graph, signature = module["graph"], module["signature"]
    parameters = {
        spec[kind]["arg"]["name"]: spec
        for spec in signature["input_specs"] for kind in ("parameter", "buffer") if kind in spec
    }  # fmt: skip
    for start in range(0, len(graph["nodes"]), size):
        nodes = graph["nodes"][start : start + size]
        made = {name for node in nodes for name in _names(node["outputs"])}
        read = dict.fromkeys(name for node in nodes for name in _names(node["inputs"]) if name not in made)
        if not set(read) <= set(graph["tensor_values"]):
            continue  # it reads a size from before
        last = [name for name in _names(nodes[-1]["outputs"]) if name in graph["tensor_values"]]
        kept = {name for name in (*read, *made) if name in graph["tensor_values"]}
        inputs = [parameters.get(n, {"user_input": {"arg": {"as_tensor": {"name": n}}}}) for n in read]
        piece = {
            **graph, "nodes": nodes, "inputs": [{"as_tensor": {"name": name}} for name in read],
            "outputs": [{"as_tensor": {"name": name}} for name in last],
            "tensor_values": {name: graph["tensor_values"][name] for name in graph["tensor_values"] if name in kept},
            "sym_int_values": {name: value for name, value in graph["sym_int_values"].items() if name in made},
        }  # fmt: skip
        outputs = [{"user_output": {"arg": {"as_tensor": {"name": name}}}} for name in last]
        yield {
            **document, "graph_module": {
                **module, "graph": piece, "module_call_graph": [],
                "signature": {"input_specs": inputs, "output_specs": outputs},
            },
        }  # fmt: skip


def _names(value: Any) -> Iterator[str]:
    """Names of values within arguments."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key.startswith(("as_tensor", "as_optional_tensor", "as_sym_int")):
                yield from _named(item)
            elif key != "name":
                yield from _names(item)
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key in ("name", "as_name"):
            if isinstance(value.get(key), str):
                yield value[key]
        for item in value.values():
            yield from _named(item)
    elif isinstance(value, list):
        for item in value:
            yield from _named(item)


# -- what is fed with coverage -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A reader.

    `shape`: how its text is changed ("json", "yaml", "proto", "pickle", "bytes"); `modules`: the sources whose lines
    count as reached, below staticmem/; `pack`: from that text to the file.
    """

    suffix: str
    shape: str
    seeds: Seeds
    run: Run
    modules: tuple[str, ...]
    pack: Callable[[bytes], bytes] = bytes


_PT2 = ("frontends/export_", "frontends/fields", "ir/expressions")
_YAML = ("devices/documents", "documents")
_CONFIG = ("documents", "scenario/kinds", "config/config", "studies/points", "config/discover")

TARGETS: dict[str, Target] = {
    "pt2": Target("pt2", "json", small_exports, analyse, _PT2, archive),
    "pt2-zip": Target("pt2", "bytes", lambda: [archive(member(files("seed.pt2")()[0]))], analyse, _PT2),
    "onnx": Target("onnx", "proto", small_graphs, analyse, ("frontends/onnx/",)),
    "onnx-wire": Target("onnx", "bytes", lambda: [uncommon(), external()], analyse, ("frontends/onnx/",)),
    "session": Target("onnx", "proto", small_graphs, session, ("ort/",)),
    "snapshot": Target("pickle", "pickle", snapshots, snapshot, ("validate/plain_pickle", "validate/snapshots")),
    "config": Target("yaml", "yaml", configs, config, _CONFIG),
    "toml": Target("toml", "bytes", tables, config, _CONFIG),
    "profile": Target("yaml", "yaml", profiles, profile, ("devices/profile", *_YAML)),
    "gpus": Target("yaml", "yaml", catalogs, gpus, ("devices/gpus", *_YAML)),
    "prices": Target("yaml", "yaml", price_lists, prices, ("studies/prices", *_YAML)),
    "report": Target("json", "json", small_reports, report, ("report/load",)),
    "diff": Target("json", "json", small_reports, diff, ("report/load", "report/changes", "report/diff", "cli/saved")),
    "record": Target("json", "json", records, record, ("validate/records", "validate/summary", "validate/calibrate")),
}


def check_modules() -> None:
    """Raises:
    SystemExit: a target names sources that are not there any more: its coverage would count nothing.
    """
    package = ROOT / "staticmem"
    sources = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    for name, target in TARGETS.items():
        for module in target.modules:
            if not any(source.startswith(module) for source in sources):
                raise SystemExit(f"fuzz_targets.py: target '{name}' names {module}, which is not in staticmem/")
