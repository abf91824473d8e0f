"""What published classes give names to: the replay of the table, hand-made, and made from exports with stack traces."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")  # its exports are among the cases

from local_models import MODELS  # noqa: E402
from small_graphs import Builder  # noqa: E402
from test_source_lines import exported  # noqa: E402

from staticmem.ir.graph import Graph, Ref  # noqa: E402
from staticmem.passes.frames.policy import Held, held_by_policy  # noqa: E402
from staticmem.passes.frames.published_names import (  # noqa: E402
    Names,
    Table,
    decided_by_names,
    place,
    published,
    results,
    signature,
    with_published_names,
)
from staticmem.passes.frames.releases import held_values  # noqa: E402
from staticmem.passes.frames.source_lines import held_by_lines  # noqa: E402

SCRIPTS = Path(__file__).parents[3] / "scripts" / "classes"
X = Ref("x")
BLOCK = "a:lib.Block"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """scripts/classes/class_names.py and scripts/classes/class_watch.py, for classes of these tests."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    made = importlib.import_module("class_names")
    monkeypatch.setattr(made, "LIBRARIES", ("local_models.", "torch.nn.", "test_published_names."))
    return made, importlib.import_module("class_watch")


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


def with_table(graph: Graph, held: Held, table: Table, training: bool = False) -> Held:
    return with_published_names(graph, held, decided_by_names(graph, table, training))


def until(graph: Graph, names: Names | Table, held: Held | None = None) -> dict[str, int]:
    table = names if isinstance(names, Table) else Table(names)
    return dict(with_table(graph, held or Held(), table).until)


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
    assert with_table(block(extra=True), policy, Table(names)) == policy
    assert with_table(block(), policy, Table(names)).frames == {}


def test_results_that_differed_leave_the_call_to_the_policy() -> None:
    names: Names = {"lib.Block": {"conv": "y", "norm": ["y", None], "aten::neg": [None]}}
    assert until(block(), names) == {}


def test_producers_are_children_numbers_or_ops() -> None:
    b = Builder(x=(4, 4))
    y = b.within("layers.0:Layer").call("relu_", X)
    y = b.within("seq:Seq", "seq.3:Layer").call("exp", y)
    graph = b.graph(b.within().call("neg_", y))
    found = [(r.cls, r.producer, r.nth) for r in results(graph)]
    assert {("Net", "layers", 0), ("Seq", "*", 0), ("Net", "aten::neg", 0)} <= set(found)


def test_a_name_may_let_go_without_another_value() -> None:
    """`del y`, or a function that `forward` called and that has returned."""
    names: Names = {"lib.Block": {"conv": "y", "norm": "y'", "aten::neg": ["z -y'"], "aten::sin": ["w -y"]}}
    assert until(block(), names) == {"conv": 3, "norm": 2, "neg": 4, "sin": 4}


def test_a_list_may_let_go_as_a_whole() -> None:
    names: Names = {"lib.Block": {"conv": "ys[]", "norm": "ys[]", "aten::neg": ["z -ys[]"], "aten::sin": [""]}}
    assert until(block(), names) == {"conv": 2, "norm": 2, "neg": 4}


def test_a_result_of_a_child_is_received_when_the_child_returns() -> None:
    """The second of two results is made later: the name of the first takes it then, too."""
    b = Builder(x=(4, 4))
    pairs = []
    for number in range(2):
        child = b.within(BLOCK, f"a.pair.{number}:Pair")
        pairs.append((child.call("relu", X, name=f"p{number}"), child.call("exp", X, name=f"q{number}")))
    b.within(BLOCK)
    total = b.call("add.Tensor", *pairs[0], name="s")
    total = b.call("add.Tensor", total, pairs[1][0], name="t")
    graph = b.graph(b.call("add.Tensor", total, pairs[1][1], name="u"))
    names: Names = {"lib.Block": {"pair": [[], ["p", "q"], []], "aten::add": ""}}
    assert until(graph, names) == {"p0": 3, "q0": 3, "p1": 6, "q1": 6}


def test_names_of_the_first_the_repeated_and_the_last_results() -> None:
    def names(count: int) -> str:
        return "".join("Fabcz"[place(nth, count, 1, 3, 1)] for nth in range(count))

    assert [names(n) for n in (5, 6, 9)] == ["Fabcz", "Fabcaz", "Fabcabcaz"]


def test_calls_of_a_class_that_differ_are_told_apart_by_their_children() -> None:
    calls = {"lib.Block": {key(block(extra)): {"norm": name} for extra, name in ((False, ""), (True, "y"))}}
    names: Names = {"lib.Block": {"conv": "y", "norm": None, "se": "", "aten::neg": [""], "aten::sin": [""]}}
    assert until(block(), Table(names, calls)) == {"conv": 4}
    assert until(block(extra=True), Table(names, calls)) == {"conv": 1, "norm": 5}
    assert until(block(extra=True), Table(names, {"lib.Block": {"00000000": {"norm": "y"}}})) == {}


