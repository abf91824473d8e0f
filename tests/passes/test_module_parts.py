"""Classes told by the names of parts: the grammar, what is tolerated, and what is left open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticmem.ir.classes import alternatives, any_of, short
from staticmem.passes import module_parts
from staticmem.passes.module_parts import Grammar, call_of, classes_of, fits, grammar, grammar_of

RELU, CONV, NORM = "torch.nn.ReLU", "torch.nn.Conv2d", "torch.nn.BatchNorm2d"
ROWS: list[Any] = [
    [CONV, {}, {"weight": [4], "bias?": [1]}, ["convolution"]],
    [NORM, {}, {"weight": [1], "bias": [1], "running_mean": [1], "running_var": [1]}],
    [RELU, {}, {}, ["relu"]],
    ["timm.Block", {"conv1": [0], "bn1": [1], "act1?": [2], "conv2": [0], "bn2": [1], "down?": [4]}, {}, []],
    ["timm.Block/down=Sequential", {"*": [0, 1]}, {}],
    ["timm.Net!", {"stem": [0], "blocks": [6], "head?": [7]}, {}],
    ["timm.Net/blocks=Sequential", {"*": [3, 8, 9]}, {}],
    ["torch.nn.Linear", {}, {"weight": [2], "bias?": [1]}],
    ["timm.Gated", {"conv1": [0], "bn1": [1], "act1?": [2], "conv2": [0], "bn2": [1], "gate": [0]}, {}],
    ["timm.Twin", {"conv1": [0], "bn1": [1], "act1?": [2], "conv2": [0], "bn2": [1]}, {}, ["sigmoid"]],
]


def network(**extra: int) -> dict[str, int]:
    """Tensors of a Net with two blocks, by name: their ranks."""
    made = {"stem.weight": 4}
    for block in ("blocks.0", "blocks.1"):
        for n in (1, 2):
            made[f"{block}.conv{n}.weight"] = 4
            made.update({f"{block}.bn{n}.{k}": 1 for k in ("weight", "bias", "running_mean", "running_var")})
    return {**made, **extra}


def told(tensors: dict[str, int], operators: dict[str, set[str]] | None = None) -> dict[str, str]:
    """With an addition in each block."""
    added = {path: {"Add"} for path in ("blocks.0", "blocks.1") if any(t.startswith(path) for t in tensors)}
    return classes_of({**added, **(operators or {})}, tensors, grammar_of(ROWS))


def test_a_whole_model() -> None:
    found = told(network(), {"blocks.0.act1": {"Relu"}, "blocks.1.act1": {"Relu"}})
    assert found[""] == "timm.Net"
    assert found["blocks"] == "torch.nn.modules.container.Sequential"
    assert found["blocks.0"] == found["blocks.1"] == "timm.Block"
    assert found["blocks.0.act1"] == RELU
    assert found["blocks.0.conv1"] == CONV


def test_optional_parts() -> None:
    tensors = network(**{"blocks.1.down.0.weight": 4, "head.weight": 2, "head.bias": 1})
    found = told(tensors)
    assert found["blocks.1"] == "timm.Block"
    assert found["blocks.1.down.0"] == CONV


def test_a_part_that_no_class_has() -> None:
    found = told(network(**{"blocks.1.extra.weight": 4}))
    assert "" not in found
    assert "blocks.1" not in found


def test_a_missing_part() -> None:
    tensors = {name: rank for name, rank in network().items() if not name.startswith("blocks.0.conv2")}
    found = told(tensors)
    assert "blocks.0" not in found
    assert "" not in found


def test_folded_norms() -> None:
    tensors = {name: rank for name, rank in network().items() if ".bn" not in name}
    tensors = {**tensors, "blocks.0.conv1.bias": 1}
    assert told(tensors)["blocks.0"] == "timm.Block"


def test_ranks_of_tensors() -> None:
    tensors = {**network(), "stem.weight": 2}
    assert "" not in told(tensors)


def test_names_that_an_exporter_made() -> None:
    """`onnx::Conv_12` stands for a weight: then a tensor may be missing, but not the module."""
    tensors = {name: rank for name, rank in network().items() if name != "blocks.0.conv1.weight"}
    seen = {"blocks.0.conv1": {"Conv"}}
    assert "" not in told(tensors, seen)
    assert told({**tensors, "onnx::Conv_12": 4}, seen)[""] == "timm.Net"


def test_blocks_with_the_same_parts() -> None:
    """Two classes are possible, but for the calls that one makes."""
    both = [row[:3] if row[0] == "timm.Twin" else row for row in ROWS]
    seen = {"blocks.0": {"Add"}, "blocks.1": {"Add"}}
    assert classes_of(seen, network(), grammar_of(both))["blocks.0"] == "timm.Block or timm.Twin"
    assert told(network(), seen)["blocks.0"] == "timm.Block"
    assert told(network(), {**seen, "blocks.1": {"Add", "Sigmoid"}})["blocks.1"] == "timm.Twin"


def test_a_wrapped_model() -> None:
    tensors = {f"backbone.{name}": rank for name, rank in network().items()}
    found = told({**tensors, "mine.weight": 2})
    assert "" not in found
    assert found["backbone"] == "timm.Net"
    assert found["backbone.blocks.1.conv2"] == CONV


def test_a_block_in_somebodys_model() -> None:
    """The names of a block are anybody's."""
    tensors = {f"mine.{name}": rank for name, rank in network().items() if name.startswith("blocks.0")}
    assert told(tensors) == {}


