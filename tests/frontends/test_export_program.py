"""Archives of torch.export: what the reader makes of them, and files that someone has damaged."""

from __future__ import annotations

import copy
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pt2_files as files
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pt2_files import argument, document, node, tensor

from staticmem import analyze
from staticmem.errors import DimensionError, ModelFileError, StaticmemError
from staticmem.frontends.export_program import read_archive
from staticmem.ir import dtypes
from staticmem.ir.graph import AutocastRegion, Graph, Ref
from staticmem.ir.model_file import resolve
from staticmem.passes.pipeline import bind
from staticmem.report.json import dumps

SEED = files.MODELS / "seed.pt2"
S0 = "Symbol('s0', positive=True, integer=True)"


def outcome(path: Path, **scenario: Any) -> str:
    """The code of the error that an analysis ends in, or "" for a report; another exception fails the test."""
    try:
        report = analyze(path, **scenario)
    except StaticmemError as error:
        return error.code
    assert report.peak.live_bytes >= 0
    json.loads(dumps(report))
    return ""


def graph_of(path: Path, **sizes: Any) -> Graph:
    model = read_archive(str(path))
    return bind(model, resolve(model, **sizes))


# -- what it reads -------------------------------------------------------------------------------------------------


def test_ops_have_the_signature_of_aten(tmp_path: Path) -> None:
    nodes = [
        node("linear.default", "x", "w", None, out="h"),
        node("sum.dim_IntList", "h", [1], True, dtype=argument({"as_scalar_type": 8}), out="y"),
    ]
    tensors = {"x": tensor(S0, 6), "w": tensor(4, 6), "h": tensor(S0, 4), "y": tensor(S0, 1, dtype=8)}
    path = files.write(tmp_path / "a.pt2", document(tensors, nodes, parameters=("w",), ranges={"s0": (0, None)}))
    graph = graph_of(path, batch=3)
    linear, total = graph.ops
    assert (linear.target, linear.args, linear.outputs) == ("aten::linear", (Ref("x"), Ref("w"), None), ("h",))
    assert (total.target, total.args) == ("aten::sum.dim_IntList", (Ref("h"), (1,), True))
    assert repr(total.kwargs["dtype"]) == "float64"
    assert [v.shape for v in graph.inputs] == [(3, 6)]
    assert [p.fqn for p in graph.parameters] == ["w"]
    assert graph.values["h"].shape == (3, 4)


def test_every_kind_of_argument(tmp_path: Path) -> None:
    given: list[tuple[dict[str, Any], Any]] = [
        ({"as_tensor": {"name": "x"}}, Ref("x")),
        ({"as_optional_tensor": {"as_tensor": {"name": "x"}}}, Ref("x")),
        ({"as_optional_tensor": {"as_none": True}}, None),
        ({"as_optional_tensors": [{"as_tensor": {"name": "x"}}, {"as_none": True}]}, (Ref("x"), None)),
        ({"as_float": "Infinity"}, float("inf")),
        ({"as_floats": [1.0, "-Infinity"]}, (1.0, float("-inf"))),
        ({"as_int_lists": [[1], [2, 3]]}, ((1,), (2, 3))),
        ({"as_sym_int": {"as_name": "n"}}, 5),
        ({"as_sym_ints": [{"as_int": 2}, {"as_name": "n"}, {"as_name": "u"}]}, (2, 5, Ref("u"))),
        ({"as_memory_format": 2}, "channels_last"),
        ({"as_device": {"type": "cuda", "index": None}}, None),
        ({"as_kind_of_the_future": 1}, None),
    ]
    doc = document({"x": tensor(2)}, [node("foo.default", *(a for a, _ in given), out="y")])
    doc["graph_module"]["graph"]["sym_int_values"] = {"n": {"as_expr": {"expr_str": "Add(Integer(2), Integer(3))"}}}
    (op,) = graph_of(files.write(tmp_path / "a.pt2", doc)).ops
    assert op.args == tuple(expected for _, expected in given)


