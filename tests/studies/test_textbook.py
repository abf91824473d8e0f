"""The textbook formulas against numbers that people have published or can work out by hand."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Graph, Op, Parameter, Ref, Value
from staticmem.studies.textbook import TextbookEstimate, tensor_bytes, textbook_estimate
from staticmem.units import MIB, format_bytes

MODELS = Path(__file__).parents[2] / "models"
f32 = dtypes.float32


def graph_of(ops: list[Op], values: list[Value], parameters: list[Value], *, inplace_known: bool = True) -> Graph:
    return Graph(
        name="hand",
        format="pt2",
        producer="tests",
        inputs=(Value("x", f32, (1, 3, 682, 700)),),
        parameters=tuple(Parameter(v, v.name) for v in parameters),
        buffers=(),
        ops=tuple(ops),
        outputs=ops[-1].outputs,
        values={v.name: v for v in values},
        inplace_known=inplace_known,
    )


def op(name: str, target: str, *args: Arg) -> Op:
    return Op(name, f"aten::{target}", args, {}, (name,))


def seed(relu: str, *, inplace_known: bool) -> Graph:
    """Conv 3-64, ReLU, conv 64-64, ReLU, max-pool, conv 64-128 over an image of 1x3x682x700."""
    shapes = {"w0": (64, 3, 3, 3), "b0": (64,), "w2": (64, 64, 3, 3), "b2": (64,), "w5": (128, 64, 3, 3), "b5": (128,)}
    large, small, last = (1, 64, 682, 700), (1, 64, 341, 350), (1, 128, 341, 350)
    ops = [
        op("conv0", "conv2d", Ref("x"), Ref("w0"), Ref("b0"), (1, 1), (1, 1)),
        op("relu1", relu, Ref("conv0")),
        op("conv2", "conv2d", Ref("relu1"), Ref("w2"), Ref("b2"), (1, 1), (1, 1)),
        op("relu3", relu, Ref("conv2")),
        op("pool4", "max_pool2d", Ref("relu3"), (2, 2), (2, 2)),
        op("conv5", "conv2d", Ref("pool4"), Ref("w5"), Ref("b5"), (1, 1), (1, 1)),
    ]
    results = dict.fromkeys(("conv0", "relu1", "conv2", "relu3"), large) | {"pool4": small, "conv5": last}
    return graph_of(
        ops,
        [Value(n, f32, s) for n, s in results.items()],
        [Value(n, f32, s) for n, s in shapes.items()],
        inplace_known=inplace_known,
    )


def from_archive(name: str, batch: int) -> Graph:
    """The graph of an example archive, whose only symbol is the batch. Independent of the frontends on purpose."""
    with zipfile.ZipFile(MODELS / f"{name}.pt2") as archive:
        member = next(m for m in archive.namelist() if m.endswith("models/model.json"))
        exported: dict[str, Any] = json.loads(archive.read(member))["graph_module"]

    def value(tensor: str) -> Value:
        facts = exported["graph"]["tensor_values"][tensor]
        sizes = tuple(s.get("as_int", batch) for s in facts["sizes"])
        return Value(tensor, dtypes.PT2_CODES[facts["dtype"]], sizes)

    def argument(arg: dict[str, Any]) -> Arg:
        kind, content = next(iter(arg.items()))
        if kind == "as_tensor":
            return Ref(content["name"])
        return None if kind == "as_none" else tuple(content) if isinstance(content, list) else content

    specs = exported["signature"]["input_specs"]
    parameters = [s["parameter"]["arg"]["name"] for s in specs if "parameter" in s]
    ops = []
    for node in exported["graph"]["nodes"]:
        _, _, _, target, overload = node["target"].split(".")
        args = tuple(argument(i["arg"]) for i in node["inputs"])
        results = (node["outputs"][0]["as_tensor"]["name"],)
        ops.append(Op(node["name"], f"aten::{target}.{overload}", args, {}, results))
    return graph_of(ops, [value(t) for t in exported["graph"]["tensor_values"]], [value(p) for p in parameters])


@pytest.mark.parametrize(
    ("names", "size"),
    [
        (("int8", "uint8", "bool", "float8_e4m3fn"), 1),
        (("float16", "bfloat16", "int16"), 2),
        (("float32", "int32"), 4),
        (("float64", "int64"), 8),
    ],
)
def test_bytes_of_an_element(names: tuple[str, ...], size: int) -> None:
    for name in names:
        assert tensor_bytes((10,), dtypes.ALL[name]) == 10 * size


def test_bytes_of_a_tensor_in_decimal_and_binary_units() -> None:
    image, batch = tensor_bytes((500, 500, 3)), tensor_bytes((256, 3, 100, 100))
    assert (image, batch) == (3_000_000, 30_720_000)
    assert format_bytes(image, "decimal", 0) == "3 MB"
    assert format_bytes(batch, "decimal", 0) == "31 MB"
    assert format_bytes(image) == "2.86 MiB"
    assert format_bytes(1000 * 10**6, "decimal", 0) == "1 GB"  # 1 G = 1000 M
    assert format_bytes(1024 * 2**20, digits=0) == "1 GiB"


@pytest.mark.parametrize(
    "graph",
    [seed("relu_", inplace_known=True), seed("relu", inplace_known=False), from_archive("seed", 1)],
    ids=["in place", "in place lost by the file", "archive"],
)
def test_worked_example(graph: Graph) -> None:
    estimate = textbook_estimate(graph)
    assert estimate.parameters == 112_576
    assert estimate.parameter_bytes == 450_304  # 0.450304 MB
    assert estimate.intermediate_bytes_forward == 336_089_600
    assert estimate.intermediate_bytes_with_backward == 672_179_200
    assert [row.bytes for row in estimate.rows] == [122_214_400, 0, 122_214_400, 0, 30_553_600, 61_107_200]
    assert estimate.unsized == ()


def test_relu_out_of_place_counts() -> None:
    estimate = textbook_estimate(seed("relu", inplace_known=True))
    assert estimate.intermediate_bytes_forward == 336_089_600 + 2 * 122_214_400


# The table of the CS231n notes, in numbers of elements and of weights (biases left out). The notes print "24M * 4 bytes
# ~= 93MB / image" below it; their own rows add up to 15,237,608 elements, which is 61 MB.
LECTURE = [
    ("conv", 224 * 224 * 64, 1_728), ("conv", 224 * 224 * 64, 36_864), ("pool", 112 * 112 * 64, 0),
    ("conv", 112 * 112 * 128, 73_728), ("conv", 112 * 112 * 128, 147_456), ("pool", 56 * 56 * 128, 0),
    ("conv", 56 * 56 * 256, 294_912), ("conv", 56 * 56 * 256, 589_824), ("conv", 56 * 56 * 256, 589_824),
    ("pool", 28 * 28 * 256, 0), ("conv", 28 * 28 * 512, 1_179_648), ("conv", 28 * 28 * 512, 2_359_296),
    ("conv", 28 * 28 * 512, 2_359_296), ("pool", 14 * 14 * 512, 0), ("conv", 14 * 14 * 512, 2_359_296),
    ("conv", 14 * 14 * 512, 2_359_296), ("conv", 14 * 14 * 512, 2_359_296), ("pool", 7 * 7 * 512, 0),
    ("fc", 4096, 102_760_448), ("fc", 4096, 16_777_216), ("fc", 1000, 4_096_000),
]  # fmt: skip
KINDS = {"aten::conv2d.default": "conv", "aten::max_pool2d.default": "pool", "aten::linear.default": "fc"}


def lecture_rows(estimate: TextbookEstimate) -> list[tuple[str, int, int]]:
    return [(KINDS[row.target], row.elements, row.weights) for row in estimate.rows if row.target in KINDS]


def test_vgg16_is_the_table_of_the_lecture() -> None:
    estimate = textbook_estimate(from_archive("vgg16", 1))
    rows = lecture_rows(estimate)
    assert rows == LECTURE
    assert sum(weights for _, _, weights in rows) == 138_344_128
    assert sum(row.biases for row in estimate.rows) == 13_416
    assert estimate.parameters == 138_357_544
    image = 224 * 224 * 3
    assert image + sum(elements for _, elements, _ in rows) == 15_237_608


def test_vgg16_has_rows_that_the_lecture_leaves_out() -> None:
    """The pooling to 7x7 and both dropouts make results of their own in PyTorch; the input is not an intermediate."""
    estimate = textbook_estimate(from_archive("vgg16", 1))
    extra = [row.elements for row in estimate.rows if row.bytes and row.target not in KINDS]
    assert extra == [7 * 7 * 512, 4096, 4096]
    assert estimate.intermediate_bytes_forward == 4 * (15_237_608 - 224 * 224 * 3 + sum(extra))


def test_intermediates_grow_with_the_batch_and_parameters_do_not() -> None:
    one, many = (textbook_estimate(from_archive("vgg16", batch)) for batch in (1, 32))
    assert many.intermediate_bytes_forward == 32 * one.intermediate_bytes_forward
    assert many.parameter_bytes == one.parameter_bytes


def test_weights_of_vgg19() -> None:
    estimate = textbook_estimate(from_archive("vgg19", 1))
    assert estimate.parameters == 143_667_240
    assert format_bytes(estimate.parameter_bytes, digits=0) == "548 MiB"
    assert estimate.parameter_bytes // MIB == 548


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("mobilenet_v2", 3_504_872)]
)
def test_every_parameter_is_in_one_row(name: str, parameters: int) -> None:
    estimate = textbook_estimate(from_archive(name, 1))
    assert estimate.parameters == sum(row.parameters for row in estimate.rows) == parameters
    norms = [row for row in estimate.rows if row.target == "aten::batch_norm.default"]
    assert all(row.parameters == 2 * row.shape[1] for row in norms)


def test_shared_parameters_views_and_results_without_a_shape() -> None:
    weight = Value("w", f32, (8, 8))
    ops = [
        op("a", "linear", Ref("x"), Ref("w"), None),
        op("v", "view", Ref("a"), (64,)),
        op("b", "linear", Ref("a"), Ref("w"), None),
        op("d", "dropout", Ref("b"), 0.5, False),
        op("same", "to.dtype", Ref("b"), f32),
        op("half", "to.dtype", Ref("b"), dtypes.float16),
        op("where", "argmax", Ref("b")),
        op("n", "sym_size.int", Ref("b"), 0),
        op("lost", "nonzero", Ref("b")),
    ]
    results = {"a": (8, 8), "v": (64,), "b": (8, 8), "d": (8, 8), "same": (8, 8)}
    values = [Value(n, f32, s) for n, s in results.items()]
    values += [Value("half", dtypes.float16, (8, 8)), Value("where", dtypes.int64, ()), Value("lost", f32, None)]
    estimate = textbook_estimate(graph_of(ops, values, [weight]))
    assert {row.op: row.bytes for row in estimate.rows if row.bytes} == {"a": 256, "b": 256, "half": 128, "where": 8}
    assert [row.weights for row in estimate.rows if row.weights] == [64]
    assert estimate.unsized == ("lost",)
    # an index has no gradient
    assert estimate.intermediate_bytes_with_backward == 2 * estimate.intermediate_bytes_forward - 8
