"""Small ONNX graphs with random weights: nets with branches, loops, attention, normalization, and shape arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


class Net:
    """Collects nodes and weights of a graph."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.rng = np.random.default_rng(seed)

    def weight(self, *shape: int, scale: float = 0.1) -> str:
        name = f"w{len(self.weights)}"
        values = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def ints(self, *values: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, dtype=np.int64), name))
        return name

    def scalar(self, value: Any, dtype: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        number = len(self.nodes)
        names = [f"v{number}" if outputs == 1 else f"v{number}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"{kind}_{number}_n", **attributes))
        return names[0]

    def model(self, inputs: Sequence[Any], results: Sequence[tuple[str, int, int]], opset: int = 17) -> Any:
        """The model of (value, type, rank) results."""
        final = []
        for number, (name, kind, rank) in enumerate(results):
            self.nodes.append(helper.make_node("Identity", [name], [f"y{number}"], name=f"result{number}"))
            dims = [f"y{number}_{axis}" for axis in range(rank)]
            final.append(helper.make_tensor_value_info(f"y{number}", kind, dims))
        graph = helper.make_graph(self.nodes, "net", list(inputs), final, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def image(*shape: int | str, name: str = "x") -> Any:
    return helper.make_tensor_value_info(name, FLOAT, list(shape))


def conv_net() -> Any:
    net = Net()
    x = "x"
    channels = 3
    for width in (8, 16, 16):
        x = net.op("Conv", x, net.weight(width, channels, 3, 3), net.weight(width), pads=[1, 1, 1, 1])
        x = net.op("Relu", x)
        x = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
        channels = width
    x = net.op("GlobalAveragePool", x)
    x = net.op("Flatten", x)
    x = net.op("Gemm", x, net.weight(10, channels), net.weight(10), transB=1)
    return net.model([image("batch", 3, 32, 32)], [(x, FLOAT, 2)])


def residual_net() -> Any:
    net = Net(1)
    x = net.op("Conv", "x", net.weight(16, 3, 3, 3), pads=[1, 1, 1, 1])
    for _ in range(3):
        y = net.op("Conv", net.op("Relu", x), net.weight(16, 16, 3, 3), pads=[1, 1, 1, 1])
        y = net.op("Conv", net.op("Sigmoid", y), net.weight(16, 16, 1, 1))
        x = net.op("Add", x, y)
    return net.model([image(2, 3, 24, 24)], [(net.op("ReduceMean", x, axes=[2, 3]), FLOAT, 4)])


def unet() -> Any:
    net = Net(2)
    first = net.op("Relu", net.op("Conv", "x", net.weight(8, 3, 3, 3), pads=[1, 1, 1, 1]))
    down = net.op("MaxPool", first, kernel_shape=[2, 2], strides=[2, 2])
    second = net.op("Relu", net.op("Conv", down, net.weight(16, 8, 3, 3), pads=[1, 1, 1, 1]))
    low = net.op("MaxPool", second, kernel_shape=[2, 2], strides=[2, 2])
    low = net.op("Relu", net.op("Conv", low, net.weight(32, 16, 3, 3), pads=[1, 1, 1, 1]))
    scales = net.weights
    name = "scales"
    scales.append(numpy_helper.from_array(np.array([1, 1, 2, 2], dtype=np.float32), name))
    up = net.op("Resize", low, "", name, mode="nearest")
    up = net.op("Concat", up, second, axis=1)
    up = net.op("Relu", net.op("Conv", up, net.weight(16, 48, 3, 3), pads=[1, 1, 1, 1]))
    up = net.op("Concat", net.op("Resize", up, "", name, mode="nearest"), first, axis=1)
    return net.model([image("batch", 3, 32, 32)], [(net.op("Conv", up, net.weight(2, 24, 1, 1)), FLOAT, 4)])


def attention(batch: int | str = "batch", length: int | str = 16) -> Any:
    net = Net(3)
    x = "x"
    for _ in range(2):
        norm = net.op("LayerNormalization", x, net.weight(32), net.weight(32))
        heads = []
        for transposed in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            part = net.op("Add", net.op("MatMul", norm, net.weight(32, 32)), net.weight(32))
            part = net.op("Reshape", part, net.ints(0, 0, 4, 8))
            heads.append(net.op("Transpose", part, perm=transposed))
        scores = net.op("Softmax", net.op("Mul", net.op("MatMul", heads[0], heads[1]), net.scalar(0.3, np.float32)))
        mixed = net.op("Transpose", net.op("MatMul", scores, heads[2]), perm=[0, 2, 1, 3])
        mixed = net.op("Reshape", mixed, net.ints(0, 0, 32))
        x = net.op("Add", x, net.op("MatMul", mixed, net.weight(32, 32)))
        wide = net.op("Erf", net.op("MatMul", x, net.weight(32, 64)))
        x = net.op("Add", x, net.op("MatMul", wide, net.weight(64, 32)))
    return net.model([image(batch, length, 32)], [(x, FLOAT, 3)])


def embedding() -> Any:
    net = Net(4)
    x = net.op("Gather", net.weight(100, 24), "ids")
    mask = net.op("Cast", net.op("Greater", "ids", net.scalar(3, np.int64)), to=FLOAT)
    x = net.op("Mul", x, net.op("Unsqueeze", mask, net.ints(-1)))
    x = net.op("Tanh", net.op("MatMul", x, net.weight(24, 24)))
    ids = helper.make_tensor_value_info("ids", INT64, ["batch", "length"])
    return net.model([ids], [(net.op("ReduceSum", x, net.ints(1)), FLOAT, 2)])


def shapes_of_shapes() -> Any:
    net = Net(5)
    shape = net.op("Shape", "x")
    first = net.op("Gather", shape, net.scalar(0, np.int64))
    rows = net.op("Unsqueeze", first, net.ints(0))
    target = net.op("Concat", rows, net.ints(-1), axis=0)
    flat = net.op("Reshape", net.op("Exp", "x"), target)
    return net.model([image("batch", 4, 6, 5)], [(net.op("MatMul", flat, net.weight(120, 7)), FLOAT, 2)])


def _branch(name: str, nodes: Sequence[Any], result: str, shape: Sequence[int | str] | None) -> Any:
    value = helper.make_tensor_value_info(result, FLOAT, shape)
    return helper.make_graph(list(nodes), name, [], [value])


def branches(condition: bool = True) -> Any:
    """If with a constant condition; branches read values of the outer graph."""
    net = Net(6)
    outer = net.op("Relu", net.op("MatMul", "x", net.weight(16, 16)))
    yes = [
        helper.make_node("Exp", [outer], ["t0"], name="t_exp"),
        helper.make_node("Add", ["t0", outer], ["t1"], name="t_add"),
        helper.make_node("Sqrt", ["t1"], ["t2"], name="t_sqrt"),
    ]
    no = [helper.make_node("Neg", [outer], ["e0"], name="e_neg")]
    test = net.scalar(condition, np.bool_)
    chosen = net.op(
        "If", test, then_branch=_branch("yes", yes, "t2", [8, 16]), else_branch=_branch("no", no, "e0", [8, 16])
    )
    return net.model([image(8, 16)], [(net.op("MatMul", chosen, net.weight(16, 4)), FLOAT, 2)])


def loop(trips: int = 5) -> Any:
    """A Loop with one carried value and one scan result."""
    net = Net(7)
    body = helper.make_graph(
        [
            helper.make_node("Exp", ["state"], ["b0"], name="b_exp"),
            helper.make_node("Mul", ["b0", "x"], ["b1"], name="b_mul"),
            helper.make_node("Sigmoid", ["b1"], ["b2"], name="b_sig"),
            helper.make_node("Add", ["b2", "state"], ["next"], name="b_add"),
            helper.make_node("ReduceMean", ["b2"], ["seen"], name="b_mean", axes=[1], keepdims=0),
            helper.make_node("Identity", ["go"], ["keep"], name="b_go"),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("state", FLOAT, [8, 16]),
        ],
        [
            helper.make_tensor_value_info("keep", BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, [8, 16]),
            helper.make_tensor_value_info("seen", FLOAT, [8]),
        ],
    )
    start = net.op("Relu", "x")
    final = net.op("Loop", net.scalar(trips, np.int64), net.scalar(True, np.bool_), start, outputs=2, body=body)
    total = net.op("MatMul", final, net.weight(16, 4))
    return net.model([image(8, 16)], [(total, FLOAT, 2), (f"{final[:-2]}_1", FLOAT, 2)])


def inplace_chain() -> Any:
    net = Net(8)
    x = net.op("Exp", "x")
    for kind in ("Relu", "Sigmoid", "Tanh", "Elu", "LeakyRelu", "Softplus", "Softsign", "HardSigmoid", "Celu"):
        x = net.op("Abs", net.op(kind, x))
    x = net.op("Clip", x, net.scalar(0.0, np.float32), net.scalar(1.0, np.float32))
    return net.model([image("batch", 40)], [(net.op("Softmax", x), FLOAT, 2)])


def norms() -> Any:
    net = Net(9)
    x = net.op("Conv", "x", net.weight(8, 3, 3, 3))
    x = net.op("InstanceNormalization", x, net.weight(8), net.weight(8))
    x = net.op("BatchNormalization", x, net.weight(8), net.weight(8), net.weight(8), net.op("Exp", net.weight(8)))
    x = net.op("HardSwish", x)
    x = net.op("Where", net.op("Greater", x, net.scalar(0.0, np.float32)), x, net.op("Neg", x))
    return net.model([image(2, 3, 20, 20)], [(x, FLOAT, 4)])


def splits() -> Any:
    net = Net(10)
    parts = net.op("Split", "x", net.ints(3, 5), outputs=2, axis=1)
    other = f"{parts[:-2]}_1"
    x = net.op("Concat", net.op("Transpose", parts, perm=[1, 0]), net.op("Transpose", other, perm=[1, 0]), axis=0)
    values = net.op("TopK", x, net.ints(2), outputs=2)
    return net.model([image(6, 8)], [(values, FLOAT, 2), (f"{values[:-2]}_1", INT64, 2)])


def scan(length: int = 5, axis: int = 0, open_sizes: bool = False) -> Any:
    """A running sum over `axis` of a state [8, 16], with the results of each turn along the same axis."""
    net = Net(11)
    width: int | str = "width" if open_sizes else 16
    body = helper.make_graph(
        [
            helper.make_node("Exp", ["part"], ["grown"], "grow"),
            helper.make_node("Add", ["state", "grown"], ["added"], "add"),
            helper.make_node("Sigmoid", ["added"], ["next"], "squash"),
            helper.make_node("Neg", ["next"], ["seen"], "turn"),
        ],
        "body",
        [helper.make_tensor_value_info(name, FLOAT, [8, width]) for name in ("state", "part")],
        [helper.make_tensor_value_info(name, FLOAT, [8, width]) for name in ("next", "seen")],
    )
    sizes: list[int | str] = [8, width]
    sizes.insert(axis, length)
    start = net.op("Exp", "start")
    parts = net.op("Exp", "x")
    final = net.op(
        "Scan", start, parts, outputs=2, body=body, num_scan_inputs=1, scan_input_axes=[axis], scan_output_axes=[axis]
    )
    seen = net.op("Exp", f"{final[:-2]}_1")
    return net.model([image(8, width, name="start"), image(*sizes)], [(final, FLOAT, 2), (seen, FLOAT, 3)])


def scatter() -> Any:
    """Rows written into another tensor: ScatterND makes a copy of it, ScatterElements works in place."""
    net = Net(15)
    rows = net.op("Unsqueeze", net.ints(0, 1), net.ints(1))
    x = net.op("ScatterND", net.op("Exp", "x"), rows, net.weight(2, 40))
    index = net.op("Unsqueeze", net.ints(0, 1), net.ints(0))
    x = net.op("ScatterElements", net.op("Exp", x), index, net.weight(1, 2))
    return net.model([image("batch", 40)], [(net.op("Exp", x), FLOAT, 2)])


def sequence() -> Any:
    """Parts of a tensor by SplitToSequence: of two rows each, one each without the axis, and 1 and 5."""
    net = Net(12)
    x = net.op("Exp", "x")
    found = []
    for split, at, attributes in (
        (net.scalar(2, np.int64), 1, {}),
        (None, 0, {"keepdims": 0}),
        (net.ints(1, 5), 1, {}),
    ):
        made = net.op("SplitToSequence", x, *([split] if split else []), axis=0, **attributes)
        part = net.op("SequenceAt", made, net.scalar(at, np.int64))
        found.append(net.op("Exp", part))
    return net.model([image(6, 40)], [(found[0], FLOAT, 2), (found[1], FLOAT, 1), (found[2], FLOAT, 2)])


def unread() -> Any:
    """Masks that nobody reads, of one size."""
    net = Net(13)
    x = "x"
    for _ in range(3):
        dropped = net.op("Dropout", net.op("Exp", x), outputs=2)
        x = net.op("Exp", net.op("Exp", dropped))
    return net.model([image("batch", 40)], [(x, FLOAT, 2)])


def partial_contents() -> Any:
    """Sizes made of sizes of which one is open, so that the runtime plans without any of them."""
    net = Net(14)
    shape = net.op("Shape", "x")
    parts = [net.op("Unsqueeze", net.op("Gather", shape, net.scalar(i, np.int64)), net.ints(0)) for i in (0, 1, 2)]
    x = net.op("Reshape", "x", net.op("Concat", parts[0], net.op("Mul", parts[1], parts[2]), axis=0))
    for _ in range(3):
        x = net.op("Neg", net.op("Exp", x))
    filled = net.op("ConstantOfShape", net.op("Concat", parts[1], parts[2], axis=0))
    for _ in range(3):
        filled = net.op("Neg", net.op("Exp", filled))
    return net.model([image("batch", 8, 16)], [(x, FLOAT, 2), (filled, FLOAT, 2)])


GRAPHS: dict[str, Callable[[], Any]] = {
    "conv_net": conv_net,
    "residual_net": residual_net,
    "unet": unet,
    "attention": attention,
    "attention_static": lambda: attention(2, 16),
    "embedding": embedding,
    "shapes_of_shapes": shapes_of_shapes,
    "branch_then": branches,
    "branch_else": lambda: branches(False),
    "loop": loop,
    "loop_once": lambda: loop(1),
    "inplace_chain": inplace_chain,
    "norms": norms,
    "splits": splits,
    "scan": scan,
    "scan_once": lambda: scan(1),
    "scan_columns": lambda: scan(2, 1),
    "scan_open": lambda: scan(4, open_sizes=True),
    "scan_open_last": lambda: scan(3, 2, open_sizes=True),
    "scatter": scatter,
    "sequence": sequence,
    "unread": unread,
    "partial_contents": partial_contents,
}