def test_frames_of_modules_and_calls(tmp_path: Path) -> None:
    doc = document({"x": tensor(2), "y": tensor(2)}, [node("relu.default", "x", out="y")])
    stack = "L['self'],,m.Net;L['self'].a@2,a,m.Act;_empty_nn_module_stack_from_metadata_hook,_empty_nn_module_stack,"
    doc["graph_module"]["graph"]["nodes"][0]["metadata"]["nn_module_stack"] = stack
    (op,) = graph_of(files.write(tmp_path / "a.pt2", doc)).ops
    assert [(f.path, f.cls, f.call) for f in op.modules] == [("", "m.Net", 0), ("a", "m.Act", 2)]


def test_a_body_without_grad_is_run_in_place(tmp_path: Path) -> None:
    body = {
        "inputs": [argument("inner")], "outputs": [argument("r")], "nodes": [node("relu.default", "inner", out="r")],
        "tensor_values": {"inner": tensor(2), "r": tensor(2)},
    }  # fmt: skip
    graph = {"as_graph": {"name": "g", "graph": body}}
    wrapped = node("torch.ops.higher_order.wrap_with_set_grad_enabled", False, graph, "x", out="z")
    doc = document({"x": tensor(2), "z": tensor(2), "y": tensor(2)}, [wrapped, node("neg.default", "z", out="y")])
    inner, outer = graph_of(files.write(tmp_path / "a.pt2", doc)).ops
    assert (inner.args, inner.grad) == ((Ref("x"),), False)
    assert (outer.args, outer.grad) == ((Ref("r"),), True)


@pytest.mark.parametrize(("device", "dtype", "enabled", "amp"), [
    ("cuda", 6, False, False),  # float16 is what CUDA has where the code gives no dtype
    ("cpu", 13, False, False),
    ("cuda", 13, True, dtypes.bfloat16),
    ("cuda", 13, False, dtypes.bfloat16),  # of a machine without CUDA
])  # fmt: skip
def test_a_body_has_its_own_autocast(tmp_path: Path, device: str, dtype: int, enabled: bool, amp: Any) -> None:
    body = {
        "inputs": [argument("inner")], "outputs": [argument("r")], "nodes": [node("relu.default", "inner", out="r")],
        "tensor_values": {"inner": tensor(2), "r": tensor(2)},
    }  # fmt: skip
    given = [argument({"as_string": device}), argument({"as_scalar_type": dtype}), enabled, None]
    graph = {"as_graph": {"name": "g", "graph": body}}
    wrapped = node("torch.ops.higher_order.wrap_with_autocast", *given, graph, "x", out="z")
    doc = document({"x": tensor(2), "z": tensor(2), "y": tensor(2)}, [wrapped, node("neg.default", "z", out="y")])
    found = graph_of(files.write(tmp_path / "a.pt2", doc))
    inner, outer = found.ops
    assert (inner.amp, inner.grad, outer.amp) == (amp, True, True)
    assert found.autocast_regions == (AutocastRegion(0, 1, amp, clears=True),)


def test_the_outermost_region_of_autocast_ends_once(tmp_path: Path) -> None:
    """Copies of weights are dropped behind each such region, and not behind one within it."""

    def region(inner: str, out: str, *nodes: Any) -> Any:
        body = {
            "inputs": [argument(inner)], "outputs": [argument(out)], "nodes": list(nodes),
            "tensor_values": {inner: tensor(2), out: tensor(2)},
        }  # fmt: skip
        given = [argument({"as_string": "cuda"}), argument({"as_scalar_type": 13}), True, None]
        return [*given, {"as_graph": {"name": "g", "graph": body}}]

    wrap = "torch.ops.higher_order.wrap_with_autocast"
    within = node(wrap, *region("i", "r", node("relu.default", "i", out="r")), "j", out="k")
    first = node(wrap, *region("j", "l", within, node("neg.default", "k", out="l")), "x", out="z")
    second = node(wrap, *region("m", "n", node("relu.default", "m", out="n")), "z", out="y")
    doc = document({"x": tensor(2), "z": tensor(2), "y": tensor(2)}, [first, second])
    found = graph_of(files.write(tmp_path / "a.pt2", doc))
    assert [op.clears for op in found.ops] == [False, True, True]