def test_few_names_tell_nothing() -> None:
    tensors = {"fc.weight": 2, "fc.bias": 1, "conv1.weight": 4}
    rows = [*ROWS, ["timm.Small!", {"fc": [7], "conv1": [0]}, {}]]
    assert classes_of({}, tensors, grammar_of(rows)) == {}


def test_nodes_have_to_be_explained() -> None:
    assert fits({"Conv", "Reshape"}, {"convolution"}, {"convolution"})
    assert not fits({"Relu"}, {"convolution"}, ())
    assert not fits({"Reshape"}, {"convolution"}, {"convolution"})
    assert fits({"Erf", "Mul"}, {"gelu"}, {"gelu"})
    assert fits(set(), {"add"}, {"add"}), "calls that leave no sure trace are not asked for"
    assert call_of("aten::relu_") == call_of("aten::relu.out") == "relu"
    assert call_of("aten::_scaled_dot_product_flash_attention") == "scaled_dot_product_attention"


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.from_regex(r"[a-c]{1,2}(\.([a-c]|\d)){0,9}", fullmatch=True), st.integers(-1, 5), max_size=30)
)
def test_any_names(tensors: dict[str, int]) -> None:
    """Whatever a file's names are: every answer is a path of the file, and of classes that the table has."""
    known = grammar_of(ROWS)
    for path, cls in classes_of({name: {"Conv"} for name in tensors}, tensors, known).items():
        assert all(one in known.classes for one in alternatives(cls))
        assert not path or any(name == path or name.startswith(f"{path}.") for name in tensors)


def test_deep_names() -> None:
    deep = ".".join("a" * 1 for _ in range(5000))
    assert classes_of({deep: {"Conv"}}, {}, grammar_of(ROWS)) == {}


def test_too_many_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_parts, "MOST_PATHS", 3)
    assert told(network()) == {}


def test_names_of_classes() -> None:
    both = any_of(["timm.a.Block", "timm.b.Unit"])
    assert alternatives(both) == ("timm.a.Block", "timm.b.Unit")
    assert short(both) == "Block or Unit"
    assert short(any_of(["timm.a.Block", "timm.b.Block"])) == "Block"
    assert short("timm.a.Block") == "Block"
    assert short("") == ""


# -- the table of the package -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> Grammar:
    return grammar()


def test_the_table_is_sound() -> None:
    file = Path(module_parts.__file__).with_name("module_parts.json")
    rows = json.loads(file.read_text(encoding="utf-8"))["classes"]
    names = [row[0] for row in rows]
    assert len(names) == len(set(names)) > 1000
    for name, parts, tensors, *calls in rows:
        assert all(0 <= number < len(rows) for of in parts.values() for number in of), name
        assert all(rank >= 0 for ranks in tensors.values() for rank in ranks), name
        assert len(calls) <= 1, name


def test_resnet_of_torchvision(table: Grammar) -> None:
    """The names that torchvision's ResNet-18 gives its parameters and modules."""
    bn = ("weight", "bias", "running_mean", "running_var")
    tensors = {"conv1.weight": 4, **{f"bn1.{k}": 1 for k in bn}, "fc.weight": 2, "fc.bias": 1}
    operators = {"relu": {"Relu"}, "maxpool": {"MaxPool"}, "avgpool": {"GlobalAveragePool"}, "": {"Flatten"}}
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            path = f"layer{layer}.{block}"
            operators[f"{path}.relu"] = {"Relu"}
            operators[path] = {"Add"}
            for n in (1, 2):
                tensors[f"{path}.conv{n}.weight"] = 4
                tensors.update({f"{path}.bn{n}.{k}": 1 for k in bn})
        if layer > 1:
            tensors[f"layer{layer}.0.downsample.0.weight"] = 4
            tensors.update({f"layer{layer}.0.downsample.1.{k}": 1 for k in bn})
    found = classes_of(operators, tensors, table)
    assert found[""] == "torchvision.models.resnet.ResNet"
    assert found["layer3.1"] == "torchvision.models.resnet.BasicBlock"
    assert found["layer2.0.relu"] == "torch.nn.modules.activation.ReLU"
    assert found["layer2.0.downsample.1"] == "torch.nn.modules.batchnorm.BatchNorm2d"
