"""What published classes give names to: the replay of the table, hand-made, and made from exports with stack traces."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")  # its exports are among the cases

from local_models import MODELS  # noqa: E402
from small_graphs import Builder  # noqa: E402
from test_source_locals import exported  # noqa: E402

from staticmem.graph.ir import Graph, Ref  # noqa: E402
from staticmem.training.hidden_frames import held_values  # noqa: E402
from staticmem.training.locals import Held, held_locals  # noqa: E402
from staticmem.training.module_names import Names, known_names, results, with_known_names  # noqa: E402
from staticmem.training.source_locals import held_until  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "scripts" / "module_names.py"
X = Ref("x")
BLOCK = "a:lib.Block"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("module_names_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def block(extra: bool = False) -> Graph:
    """`y = conv(x); y = norm(y)`, perhaps `y = se(y)`; `y + x` at the end."""
    b = Builder(x=(4, 4))
    y = b.within(BLOCK, "a.conv:Conv").call("relu", X, name="conv")
    y = b.within(BLOCK, "a.norm:Norm").call("exp", y, name="norm")
    if extra:
        y = b.within(BLOCK, "a.se:Se").call("tanh", y, name="se")
    z = b.within(BLOCK).call("neg", y, name="neg")
    z = b.call("sin", z, name="sin")
    graph: Graph = b.graph(b.call("add.Tensor", z, X, name="sum"))
    return graph


def until(graph: Graph, names: Names, held: Held | None = None) -> dict[str, int]:
    return dict(with_known_names(graph, held or Held(), names).until)


def test_a_name_holds_until_it_is_assigned_again_or_forward_returns() -> None:
    names: Names = {"lib.Block": {"conv": "y", "norm": "y", "aten::neg": [""], "aten::sin": ["z"], "aten::add": [""]}}
    assert until(block(), names) == {"conv": 1, "norm": 4, "sin": 4}


def test_lists_live_until_forward_or_the_caller_returns() -> None:
    names: Names = {"lib.Block": {"conv": "ys[]", "norm": "^[]", "aten::neg": [""], "aten::sin": [""]}}
    graph = block()
    b = Builder(x=(4, 4))
    b.ops = list(graph.ops)
    graph = b.graph(b.within("b:Other").call("cos", Ref("sum"), name="after"))
    assert until(graph, names) == {"conv": 4, "norm": 5}


def test_attributes_live_on() -> None:
    names: Names = {"lib.Block": {"conv": "self.kept", "norm": "", "aten::neg": [""], "aten::sin": [""]}}
    b = Builder(x=(4, 4))
    b.ops = list(block().ops)
    graph = b.graph(b.within().call("cos", b.call("neg", Ref("sum"))))
    assert until(graph, names)["conv"] == len(graph.ops) - 1


def test_a_child_that_the_table_lacks_leaves_the_call_to_the_policy() -> None:
    names: Names = {"lib.Block": {"conv": "y", "norm": "y", "aten::neg": [""], "aten::sin": ["z"], "aten::add": [""]}}
    policy = Held({"norm": 1})
    assert with_known_names(block(extra=True), policy, names) == policy
    assert with_known_names(block(), policy, names).frames == {}


def test_results_that_differed_leave_the_call_to_the_policy() -> None:
    names: Names = {"lib.Block": {"conv": "y", "norm": ["y", None], "aten::neg": [None]}}
    assert until(block(), names) == {}


def test_the_upper_bound_lets_go_of_nothing() -> None:
    names: Names = {"lib.Block": {"conv": "y", "norm": "", "aten::neg": [""], "aten::sin": [""], "aten::add": [""]}}
    found = with_known_names(block(), Held({"norm": 1}), names, only_add=True)
    assert found.frames == {"norm": 1}
    assert found.until == {"conv": 4}


def test_the_upper_bound_has_the_known_names_of_calls_that_are_not_all_known() -> None:
    """DLA's tree: `bottom` is known, and a child that only some trees have is not; the policy alone let `bottom` go."""
    names: Names = {"lib.Block": {"conv": "bottom", "norm": "y", "aten::neg": [""], "aten::sin": [""]}}
    graph = block(extra=True)
    assert with_known_names(graph, Held(), names) == Held()
    assert with_known_names(graph, Held(), names, only_add=True).until == {"conv": 5, "norm": 5}


def test_producers_are_children_numbers_or_ops() -> None:
    b = Builder(x=(4, 4))
    y = b.within("layers.0:Layer").call("relu_", X)
    y = b.within("seq:Seq", "seq.3:Layer").call("exp", y)
    graph = b.graph(b.within().call("neg_", y))
    found = [(r.cls, r.producer, r.nth) for r in results(graph)]
    assert {("Net", "layers", 0), ("Seq", "*", 0), ("Net", "aten::neg", 0)} <= set(found)


def test_the_table_is_well_formed() -> None:
    name = re.compile(r"^$|^\^\[\]$|^(self\.)?[A-Za-z_]\w*(\[\])?$")
    table = known_names()
    assert len(table) > 500
    for cls, entries in table.items():
        assert cls.startswith(("torchvision.", "timm.", "transformers."))
        for entry in entries.values():
            for each in entry if isinstance(entry, list) else [entry]:
                assert each is None or name.match(each), (cls, each)


def test_a_published_block_without_traces_is_not_left_to_the_policy() -> None:
    """OSA blocks of VoVNet keep a list in the caller of the module that fills it."""
    b = Builder(x=(4, 4))
    osa, mid = "b:timm.models.vovnet.OsaBlock", "b.conv_mid:timm.models.vovnet.SequentialAppendList"
    y, parts = X, [X]
    for number in range(3):
        y = b.within(osa, mid, f"b.conv_mid.{number}:ConvNormAct").call("relu", y, name=f"y{number}")
        parts.append(y)
    y = b.within(osa, mid).call("cat", tuple(parts), 1, name="joined")
    graph = b.graph(b.within(osa, "b.conv_concat:ConvNormAct").call("exp", y, name="out"))
    assert held_locals(graph).frames["y0"] == 2
    found = held_values(graph)
    assert found.until["y0"] == 4
    assert "y0" not in found.frames


@pytest.mark.torch
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_the_script_takes_from_traces_what_the_traces_say(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table made from an export with traces, replayed on the same export without them, holds the same values."""
    made = script()
    monkeypatch.setattr(made, "LIBRARIES", ("local_models.", "torch.nn."))
    graph = exported(model(), torch.ones(6, 6), tmp_path / "m.pt2")
    seen: dict[str, dict[str, list[str | None]]] = {}
    made.collect(graph, seen)
    bare = replace(graph, ops=tuple(replace(op, stack=()) for op in graph.ops))
    last = {name: index for index, op in enumerate(graph.ops) for name in (*op.outputs, *op.refs())}
    theirs = {n: i for n, i in held_until(graph).items() if i > last[n]}
    mine = {n: i for n, i in until(bare, made.table(seen)).items() if i > last[n]}
    assert mine == theirs