def test_names_of_a_body_are_its_own(tmp_path: Path) -> None:
    """Exporters give the names of the graph around a body again: here of a value that is read after it (`h`), of its
    input, and of another body."""

    def wrapped(out: str) -> Any:
        body = {
            "inputs": [argument("k")], "outputs": [argument("h")],
            "nodes": [node("exp.default", "k", out="h")], "tensor_values": {"k": tensor(2), "h": tensor(2)},
        }  # fmt: skip
        graph = {"as_graph": {"name": "g", "graph": body}}
        return node("torch.ops.higher_order.wrap_with_set_grad_enabled", False, graph, "x", out=out)

    nodes = [
        node("relu.default", "x", out="h"), node("neg.default", "x", out="k"), wrapped("a"), wrapped("b"),
        node("stack.default", argument({"as_tensors": [{"name": n} for n in ("h", "k", "a", "b")]}), out="y"),
    ]  # fmt: skip
    tensors = {name: tensor(2) for name in "xhkab"} | {"y": tensor(4, 2)}
    graph = graph_of(files.write(tmp_path / "a.pt2", document(tensors, nodes)))
    relu, neg, *inner, stack = graph.ops
    assert [op.args for op in inner] == [(Ref("x"),), (Ref("x"),)]
    expected = (*relu.outputs, *neg.outputs, *inner[0].outputs, *inner[1].outputs)
    assert stack.args == (tuple(Ref(name) for name in expected),)
    assert len(set(expected)) == 4


def test_a_condition_stays_as_an_unknown_op(tmp_path: Path) -> None:
    graph = {"as_graph": {"name": "g", "graph": {}}}
    doc = document({"x": tensor(2), "y": tensor(2)}, [node("torch.ops.higher_order.cond", "x", graph, graph, out="y")])
    path = files.write(tmp_path / "a.pt2", doc)
    assert graph_of(path).ops[0].target == "higher_order::cond"
    report = analyze(path)
    assert any("higher_order::cond" in w.text for w in report.warnings)


def test_booleans_of_sizes_have_names(tmp_path: Path) -> None:
    """A dynamic export checks its sizes: `_operator.ge` answers with a SymBool."""
    nodes = [
        node("sym_size.int", "x", 0, out=[{"as_sym_int": {"as_name": "n"}}]),
        node("_operator.ge", {"as_sym_int": {"as_name": "n"}}, 2, out=[{"as_sym_bool": {"as_name": "ok"}}]),
        node("_assert_scalar.default", {"as_sym_bool": {"as_name": "ok"}}, {"as_string": "too small"}),
        node("relu.default", "x", out="y"),
    ]
    doc = document({"x": tensor(S0), "y": tensor(S0)}, nodes, ranges={"s0": (2, 9)})
    assert outcome(files.write(tmp_path / "a.pt2", doc), batch=3) == ""


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_a_derived_input_size_determines_its_symbol(tmp_path: Path) -> None:
    tensors = {"x": tensor(f"Mul(Integer(2), {S0})", 3), "y": tensor(S0, 6)}
    doc = document(tensors, [node("view.default", "x", {"as_sym_ints": [{"as_name": "n"}, {"as_int": 6}]}, out="y")])
    doc["graph_module"]["graph"]["sym_int_values"] = {"n": {"as_expr": {"expr_str": S0}}}
    path = files.write(tmp_path / "a.pt2", doc)
    assert graph_of(path, batch=8).ops[0].args[1] == (4, 6)
    with pytest.raises(DimensionError, match=r"'x\[0\]' cannot be 7"):
        graph_of(path, batch=7)


def test_a_size_that_becomes_negative_is_an_error(tmp_path: Path) -> None:
    doc = document({"x": tensor(S0), "w": tensor(f"Add({S0}, Integer(-5))"), "y": tensor(2)}, [], parameters=("w",))
    with pytest.raises(DimensionError, match="a size becomes -3"):
        graph_of(files.write(tmp_path / "a.pt2", doc), batch=2)


def test_a_parameter_whose_size_only_data_tells_is_an_error(tmp_path: Path) -> None:
    doc = document({"x": tensor(2), "w": tensor("Symbol('u0')"), "y": tensor(2)}, [], parameters=("w",))
    with pytest.raises(DimensionError, match="only the data tells"):
        graph_of(files.write(tmp_path / "a.pt2", doc))


