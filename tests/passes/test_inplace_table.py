"""What published classes run in place: the table from torch.export archives, and the guess where it is silent."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from prepared import in_place
from small_graphs import Builder, targets

from staticmem.ir.graph import Graph, Ref
from staticmem.passes import inplace
from staticmem.passes.inplace import CANDIDATES, known_places, owner_and_place

CONV = "torch.nn.modules.conv.Conv2d"
LEAKY = "torch.nn.modules.activation.LeakyReLU"


def activation(cls: str, child: str, leaf: str = LEAKY) -> Graph:
    """Two convolutions and a LeakyReLU, in a class, as an ONNX export has them."""
    b = Builder(x=(2, 3, 8, 8))
    weight = b.parameter("w", 3, 3, 1, 1)
    y = Ref("x")
    for name in ("conv1", "conv2"):
        y = b.within(f"b:{cls}", f"b.{name}:{CONV}").call("conv2d", y, weight)
    y = b.within(f"b:{cls}", f"b.{child}:{leaf}").call("leaky_relu", y, 0.01)
    return replace(b.graph(b.within().call("neg", y)), inplace_known=False)


@pytest.mark.parametrize(("cls", "child", "ran"), [
    ("timm.models.cspnet.BottleneckBlock", "act3", "leaky_relu"),  # made without inplace=True
    ("timm.models.cspnet.BottleneckBlock", "other", "leaky_relu_"),  # not in the table: timm's habit
])  # fmt: skip
def test_a_place_in_the_table_decides(cls: str, child: str, ran: str) -> None:
    assert targets(in_place(activation(cls, child)))[2].rstrip(".") == ran


@pytest.mark.parametrize(("policy", "ran"), [("none", "leaky_relu"), ("all", "leaky_relu_")])
def test_the_user_overrides_the_table(policy: str, ran: str) -> None:
    graph = in_place(activation("timm.models.cspnet.BottleneckBlock", "act3"), policy)
    assert targets(graph)[2].rstrip(".") == ran


def test_what_autograd_forbids_does_not_run_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that is in place in the table, where another op reads what would be overwritten."""
    monkeypatch.setattr(inplace, "known_places", lambda: {"lib.Block": {"act:aten::leaky_relu": True}})
    monkeypatch.setattr(inplace, "_LIBRARIES", ("lib.",))
    graph = activation("lib.Block", "act")
    assert targets(in_place(graph))[2].rstrip(".") == "leaky_relu_"
    second = replace(graph.ops[-1], name="second", args=(Ref(graph.ops[1].outputs[0]),), outputs=("second",))
    assert targets(in_place(replace(graph, ops=(*graph.ops, second))))[2].rstrip(".") == "leaky_relu"


def test_a_class_that_does_both_is_told_apart_by_the_classes_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"lib.Block>lib.Act": {":aten::leaky_relu": False}, "lib.Other>lib.Act": {":aten::leaky_relu": True}}
    monkeypatch.setattr(inplace, "known_places", lambda: table)
    monkeypatch.setattr(inplace, "_LIBRARIES", ("lib.",))
    assert targets(in_place(activation("lib.Block", "act", "lib.Act")))[2].rstrip(".") == "leaky_relu"
    assert targets(in_place(activation("lib.Other", "act", "lib.Act")))[2].rstrip(".") == "leaky_relu_"


def test_the_script_writes_classes_around_only_where_they_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    script = importlib.import_module("class_in_place")
    monkeypatch.setattr(inplace, "_LIBRARIES", ("lib.",))
    seen: dict[str, dict[str, set[bool]]] = {}
    for block, target in (("lib.A", "relu_"), ("lib.B", "relu")):
        for inner in ("lib.Act", "lib.Same"):
            b = Builder(x=(4,))
            b.within(f"a:{block}", f"a.act:{inner}").call(target if inner == "lib.Act" else "relu_", Ref("x"))
            script.collect(b.graph(Ref(b.ops[-1].outputs[0])), seen)
    place = ":aten::relu"
    assert script.table(seen) == {
        "lib.A>lib.Act": {place: True},
        "lib.B>lib.Act": {place: False},
        "lib.Same": {place: True},
    }


def test_the_owner_is_the_innermost_published_class() -> None:
    b = Builder(x=(4,))
    b.within("a:timm.models.vgg.ConvMlp", "a.layers:Sequential", "a.layers.3:Act").call("relu_", Ref("x"))
    assert owner_and_place(b.ops[0]) == ("timm.models.vgg.ConvMlp", "layers.*:aten::relu")
    b.within("a:mine.Block", "a.act:Act").call("relu", Ref("x"))
    assert owner_and_place(b.ops[1]) is None


def test_the_table_is_well_formed() -> None:
    table = known_places()
    assert len(table) > 200
    for key, places in table.items():
        assert all(cls.startswith(("torchvision.", "timm.", "transformers.")) for cls in key.split(">"))
        assert {p.rpartition(":aten::")[2] for p in places} <= {c.removeprefix("aten::") for c in CANDIDATES}
        assert all(isinstance(ran, bool) for ran in places.values())