def key(graph: Graph) -> str:
    return signature(result for result in results(graph) if result.cls == "lib.Block")


def test_what_evaluation_mode_keeps_is_no_matter_of_training() -> None:
    names: Names = {"lib.Block": {"conv": "", "norm": "", "aten::neg": [""], "aten::sin": [""]}}
    table = Table(names, {}, {"lib.Block": {"conv": ["self.cache[]"]}})
    b = Builder(x=(4, 4))
    b.ops = list(block().ops)
    graph = b.graph(b.within().call("cos", b.call("neg", Ref("sum"))))
    assert with_table(graph, Held(), table).until == {"conv": len(graph.ops) - 1}
    assert with_table(graph, Held(), table, training=True).until == {}


def test_slices_that_take_all_do_not_count() -> None:
    """Eager leaves them out where it can; exporters write them down."""
    b = Builder(x=(4, 4))
    b.within(BLOCK)
    y = b.call("slice.Tensor", X, 0, 0, 2**63 - 1, name="all")
    y = b.call("slice.Tensor", y, 1, 0, 2, name="some")
    graph = b.graph(b.within().call("neg", y, name="out"))
    assert [(r.producer, r.nth) for r in results(graph, {"lib.Block": {}})] == [("aten::slice", 0)]


def test_the_table_is_well_formed() -> None:
    name = re.compile(r"(\^\[\]|(self\.)?[A-Za-z_][\w.]*'*~*(\.\d+)?(\[\])?)?( -[A-Za-z_][\w.]*'*~*(\.\d+)?(\[\])?)*")
    table = published()
    assert len(table.classes) > 500
    assert {*table.calls, *table.evaluation} <= set(table.classes)

    def check(entry: Any) -> None:
        if isinstance(entry, list):
            for each in entry:
                check(each)
        elif isinstance(entry, dict):
            assert all(number == str(len(each)) for number, each in entry.items())
            check(list(entry.values()))
        else:
            assert entry is None or name.fullmatch(entry), entry

    for cls, entries in [*table.classes.items(), *table.evaluation.items()]:
        assert cls.startswith(("torchvision.", "timm.", "transformers."))
        for entry in entries.values():
            check(entry)
    for each in table.calls.values():
        assert all(re.fullmatch("[0-9a-f]{8}", signature) for signature in each)
        for entry in (e for entries in each.values() for e in entries.values()):
            assert entry is not None
            check(entry)


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
    assert held_by_policy(graph).frames["y0"] == 2
    found = held_values(graph)
    assert found.until["y0"] == 4
    assert "y0" not in found.frames


def replayed(made: dict[str, Any]) -> Table:
    parts = ("names", "calls", "evaluation")
    return Table(*({cls: entry[part] for cls, entry in made.items() if part in entry} for part in parts))


def test_single_classes_are_found_without_reading_all() -> None:
    every = published()
    wanted = ["timm.models.vovnet.OsaBlock", "timm.models.levit.Attention", "timm.models.levit.Attention2", "a\n.b"]
    some = published(frozenset(wanted))
    assert set(some.classes) == set(wanted[:2])
    assert all(some.classes[cls] == every.classes[cls] for cls in wanted[:2])
    assert some.evaluation["timm.models.levit.Attention"] == {"aten::index": ["self.attention_bias_cache[]"]}


@pytest.mark.torch
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_what_the_script_sees_is_what_stack_traces_say(
    model: Any, tmp_path: Path, scripts: tuple[ModuleType, ModuleType]
) -> None:
    """A table made by watching, replayed on an export without traces, holds what the traces of that export tell."""
    names, watch = scripts
    graph = exported(model(), torch.ones(6, 6), tmp_path / "m.pt2")
    seen: dict[str, Any] = {}
    names.collect(watch.observed(model().train(), (torch.ones(6, 6),)), seen)
    bare = replace(graph, ops=tuple(replace(op, stack=()) for op in graph.ops))
    last = {name: index for index, op in enumerate(graph.ops) for name in (*op.outputs, *op.refs())}
    theirs = {n: i for n, i in held_by_lines(graph).items() if i > last[n]}
    mine = {n: i for n, i in until(bare, replayed(names.table(seen))).items() if i > last[n]}
    assert mine == theirs