STATIC: dict[str, tuple[list[dict[str, Any]], tuple[int, ...]]] = {
    "follows": ([node("view.default", "x", [2, 15], out="y")], (2, 15)),
    "follows with -1": ([node("reshape.default", "x", [2, -1], out="y")], (2, 15)),
    "expand": ([node("expand.default", "x", [2, 3, 5], out="y")], (2, 3, 5)),
    "open": ([node("reshape.default", "x", [-1, 15], out="y")], (2, 15)),
}


@pytest.mark.parametrize("case", STATIC)
def test_views_follow_a_batch_that_the_export_fixed(case: str, tmp_path: Path) -> None:
    nodes, shape = STATIC[case]
    path = files.write(tmp_path / "a.pt2", document({"x": tensor(2, 3, 5), "y": tensor(*shape)}, nodes))
    for batch in (2, 7):
        report = analyze(path, batch=batch, mode="train", loss="none")
        assert report.peak.live_bytes == analyze(path, batch=batch, mode="train", loss="none").peak.live_bytes
        assert report.model.outputs[0].shape == (batch, *shape[1:])


@pytest.mark.parametrize("size", [[30], [6, 5], [3, 2, 5], [-1, 2, 5], [-1, 2]])
def test_a_fixed_batch_elsewhere_names_the_node(size: list[int], tmp_path: Path) -> None:
    tensors = {"x": tensor(2, 3, 5), "y": tensor(30)}
    path = files.write(tmp_path / "a.pt2", document(tensors, [node("view.default", "x", size, out="y")]))
    assert outcome(path, batch=2) == ""
    with pytest.raises(DimensionError, match="node 'y'"):
        analyze(path, batch=4)


def test_batch_one_and_two_have_the_same_ops() -> None:
    one, two = (graph_of(files.MODELS / "resnet18.pt2", batch=n) for n in (1, 2))
    assert [(o.target, o.args, o.outputs) for o in one.ops] == [(o.target, o.args, o.outputs) for o in two.ops]


def test_batch_zero_is_no_size() -> None:
    assert outcome(SEED, batch=0) == "SM195"


# -- odd models ----------------------------------------------------------------------------------------------------

