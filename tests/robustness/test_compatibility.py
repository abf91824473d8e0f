"""Opsets 7 to 23 give the same step, sources are of the oldest Python, and the same input gives the same bytes."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, defs, helper

import staticmem
from staticmem.cli import session
from staticmem.cli.main import make_parser

ROOT = Path(__file__).resolve().parents[2]
OPSETS = range(7, 24)
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def network(opset: int) -> Any:
    """Conv, BatchNorm, ReLU6, padding, a doubled resolution, squeezed means, a linear layer, dropout, softmax.

    Squeeze and Unsqueeze have axes as input from 13 on, Pad and Clip their numbers from 11, Dropout its ratio from 12;
    Upsample became Resize in 10, whose inputs moved in 11; ReduceMean followed in 18.
    """
    weights: list[Any] = []

    def constant(name: str, kind: int, values: list[Any], shape: list[int] | None = None) -> str:
        weights.append(helper.make_tensor(name, kind, [len(values)] if shape is None else shape, values))
        return name

    def weight(name: str, *shape: int) -> str:
        count = 1
        for size in shape:
            count *= size
        return constant(name, FLOAT, [0.5] * count, list(shape))

    node = helper.make_node
    norm = [weight(f"bn.{leaf}", 8) for leaf in ("weight", "bias", "running_mean", "running_var")]
    nodes = [
        node("Conv", ["x", weight("conv.weight", 8, 3, 3, 3)], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", *norm], ["b"]),
    ]
    if opset >= 11:
        limits = [constant("low", FLOAT, [0.0], []), constant("high", FLOAT, [6.0], [])]
        nodes.append(node("Clip", ["b", *limits], ["r"]))
        nodes.append(node("Pad", ["r", constant("pads", INT64, [0, 0, 1, 1, 0, 0, 1, 1])], ["p"]))
    else:
        nodes.append(node("Clip", ["b"], ["r"], min=0.0, max=6.0))
        nodes.append(node("Pad", ["r"], ["p"], pads=[0, 0, 1, 1, 0, 0, 1, 1]))
    if opset >= 11:
        nodes.append(node("Resize", ["p", "", constant("scales", FLOAT, [1.0, 1.0, 2.0, 2.0])], ["u"], mode="nearest"))
    elif opset == 10:
        nodes.append(node("Resize", ["p", constant("scales", FLOAT, [1.0, 1.0, 2.0, 2.0])], ["u"], mode="nearest"))
    elif opset >= 9:
        nodes.append(node("Upsample", ["p", constant("scales", FLOAT, [1.0, 1.0, 2.0, 2.0])], ["u"], mode="nearest"))
    else:
        nodes.append(node("Upsample", ["p"], ["u"], mode="nearest", scales=[1.0, 1.0, 2.0, 2.0]))
    if opset >= 18:
        nodes.append(node("ReduceMean", ["u", constant("axes", INT64, [2, 3])], ["m"], keepdims=1))
    else:
        nodes.append(node("ReduceMean", ["u"], ["m"], axes=[2, 3], keepdims=1))
    if opset >= 13:
        nodes.append(node("Squeeze", ["m", constant("squeezed", INT64, [2, 3])], ["s"]))
    else:
        nodes.append(node("Squeeze", ["m"], ["s"], axes=[2, 3]))
    nodes.append(node("Gemm", ["s", weight("fc.weight", 10, 8), weight("fc.bias", 10)], ["g"], transB=1))
    if opset >= 12:
        nodes.append(node("Dropout", ["g", constant("ratio", FLOAT, [0.5], [])], ["d"]))
    else:
        nodes.append(node("Dropout", ["g"], ["d"], ratio=0.5))
    nodes.append(node("Softmax", ["d"], ["y"], axis=1))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", FLOAT, ["n", 3, 16, 16])],
        [helper.make_tensor_value_info("y", FLOAT, ["n", 10])], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def facts(report: Any) -> tuple[Any, ...]:
    return (
        report.peak.live_bytes, report.peak.by_category, report.parameters.count, report.coverage.unknown,
        [(value.name, tuple(value.shape)) for value in report.model.outputs],
    )  # fmt: skip


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("words", [{}, {"optimizer": "adam"}], ids=["inference", "training"])
def test_a_network_is_the_same_in_every_opset(opset: int, words: dict[str, Any]) -> None:
    if opset > defs.onnx_opset_version():
        pytest.skip("this onnx does not know it yet")
    report = staticmem.analyze(network(opset), batch=4, **words)
    assert not report.coverage.unknown
    assert report.parameters.count == 8 * 27 + 2 * 8 + 8 * 10 + 10
    assert [tuple(value.shape) for value in report.model.outputs] == [(4, 10)]
    assert facts(report) == facts(staticmem.analyze(network(17), batch=4, **words))


def test_the_peak_of_that_network() -> None:
    """Inference: while the doubled image is made, it and the padded one are alive, in float32, beside the weights."""
    report = staticmem.analyze(network(17), batch=4, outputs="dropped")
    padded, doubled = 4 * 8 * 18 * 18 * 4, 4 * 8 * 36 * 36 * 4
    assert report.peak.by_category["activation"] == padded + doubled


# -- Python 3.10 -------------------------------------------------------------------------------------------------

# what came to the standard library after 3.10: module -> names; None: the module itself
NEWER: dict[str, tuple[str, ...] | None] = {
    "tomllib": None,
    "typing": ("Self", "Never", "LiteralString", "assert_never", "assert_type", "reveal_type", "Required", "Unpack",
               "NotRequired", "TypeVarTuple", "dataclass_transform", "override", "TypeAliasType"),
    "enum": ("StrEnum", "verify", "ReprEnum", "member", "nonmember"),
    "datetime": ("UTC",),
    "contextlib": ("chdir",),
    "itertools": ("batched",),
    "asyncio": ("TaskGroup", "timeout", "Runner"),
    "hashlib": ("file_digest",),
    "operator": ("call",),
    "math": ("cbrt", "exp2", "sumprod"),
    "inspect": ("getmembers_static",),
    "warnings": ("deprecated",),
}  # fmt: skip
BUILT_IN = {"ExceptionGroup", "BaseExceptionGroup", "PythonFinalizationError"}
SOURCES = sorted((ROOT / "staticmem").rglob("*.py"))


def newer(tree: ast.AST) -> list[str]:
    """Uses of what Python 3.10 does not have, unless within `try` or under a check of the version."""
    found: list[str] = []
    guarded = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and "version_info" in ast.unparse(node.test))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if NEWER.get(alias.name, ()) is None]
        elif isinstance(node, ast.ImportFrom) and node.module in NEWER:
            names = NEWER[node.module]
            found += [f"{node.module}.{alias.name}" for alias in node.names if names is None or alias.name in names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = NEWER.get(node.value.id) or ()
            found += [f"{node.value.id}.{node.attr}"] if node.attr in names else []
        elif isinstance(node, ast.Name) and node.id in BUILT_IN:
            found.append(node.id)
    return found


def test_sources_are_python_3_10() -> None:
    assert len(SOURCES) > 200
    wrong: dict[str, list[str]] = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        found = newer(ast.parse(text, str(path), feature_version=(3, 10)))
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


@pytest.mark.parametrize(
    "text",
    ["import tomllib", "from typing import Self", "from enum import StrEnum", "import datetime\ndatetime.UTC",
     "raise ExceptionGroup('', [])"],
)  # fmt: skip
def test_what_is_newer_is_found(text: str) -> None:
    assert newer(ast.parse(text))
    assert not newer(
        ast.parse("try:\n" + "".join(f"    {line}\n" for line in text.splitlines()) + "except E:\n    pass")
    )


def test_syntax_that_is_newer_is_found() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* ValueError:\n    pass", feature_version=(3, 10))


# -- the same bytes ----------------------------------------------------------------------------------------------

MODEL = str(ROOT / "models" / "resnet18.pt2")
SEED, SEED_ONNX = (str(ROOT / "models" / name) for name in ("seed.pt2", "seed.onnx"))
RECORDS = str(ROOT / "records")
STEP = ["--optimizer", "adam", "--batch", "4"]
# what is run for each verb; `-f` takes every format that it has
VERBS: dict[str, list[str]] = {
    "analyze": [SEED, *STEP, "--gpu", "l4"],
    "check": [SEED, *STEP, "--budget", "live=1GiB", "--budget", "live=1MiB", "--exit-zero", "-j", "1"],
    "diff": [SEED_ONNX, SEED, *STEP],
    "fit": [SEED, *STEP, "--gpu", "l4"],
    "gpus": [],
    "graph": [SEED, *STEP],
    "layers": [SEED, *STEP],
    "levers": [SEED, *STEP, "--gpu", "l4"],
    "plan": [str(ROOT / "models" / "plan.yaml")],
    "reconcile": [RECORDS],
    "report": [str(ROOT / "tests" / "report" / "golden" / "vgg16-amp.json")],
    "session": [SEED_ONNX, "--runtime", "onnxruntime", "--batch", "4"],  # of analyze
    "size": [SEED, *STEP, "--gpu", "l4"],
    "sweep": [SEED, *STEP, "--what-if", "amp=none,bf16", "-j", "1"],
    "trace": [SEED, *STEP],
    "why": [SEED, "0", *STEP],
}
# calibrate has readings of a card as input, and writes today's date; compare-snapshot, explain-oom and validate read
# what runs wrote; doctor shows this machine
NOT_HERE = {"calibrate", "compare-snapshot", "doctor", "explain-oom", "validate"}


def formats() -> dict[str, list[str]]:
    """What `-f` takes, by verb; those of a session are of `analyze --runtime onnxruntime`."""
    verbs = next(action for action in make_parser()._actions if action.dest == "verb").choices
    assert isinstance(verbs, dict)
    flags = {verb: {action.dest: action for action in parser._actions} for verb, parser in verbs.items()}
    listed = {verb: list(of["format"].choices or ()) for verb, of in flags.items() if "format" in of}
    return {**listed, "session": list(session.FORMATS)}


FORMATS = formats()
# DeepSpeed has no settings for one device, and the saved report has no figures of the host
LACKING = {
    *(("fit", name) for name in ("deepspeed", "llama-factory", "axolotl")),
    *(("report", name) for name in ("k8s", "trainjob", "slurm")),
}
COMMANDS: dict[str, list[str]] = {
    **{
        f"{verb} {format_}": ["analyze" if verb == "session" else verb, *words, "-f", format_]
        for verb, words in VERBS.items()
        for format_ in FORMATS[verb]
        if (verb, format_) not in LACKING
    },
    "fit deepspeed": ["fit", SEED, *STEP, "--gpu", "l4", "--devices", "2", "--parallel", "zero2", "-f", "deepspeed"],
    "explained": ["analyze", MODEL, *STEP, "--explain-peak"],
    "onnx": ["analyze", SEED_ONNX, *STEP, "-f", "json"],
    "larger": ["analyze", MODEL, *STEP, "-f", "json", "--gpu", "l4"],
    "ranks": ["analyze", SEED, *STEP, "--parallel", "zero3", "--devices", "4", "-f", "json"],
    "schema": ["schema"],
    "schema config": ["schema", "config"],
    "explain": ["explain", "SM101"],
    **{f"completion {shell}": ["completion", shell] for shell in ("bash", "zsh", "tcsh")},
}
_RUN = """
import contextlib, io, sys
from staticmem.cli.main import main
for words in eval(sys.argv[1]):
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out):
        code = main(words)
    data = out.buffer.getvalue()
    sys.stdout.buffer.write(f"{code} {len(data)}\\n".encode() + data)
"""


def outputs(seed: int) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, repr(list(COMMANDS.values()))],
        capture_output=True, timeout=300, env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def split(data: bytes) -> list[tuple[bytes, bytes]]:
    found = []
    while data:
        head, data = data.split(b"\n", 1)
        code, size = head.split()
        found.append((code, data[: int(size)]))
        data = data[int(size) :]
    return found


def test_every_verb_with_formats_is_run() -> None:
    assert set(FORMATS) == set(VERBS) | NOT_HERE


def test_any_hash_seed_gives_the_same_bytes() -> None:
    first, second = split(outputs(1)), split(outputs(2))
    assert len(first) == len(COMMANDS)
    for name, one, other in zip(COMMANDS, first, second, strict=True):
        code, data = one
        assert code == b"0", name
        assert len(data) > 50, name
        timed = re.compile(rb'"(seconds|elapsed\w*|created)": ?[\d."T:Z+-]+')  # how long it took is not of the input
        assert timed.sub(b"", data) == timed.sub(b"", other[1]), name
