"""Pages for the tests: of example models, of a large graph, and of a model that means harm."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from loading import load_module
from onnx import TensorProto, helper

from staticmem.studies import Request, Study
from staticmem.studies.page import page

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "models"

HOSTILE = (
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=1</script>",
    "<!--<script>",
    "\u202egnp.exe",  # turns the direction of what follows
    "a\u2028b",
    "'\"&amp;{{7*7}}${window.hacked=1}",
    "long" * 300,
)


def study_of(path: Path, **words: Any) -> Study:
    return Study.open(path, Request(**words))


def write_page(study: Study, target: Path, **words: Any) -> Path:
    target.write_text(page(study, **words), encoding="utf-8", newline="\n")
    return target


def hostile_model(folder: Path) -> Path:
    """A chain of layers whose tensors, weights, modules and ops have the names of `HOSTILE`."""
    nodes, weights, current = [], [], "input" + HOSTILE[0]
    first = current
    for index, name in enumerate(HOSTILE):
        weight = f"{name}.weight"
        weights.append(helper.make_tensor(weight, TensorProto.FLOAT, [64, 64], [0.0] * 4096))
        nodes.append(helper.make_node("MatMul", [current, weight], [f"{name}{index}"], f"/{name}/MatMul"))
        nodes.append(helper.make_node(name, [f"{name}{index}"], [f"{name}{index}x"], name, domain="custom"))
        current = f"{name}{index}"
    nodes.append(helper.make_node("Relu", [current], ["out" + HOSTILE[1]], "/relu/Relu"))
    graph = helper.make_graph(
        nodes,
        HOSTILE[0],
        [helper.make_tensor_value_info(first, TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("out" + HOSTILE[1], TensorProto.FLOAT, ["batch", 64])],
        weights,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("custom", 1)]
    path = folder / f"{HOSTILE[0]}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, producer_name=HOSTILE[0]), path)
    return path


@cache
def large() -> tuple[Study, str]:
    """A graph of 10,000 ops and its page; made once, it takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        study = study_of(chain(10_000, Path(folder) / "chain.onnx"), batch=8, optimizer="adam")
        return study, page(study)


def chain(count: int, path: Path) -> Path:
    """The network of `count` nodes that the benchmarks measure."""
    load_module(ROOT / "benchmarks" / "graphs.py").chain(count, str(path))
    return path