X, Y, W = tensor(4, 4), tensor(4, 4), tensor(4, 4)
ODD: dict[str, tuple[dict[str, Any], str, str]] = {  # a document; the code in inference; in training
    "output is the input": (document({"x": X}, [], outputs=("x",)), "", ""),
    "output is a parameter": (document({"x": X, "w": W}, [], parameters=("w",), outputs=("w",)), "", ""),
    "no ops and no outputs": (document({"x": X}, [], outputs=()), "", "SM131"),
    "nothing at all": (document({}, [], inputs=(), outputs=()), "", "SM131"),
    "no parameters": (document({"x": X, "y": Y}, [node("relu.default", "x", out="y")]), "", ""),
    "integers only": (
        document({"x": tensor(4, dtype=5), "y": tensor(4, dtype=5)}, [node("add.Tensor", "x", "x", out="y")]), "", ""
    ),
    "an output twice": (document({"x": X, "y": Y}, [node("relu.default", "x", out="y")], outputs=("y", "y")), "", ""),
    "in place on the input": (document({"x": X, "y": Y}, [node("relu_.default", "x", out="y")]), "", ""),
    "an output that nobody makes": (document({"x": X}, [], outputs=("nobody",)), "", "SM131"),
    "reads what comes later": (
        document({"x": X, "y": Y}, [node("relu.default", "z", out="y"), node("relu.default", "y", out="z")]),
        "SM119", "SM119",
    ),
    "one name for two results": (
        document({"x": X, "y": Y}, [node("relu.default", "x", out="y"), node("exp.default", "y", out="y")]), "", ""
    ),
    "a name for an input and a result": (
        document({"x": X, "y": Y}, [node("relu.default", "x", out="x"), node("exp.default", "x", out="y")]), "", ""
    ),
    "a result that is no tensor": (document({"x": X, "y": Y}, [node("dropout.default", 1.5, 0.5, True, out="y")]),
                                   "SM122", "SM122"),
    "a number as a first operand": (document({"x": X, "y": Y}, [node("add.Tensor", 1, "x", out="y")]), "", ""),
    "numbers for both operands": (document({"x": X, "y": Y}, [node("add.Tensor", 1, 2, out="y")]), "SM122", "SM122"),
    "division by zero": (
        document({"x": X, "y": Y}, [
            node("_operator.floordiv", 1, 0, out=[{"as_sym_int": {"as_name": "n"}}]), node("relu.default", "x", out="y")
        ]), "SM122", "SM122",
    ),
    "a tensor beyond any GPU": (document({"x": tensor(2**40, 2**40)}, [], outputs=("x",)), "SM118", "SM118"),
    "a result beyond any GPU": (
        document({"x": X, "y": Y}, [node("expand.default", "x", [2**40, 4, 4], out="v"),
                                    node("clone.default", "v", out="y")]), "SM118", "SM118",
    ),
    "a negative size": (document({"x": tensor(-4)}, [], outputs=("x",)), "SM104", "SM104"),
    "an unknown element type": (document({"x": tensor(4, dtype=99)}, [], outputs=("x",)), "SM104", "SM104"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_models(case: str, tmp_path: Path) -> None:
    doc, infer, train = ODD[case]
    path = files.write(tmp_path / "a.pt2", doc)
    assert outcome(path) == infer
    assert outcome(path, mode="train", optimizer="adam", loss="mean") == train
    outcome(path, mode="train", amp="bf16")
    outcome(path, dtype="fp16", batch=3)


def test_an_output_that_is_the_input_costs_nothing_more(tmp_path: Path) -> None:
    path = files.write(tmp_path / "a.pt2", document({"x": X}, [], outputs=("x",)))
    assert analyze(path).peak.live_bytes == 512


# -- damage --------------------------------------------------------------------------------------------------------


def test_cut_off_anywhere(tmp_path: Path) -> None:
    data = SEED.read_bytes()
    rng = random.Random(0)
    for size in [*range(0, 64, 7), *(rng.randrange(len(data)) for _ in range(60)), len(data) - 1]:
        path = tmp_path / "cut.pt2"
        path.write_bytes(data[:size])
        assert outcome(path) in ("SM101", "SM102", "SM104", "SM105", "SM107")


def test_bytes_that_flipped(tmp_path: Path) -> None:
    data = bytearray(SEED.read_bytes())
    rng = random.Random(1)
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(rng.choice([1, 5])):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        path = tmp_path / "flipped.pt2"
        path.write_bytes(broken)
        outcome(path)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = files.write(tmp_path / "bomb.pt2", b" " * 20_000_000)
    assert outcome(path) == "SM106"


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_another_packing(method: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pt2"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a/models/model.json", "{}")
    assert outcome(path) == "SM102"


TEXTS: dict[str, str | bytes] = {
    "nested": "[" * 200_000,
    "nested object": '{"a":' * 20_000,
    "a number of 10,000 digits": '{"schema_version": {"major": ' + "9" * 10_000 + "}}",
    "not UTF-8": b'{"\xff": 1}',
    "a list": "[1, 2]",
    "null": "null",
    "empty": "",
    "NaN": '{"schema_version": NaN}',
    "half a pair": '{"schema_version": {"major": 8}, "graph_module": "\\ud800"}',
}


@pytest.mark.parametrize("case", TEXTS)
def test_json_that_is_no_document(case: str, tmp_path: Path) -> None:
    assert outcome(files.write(tmp_path / "a.pt2", TEXTS[case])) in ("SM102", "SM103", "SM104", "SM106")


@pytest.mark.parametrize("major", [None, 7, 9, "8", [8], {}, -1])
def test_another_schema(major: Any, tmp_path: Path) -> None:
    doc = document({"x": X}, [])
    doc["schema_version"] = {"major": major}
    with pytest.raises(ModelFileError, match=r"has torch\.export schema"):
        read_archive(str(files.write(tmp_path / "a.pt2", doc)))


def test_bodies_in_bodies(tmp_path: Path) -> None:
    """1,500 nested higher-order ops: deeper than Python's stack."""
    inner = node("relu.default", "x", out="y")
    text = json.dumps(inner)
    for _ in range(1500):
        graph = '{"inputs": [], "outputs": [], "tensor_values": {}, "nodes": [' + text + "]}"
        arg = '{"name": "g", "arg": {"as_graph": {"name": "g", "graph": ' + graph + "}}}"
        text = '{"target": "torch.ops.higher_order.wrap", "inputs": [' + arg + '], "outputs": [], "metadata": {}}'
    doc = json.dumps(document({"x": X, "y": Y}, [])).replace('"nodes": []', f'"nodes": [{text}]')
    assert outcome(files.write(tmp_path / "a.pt2", doc)) == "SM104"


def test_names_with_markup_and_control_characters(tmp_path: Path) -> None:
    name = '<script>alert("\x1b[2J\x00\u202e")</script>'
    doc = document({"x": X, name: W, "y": Y}, [node("mm.default", "x", name, out="y")], parameters=(name,))
    assert outcome(files.write(tmp_path / "a.pt2", doc), mode="train", optimizer="sgd") == ""


# -- mutations -----------------------------------------------------------------------------------------------------

ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**400, -(2**70), 1.5, float("nan"), float("inf"), "", "x", [], {},
    [[]], [1, 2, 3], "\x1b[2J<b>", {"as_int": -5}, {"as_int": 10**30}, {"as_int": "a"}, {"as_none": True},
    {"name": "x"}, {"as_tensor": {"name": "nope"}}, {"as_expr": {"expr_str": "FloorDiv(Integer(1),Integer(0))"}},
    {"as_expr": {"expr_str": "Mul(Symbol('s77'),Integer(0))"}}, "torch.ops.aten.foo.default", "_operator.mul",
    "torch.ops.higher_order.cond", "torch.ops.higher_order.wrap_with_set_grad_enabled", "torch.sym_int",
]  # fmt: skip
KINDS = [
    "as_int", "as_ints", "as_tensor", "as_tensors", "as_float", "as_bool", "as_string", "as_sym_int", "as_sym_ints",
    "as_none", "as_scalar_type", "as_expr", "as_optional_tensors", "as_graph", "as_nothing_known",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        if key != "stack_trace":
            found += places(item, (*path, key))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate(doc: Any, rng: random.Random, known: list[tuple[Any, ...]]) -> None:
    """Deletes, replaces, copies, renames or shifts one place of a document."""
    path = rng.choice(known)
    try:
        parent = at(doc, path[:-1])
        old = parent[path[-1]]
    except (KeyError, IndexError, TypeError):
        return  # an earlier mutation took it away
    if not isinstance(parent, (dict, list)):
        return  # or put a text in its place
    action = rng.choice(["delete", "copy", "insert", "retype", "shift", "odd", "odd"])
    if action == "delete":
        del parent[path[-1]]
    elif action == "insert" and isinstance(parent, list):
        parent.insert(path[-1], copy.deepcopy(rng.choice(parent)))
    elif action == "retype" and isinstance(parent, dict):
        parent[rng.choice(KINDS)] = parent.pop(path[-1])
    elif action == "shift" and type(old) is int:
        parent[path[-1]] = old + rng.choice([-1, 1, -2, 5, 100])
    elif action == "copy":
        source = rng.choice(known)
        parent[path[-1]] = copy.deepcopy(at(DOCUMENTS[0], source)) if source in PLACES[0] else None
    else:
        parent[path[-1]] = copy.deepcopy(rng.choice(ODD_VALUES))


DOCUMENTS = [files.read(SEED), files.read(files.GRAPHS / "squeezenet1_1.pt2")]
PLACES = [places(doc) for doc in DOCUMENTS]
SCENARIOS: list[dict[str, Any]] = [
    {}, {"batch": 2, "optimizer": "adam"}, {"batch": 1, "mode": "train", "amp": "bf16"}, {"dtype": "bf16", "batch": 3},
]  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.sampled_from([0, 0, 0, 1]), st.sampled_from(SCENARIOS))
def test_a_damaged_document_ends_in_a_message_or_a_report(
    tmp_path: Path, seed: int, which: int, scenario: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    doc = copy.deepcopy(DOCUMENTS[which])
    known = PLACES[which]
    if rng.random() < 0.5:  # the nodes' arguments are where rules are reached
        known = [p for p in known if "inputs" in p] or known
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        mutate(doc, rng, known)
    outcome(files.write(tmp_path / "mutated.pt2", doc), **scenario)


def test_a_member_without_a_graph_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    assert outcome(path) == "SM105"
