"""Tags of ops, against an installed PyTorch's; and that what differs from a tag is a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loading import load_module

from staticmem.ops import tags

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.torch
def test_tags_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    script = load_module(ROOT / "scripts" / "releases" / "op_tags.py")
    ours = json.loads((ROOT / "staticmem" / "ops" / "tags.json").read_text(encoding="utf-8"))
    if not torch.__version__.startswith(ours["torch"] + "."):
        pytest.skip(f"the tags are those of PyTorch {ours['torch']}")
    assert script.collect_tags() == ours


def test_a_tag_has_targets_without_overload() -> None:
    assert "aten::mul" in tags.tagged("pointwise")
    assert "aten::mul_" in tags.tagged("pointwise")
    assert "aten::mm" not in tags.tagged("pointwise")
    assert {"aten::permute", "aten::split"} <= tags.tagged("view")
    assert "aten::_unsafe_view" not in tags.tagged("view")


def test_views_of_compiled_graphs_are_views() -> None:
    assert tags.LOWERED_VIEWS - tags.tagged("view") == {"aten::_unsafe_view"}
    assert tags.PARTITIONER_VIEWS - tags.tagged("view") == {"prims::broadcast_in_dim"}
    assert tags.PARTITIONER_ALIASES - tags.PARTITIONER_VIEWS - tags.tagged("view") == {
        "aten::_unsafe_view",
        "aten::copy_",
    }


def test_sizes_in_the_data_are_tagged() -> None:
    assert tags.tagged("dynamic_output_shape") >= tags.DATA_SIZED
    assert {"aten::item", "aten::nonzero", "torchvision::nms"} <= tags.graph_breaks()
    assert "aten::index" not in tags.graph_breaks()


def test_differences_from_a_tag_are_differences() -> None:
    """A name that PyTorch tags, or no longer tags, has no place in the list of exceptions."""
    tagged = tags.tagged("pointwise")
    assert tags._NOT_ELEMENTWISE.issubset(tagged)
    assert tags._ALSO_ELEMENTWISE.isdisjoint(tagged)
