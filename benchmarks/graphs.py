"""Makes the files that the benchmarks need. Runs as a process of its own, so that the measuring one stays small.

python benchmarks/graphs.py embed IN.onnx OUT.onnx   # the same model with its weights in the file, all zero
python benchmarks/graphs.py chain NODES OUT.onnx     # residual blocks: Conv, Relu, Conv, Add, Relu
"""

from __future__ import annotations

import sys
from math import prod

import onnx
from onnx import TensorProto, helper

CHANNELS, SIDE = 8, 16


def embed(source: str, target: str) -> None:
    """Copies a weightless model with zeros of the right size in place of the references to its weights."""
    model = onnx.load(source, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            del tensor.external_data[:]
            tensor.data_location = TensorProto.DEFAULT
            width = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            tensor.raw_data = bytes(prod(tensor.dims) * width)
    onnx.save(model, target)


def _weight(name: str, dims: tuple[int, ...]) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "weights.bin"
    return tensor


def chain(count: int, target: str) -> None:
    """A network of `count` nodes: residual blocks of two convolutions at one size, then mean and a linear layer."""
    nodes, weights = [], []
    current, skip = "x", "x"
    for i in range(count - 2):
        kind = ("Conv", "Relu", "Conv", "Add", "Relu")[i % 5]
        inputs = [current]
        if kind == "Conv":
            dims = (CHANNELS, CHANNELS, 3, 3)
            weights.append(_weight(f"block{i // 5}.conv{i % 5}.weight", dims))
            inputs.append(weights[-1].name)
        elif kind == "Add":
            inputs.append(skip)
        attributes = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]} if kind == "Conv" else {}
        nodes.append(helper.make_node(kind, inputs, [f"v{i}"], f"/block{i // 5}/{kind}_{i}", **attributes))
        current = f"v{i}"
        if i % 5 == 4:
            skip = current
    weights += [_weight("fc.weight", (10, CHANNELS * SIDE * SIDE)), _weight("fc.bias", (10,))]
    nodes.append(helper.make_node("Flatten", [current], ["flat"], "/Flatten", axis=1))
    nodes.append(helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["y"], "/fc/Gemm", transB=1))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", CHANNELS, SIDE, SIDE])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with open(target, "wb") as file:
        file.write(model.SerializeToString())


if __name__ == "__main__":
    verb, argument, output = sys.argv[1:]
    if verb == "embed":
        embed(argument, output)
    else:
        chain(int(argument), output)