class Hidden(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Names in a function that `forward` calls, one that is deleted, and a cache that training does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.ReLU(), torch.nn.ReLU()
        self.cache: dict[str, Any] = {}

    def inner(self, x: Any) -> Any:
        kept = self.a(x)
        y = kept.exp()
        y = y.neg()
        return self.b(y) + 1

    def table(self, x: Any) -> Any:
        if self.training:
            return x.cos()
        if "t" not in self.cache:
            self.cache["t"] = x.cos()
        return self.cache["t"]

    def forward(self, x: Any) -> Any:
        first = self.inner(x).sin()
        second = first.tan()
        del first
        return (second + self.table(x)).abs().sqrt()


@pytest.mark.torch
def test_functions_that_forward_calls_are_seen(scripts: tuple[ModuleType, ModuleType]) -> None:
    names, watch = scripts
    model = Hidden()
    seen: dict[str, Any] = {}
    watched = watch.observed(model.train(), (torch.ones(6, 6),))
    names.collect(watched, seen)
    names.collect_caches(watch.observed(model.eval(), (torch.ones(6, 6),)), seen)
    table = replayed(names.table(seen))
    ops = [op.base.removeprefix("aten::") for op in watched.graph.ops]
    assert ops == ["relu", "exp", "neg", "relu", "add", "sin", "tan", "cos", "add", "abs", "sqrt"]
    made = {op.outputs[0]: name for op, name in zip(watched.graph.ops, ops, strict=True)}
    held = {made[v]: ops[i] for v, i in with_table(watched.graph, Held(), table, training=True).until.items()}
    # `kept` until `inner` returns, `y` until it is assigned again and then until `inner` returns; `first` until `del`
    assert held == {"relu": "add", "exp": "neg", "neg": "add", "sin": "tan", "tan": "sqrt"}
    held = {made[v]: ops[i] for v, i in with_table(watched.graph, Held(), table).until.items()}
    assert held["cos"] == "sqrt"


class Shifted(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Calls that run the same children, but not the same ops: `kept` is held until the end."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.a, self.shift = torch.nn.ReLU(), shift

    def forward(self, x: Any) -> Any:
        if self.shift:
            kept = self.a(x.roll(1, 0))
            y = kept.exp()
        else:
            y = self.a(x)
            y = y.exp()
        return y.sin().neg()


@pytest.mark.torch
def test_calls_with_the_same_children_are_told_apart_by_their_ops(scripts: tuple[ModuleType, ModuleType]) -> None:
    names, watch = scripts
    seen: dict[str, Any] = {}
    watched = watch.observed(torch.nn.Sequential(Shifted(True), Shifted(False)), (torch.ones(6, 6),))
    names.collect(watched, seen)
    made = names.table(seen)
    assert made["test_published_names.Shifted"]["names"]["a"] is None
    until = with_table(watched.graph, Held(), replayed(made), training=True).until
    ops = {op.outputs[0]: op.base.removeprefix("aten::") for op in watched.graph.ops}
    last = [(ops[value], watched.graph.ops[until[value]].base) for value in ops if ops[value] == "relu"]
    assert last == [("relu", "aten::neg"), ("relu", "aten::exp")]


@pytest.mark.torch
def test_repeated_layers_and_lists_have_entries_for_any_number(scripts: tuple[ModuleType, ModuleType]) -> None:
    names, _ = scripts
    assert names.entry("layers", {3: ["x"] * 3, 5: ["x"] * 5}) == "x"
    assert names.entry("layers", {5: ["x"] * 4 + [""], 7: ["x"] * 6 + [""]}) == [[], ["x"], [""]]
    assert names.entry("layers", {4: ["p", "q"] * 2, 6: ["p", "q"] * 3}) == [[], ["p", "q"], []]
    by_count = names.entry("aten::view", {2: ["a", "b"], 3: ["a", "c", "d"]})
    assert by_count == {"2": ["a", "b"], "3": ["a", "c", "d"]}
    table = Table({"lib.Block": {"conv": {"1": ["y"], "2": ["z", "z"]}, "norm": "", "aten::neg": "", "aten::sin": ""}})
    assert with_table(block(), Held(), table).until == {"conv": 4}
    assert names.entry("layers", {2: ["a", None], 3: ["a", "c", "d"]}) == ["a", None, "d"]


@pytest.mark.torch
def test_what_takes_the_last_result_of_a_call_does_not_matter(scripts: tuple[ModuleType, ModuleType]) -> None:
    """`x = self.bn(x)` is the end of some calls; in others an addition follows."""
    names, _ = scripts
    seen: dict[str, Any] = {}
    for own in (["x", names.LAST], ["x", "y"], ["x", names.LAST]):
        names._merge(seen, {"bn": own})
    assert names.entry("bn", seen["bn"]) == ["x", "y"]
    assert names.entry("bn", {1: [names.LAST]}) == ""
    assert names.entry("layers", {2: [None, None]}) is None
