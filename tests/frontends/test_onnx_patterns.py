"""Groups of ONNX nodes as the TorchScript exporter writes them, recovered as the ATen calls that they were."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto
from onnx_models import bound, ints, model, node, scalar, targets, value, weight

import staticmem
from staticmem.ir.graph import Frame, Graph, Ref


def run(tmp_path: Path, nodes: list[object], tensors: list[object], shape: tuple[int, ...] = (2, 6, 8)) -> Graph:
    last = nodes[-1].output[0]  # type: ignore[attr-defined]
    return bound(model(nodes, [value("x", list(shape))], [last], tensors), tmp_path)


def test_linear_with_transposed_weight_and_bias(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", ["fc.weight"], ["t"], perm=[1, 0], name="/fc/Transpose"),
        node("MatMul", ["x", "t"], ["m"], name="/fc/MatMul"),
        node("Add", ["fc.bias", "m"], ["y"], name="/fc/Add"),
    ]
    graph = run(tmp_path, nodes, [weight("fc.weight", 4, 8), weight("fc.bias", 4)])
    assert [(op.target, op.args) for op in graph.ops] == [
        ("aten::linear", (Ref("x"), Ref("fc.weight"), Ref("fc.bias")))
    ]
    assert graph.ops[0].modules == (Frame(""), Frame("fc"))
    assert graph.module_tree_known


def test_linear_with_a_folded_weight_has_the_sizes_of_pytorch(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "onnx::MatMul_12"], ["m"]), node("Add", ["fc.bias", "m"], ["y"])]
    graph = run(tmp_path, nodes, [weight("onnx::MatMul_12", 8, 4), weight("fc.bias", 4)])
    assert targets(graph) == ["aten::linear"]
    assert {p.fqn: p.value.shape for p in graph.parameters}["onnx::MatMul_12"] == (4, 8)


def test_addmm_of_conv1d(tmp_path: Path) -> None:
    nodes = [
        node("Reshape", ["x", "flat"], ["f"]),
        node("Gemm", ["f", "h.c_attn.weight", "h.c_attn.bias"], ["g"]),
        node("Reshape", ["g", "back"], ["y"]),
    ]
    tensors = [
        ints("flat", -1, 8),
        ints("back", 2, 6, 24),
        weight("h.c_attn.weight", 8, 24),
        weight("h.c_attn.bias", 24),
    ]
    graph = run(tmp_path, nodes, tensors)
    assert targets(graph) == ["aten::reshape", "aten::addmm", "aten::reshape"]


def attention(
    *, mask: bool = False, causal: bool = False, scale: float = 8**-0.25
) -> tuple[list[object], list[object]]:
    nodes: list[object] = [
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("Mul", ["q", "s"], ["qs"]),
        node("Mul", ["kt", "s"], ["ks"]),
        node("MatMul", ["qs", "ks"], ["scores"]),
    ]
    tensors = [scalar("s", scale), scalar("p", 0.1)]
    scores = "scores"
    if causal:
        nodes += [
            node("Trilu", ["ones"], ["tril"], upper=0),
            node("Equal", ["tril", "zero"], ["hidden"]),
            node("Where", ["hidden", "inf", "zero"], ["bias"]),
            node("Add", ["scores", "bias"], ["masked"]),
        ]
        tensors += [weight("ones", 100, 100), scalar("zero", 0.0), scalar("inf", float("-inf"))]
        scores = "masked"
    if mask:
        nodes += [node("Where", ["allowed", "zero", "inf"], ["bias"]), node("Add", ["scores", "bias"], ["masked"])]
        tensors += [scalar("zero", 0.0), scalar("inf", float("-inf"))]
        scores = "masked"
    nodes += [
        node("Softmax", [scores], ["w"], axis=-1),
        node("Dropout", ["w", "p"], ["d"]),
        node("MatMul", ["d", "v"], ["y"]),
    ]
    return nodes, tensors


@pytest.mark.parametrize("kind", ["plain", "mask", "causal"])
def test_scaled_dot_product_attention(tmp_path: Path, kind: str) -> None:
    nodes, tensors = attention(mask=kind == "mask", causal=kind == "causal")
    size = 100 if kind == "causal" else 6
    inputs = [value(n, [2, 4, size, 8]) for n in ("q", "k", "v")]
    if kind == "mask":
        inputs.append(value("allowed", [2, 1, 6, 6], 9))
    graph = bound(model(nodes, inputs, ["y"], tensors), tmp_path)
    assert targets(graph) == ["aten::scaled_dot_product_attention"]
    mask = Ref("allowed") if kind == "mask" else None
    assert graph.ops[0].args == (Ref("q"), Ref("k"), Ref("v"), mask, 0.1, kind == "causal")
    assert not graph.ops[0].kwargs


def test_attention_that_scales_once_stays_as_written(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["scores"]),
        node("Div", ["scores", "root"], ["scaled"]),
        node("Softmax", ["scaled"], ["w"], axis=-1),
        node("MatMul", ["w", "v"], ["y"]),
    ]
    inputs = [value(n, [2, 4, 6, 8]) for n in ("q", "k", "v")]
    graph = bound(model(nodes, inputs, ["y"], [scalar("root", 2.828)]), tmp_path)
    assert targets(graph) == [
        "aten::transpose.int", "aten::matmul", "aten::div.Tensor", "aten::softmax.int", "aten::matmul",
    ]  # fmt: skip


def biased(*path: object, mask: str = "bias") -> tuple[list[object], list[object]]:
    """Attention to which `mask` is added, and before it the nodes that make that."""
    nodes, tensors = attention()
    soft = next(i for i, n in enumerate(nodes) if n.op_type == "Softmax")  # type: ignore[attr-defined]
    nodes[soft] = node("Softmax", ["biased"], ["w"], axis=-1)
    return [*path, *nodes[:soft], node("Add", ["scores", mask], ["biased"]), *nodes[soft:]], tensors


TURN = (
    node("Gather", ["table", "where"], ["rows"]),  # (6, 6, 4): heads last
    node("Transpose", ["rows"], ["turned"], perm=[2, 0, 1]),
    node("Unsqueeze", ["turned", "front"], ["bias"]),
)


@pytest.mark.parametrize(
    ("path", "mask", "copied"),
    [
        (TURN, "bias", "bias"),
        ((*TURN, node("Where", ["allowed", "bias", "low"], ["m"])), "m", "m"),
        ((*TURN, node("Add", ["near", "bias"], ["m"])), "m", "m"),  # the larger operand decides
        ((*TURN, node("Expand", ["bias", "whole"], ["m"])), "m", "bias"),  # before it is expanded
        ((*TURN, node("Transpose", ["bias"], ["m"], perm=[0, 1, 3, 2])), "m", "m"),
        ((*TURN, node("Transpose", ["bias"], ["b"], perm=[0, 2, 3, 1]),
          node("Reshape", ["b", "back"], ["m"])), "m", ""),  # a reshape of what is not permuted any more
        ((node("Gather", ["near", "one"], ["m"], axis=2),), "m", ""),
        ((node("Transpose", ["near"], ["m"], perm=[1, 0, 2, 3]),), "m", ""),  # rows stay rows
        ((node("Transpose", ["column"], ["m"], perm=[0, 1, 3, 2]),), "m", ""),  # sizes of 1
    ],
)  # fmt: skip
def test_a_permuted_mask_was_contiguous(tmp_path: Path, path: tuple[object, ...], mask: str, copied: str) -> None:
    """The exporter writes no `contiguous()`; a fused kernel takes no mask without one (sdp_utils.cpp)."""
    nodes, tensors = biased(*path, mask=mask)
    tensors += [
        weight("table", 50, 4), ints("front", 0), ints("whole", 2, 4, 6, 6), ints("back", 1, 4, 6, 6),
        scalar("low", -1e9),
    ]  # fmt: skip
    inputs = [value(n, [2, 4, 6, 8]) for n in ("q", "k", "v")]
    inputs += [value("where", [6, 6], 7), value("allowed", [1, 1, 6, 6], 9), value("near", [1, 1, 6, 6])]
    inputs += [value("one", [6], 7), value("column", [2, 1, 6, 1])]
    graph = bound(model(nodes, inputs, ["y"], tensors), tmp_path)
    *before, attend = graph.ops
    assert attend.target == "aten::scaled_dot_product_attention"
    copies = [op for op in before if op.target == "aten::contiguous"]
    assert [op.args for op in copies] == ([(Ref(copied),)] if copied else [])
    assert attend.args[3] == (Ref(copies[0].outputs[0]) if copied else Ref(mask))
    assert [note.count for note in graph.notes if note.code == "SM272"] == ([1] if copied else [])


def test_a_key_that_an_optimiser_reshapes_twice_is_itself(tmp_path: Path) -> None:
    """What `torch.onnx.export(optimize=True)` makes of the transposed key."""
    nodes, tensors = attention()
    nodes[0:1] = [
        node("Reshape", ["k", "flat"], ["k3"]),
        node("Transpose", ["k3"], ["t3"], perm=[0, 2, 1]),
        node("Reshape", ["t3", "heads"], ["kt"]),
    ]
    inputs = [value(n, [2, 4, 6, 8]) for n in ("q", "k", "v")]
    graph = bound(model(nodes, inputs, ["y"], [*tensors, ints("flat", 8, 6, 8), ints("heads", 2, 4, 8, 6)]), tmp_path)
    assert [(op.target, op.args[:3]) for op in graph.ops] == [
        ("aten::scaled_dot_product_attention", (Ref("q"), Ref("k"), Ref("v")))
    ]


def test_gelu_silu_hardswish_mish(tmp_path: Path) -> None:
    nodes = [
        node("Div", ["x", "root"], ["g1"]), node("Erf", ["g1"], ["g2"]), node("Add", ["g2", "one"], ["g3"]),
        node("Mul", ["x", "g3"], ["g4"]), node("Mul", ["g4", "half"], ["g"]),
        node("Sigmoid", ["g"], ["s1"]), node("Mul", ["g", "s1"], ["s"]),
        node("HardSigmoid", ["s"], ["h1"], alpha=1 / 6), node("Mul", ["s", "h1"], ["h"]),
        node("Softplus", ["h"], ["m1"]), node("Tanh", ["m1"], ["m2"]), node("Mul", ["h", "m2"], ["m"]),
        node("Add", ["m", "three"], ["r1"]), node("Clip", ["r1", "zero", "six"], ["r2"]),
        node("Div", ["r2", "six"], ["y"]),
    ]  # fmt: skip
    tensors = [
        scalar(n, v)
        for n, v in {"root": 2**0.5, "one": 1.0, "half": 0.5, "three": 3.0, "zero": 0.0, "six": 6.0}.items()
    ]
    assert targets(run(tmp_path, nodes, tensors)) == [
        "aten::gelu", "aten::silu", "aten::hardswish", "aten::mish", "aten::hardsigmoid",
    ]  # fmt: skip


@pytest.mark.parametrize(("producer", "opset", "found"), [
    ("pytorch", 17, ["aten::hardswish"]),  # before 1.10
    ("tf2onnx", 17, ["aten::hardswish"]),
    ("pytorch 2.13.0", 17, ["aten::add.Scalar", "aten::hardtanh", "aten::div.Scalar", "aten::mul.Tensor"]),
])  # fmt: skip
def test_what_pytorch_would_have_written_as_one_node_is_the_codes_own(
    tmp_path: Path, producer: str, opset: int, found: list[str]
) -> None:
    """`x * F.relu6(x + 3) / 6`: nn.Hardswish is a HardSwish node in files of PyTorch 2."""
    nodes = [
        node("Add", ["x", "three"], ["a"]), node("Clip", ["a", "zero", "six"], ["c"]),
        node("Div", ["c", "six"], ["d"]), node("Mul", ["x", "d"], ["y"]),
    ]  # fmt: skip
    tensors = [scalar(n, v) for n, v in {"three": 3.0, "zero": 0.0, "six": 6.0}.items()]
    proto = model(nodes, [value("x", [2, 6, 8])], ["y"], tensors, producer, opset)
    assert [target.replace(".Tensor", "").replace(".Scalar", "") for target in targets(bound(proto, tmp_path))] == [
        target.replace(".Tensor", "").replace(".Scalar", "") for target in found
    ]


@pytest.mark.parametrize("corrected", [False, True])
def test_a_variance_of_the_torchscript_exporter(tmp_path: Path, corrected: bool) -> None:
    nodes = [
        node("ReduceMean", ["x"], ["mean"], axes=[-1]),
        node("Sub", ["x", "mean"], ["c"]),
        node("Mul", ["c", "c"], ["sq"]),
        node("ReduceMean", ["sq"], ["var"], axes=[-1], keepdims=0),
    ]
    if corrected:
        nodes += [node("Mul", ["var", "n"], ["times"]), node("Div", ["times", "less"], ["y"])]
    proto = model(
        nodes, [value("x", [2, 6, 8])], [nodes[-1].output[0]], [scalar("n", 8.0), scalar("less", 7.0)], "pytorch 2.13.0"
    )
    (op,) = bound(proto, tmp_path).ops
    assert (op.target, op.args) == ("aten::var.dim", (Ref("x"), (-1,), corrected, False))


def test_layer_norm_chain_and_rsqrt(tmp_path: Path) -> None:
    nodes = [
        node("ReduceMean", ["x"], ["mean"], axes=[-1]),
        node("Sub", ["x", "mean"], ["c"]),
        node("Pow", ["c", "two"], ["sq"]),
        node("ReduceMean", ["sq"], ["var"], axes=[-1]),
        node("Add", ["var", "eps"], ["ve"]),
        node("Sqrt", ["ve"], ["std"]),
        node("Div", ["c", "std"], ["n"]),
        node("Mul", ["n", "ln.weight"], ["nw"]),
        node("Add", ["nw", "ln.bias"], ["z"]),
        node("Sqrt", ["z"], ["r"]),
        node("Div", ["one", "r"], ["y"]),
    ]
    tensors = [
        scalar("two", 2.0),
        scalar("eps", 1e-5),
        scalar("one", 1.0),
        weight("ln.weight", 8),
        weight("ln.bias", 8),
    ]
    graph = run(tmp_path, nodes, tensors)
    assert targets(graph) == ["aten::layer_norm", "aten::rsqrt"]
    assert graph.ops[0].args[:4] == (Ref("x"), (8,), Ref("ln.weight"), Ref("ln.bias"))


def test_chunk_and_roll(tmp_path: Path) -> None:
    def slice_(source: str, out: str, start: str, end: str, axis: str) -> object:
        return node("Slice", [source, start, end, axis], [out], name=f"/b/{out}")

    nodes = [
        slice_("x", "a", "n0", "n4", "n2"), slice_("x", "b", "n4", "n8", "n2"), node("Add", ["a", "b"], ["s"]),
        slice_("s", "r1", "n3", "n9", "n1"), slice_("s", "r0", "n0", "n3", "n1"),
        node("Concat", ["r1", "r0"], ["t"], axis=1),
        slice_("t", "u1", "n1", "n9", "n2"), slice_("t", "u0", "n0", "n1", "n2"),
        node("Concat", ["u1", "u0"], ["y"], axis=2),
    ]  # fmt: skip
    tensors = [ints(f"n{i}", i) for i in (0, 1, 2, 3, 4, 8)] + [ints("n9", 2**62)]
    graph = run(tmp_path, nodes, tensors)
    assert targets(graph) == ["aten::chunk", "aten::add.Tensor", "aten::roll"]
    assert graph.ops[0].outputs == ("a", "b")
    assert graph.ops[2].args[1:] == ((-3, -1), (1, 2))


def test_stochastic_depth(tmp_path: Path) -> None:
    nodes = [
        node("ConstantOfShape", ["size"], ["like"]),
        node("RandomUniformLike", ["like"], ["r"], dtype=1),
        node("Less", ["r", "p"], ["l"]),
        node("Cast", ["l"], ["c"], to=1),
        node("Div", ["c", "p"], ["noise"]),
        node("Mul", ["x", "noise"], ["y"]),
    ]
    graph = run(tmp_path, nodes, [ints("size", 2, 1, 1), scalar("p", 0.9)])
    assert targets(graph) == [
        "aten::empty.memory_format",
        "aten::bernoulli_.float",
        "aten::div_.Tensor",
        "aten::mul.Tensor",
    ]


def test_module_paths_from_node_names(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], ["a"], name="/layer1/layer1.0/relu/Relu"),
        node("Tanh", ["a"], ["b"], name="/layer1/layer1.0/Tanh"),
        node("Relu", ["b"], ["c"], name="/layer1/layer1.0/relu_1/Relu"),
        node("Exp", ["c"], ["y"], name="/encoder/block.3/Exp"),
    ]
    graph = run(tmp_path, nodes, [])
    assert [op.modules[-1] for op in graph.ops] == [
        Frame("layer1.0.relu"), Frame("layer1.0"), Frame("layer1.0.relu", "", 1), Frame("encoder.block.3"),
    ]  # fmt: skip


def test_unknown_operators_keep_their_names_and_sizes(tmp_path: Path) -> None:
    graph = run(tmp_path, [node("Hardmax", ["x"], ["y"])], [])
    assert targets(graph) == ["onnx::Hardmax"]
    assert graph.values["y"].shape == (2, 6, 8)
    assert [n.code for n in graph.notes] == ["SM257"]


def test_batch_norm_is_folded_where_a_bias_has_no_module(tmp_path: Path) -> None:
    """As torch.onnx.export(dynamo=False) writes a model in evaluation mode: new names, `onnx::Conv_35`."""

    def convs(*biases: str, norm: bool = False) -> Graph:
        nodes: list[object] = []
        source = "x"
        for i, bias in enumerate(biases):
            nodes.append(node("Conv", [source, f"m.{i}.weight", bias], [f"h{i}"], name=f"/m/m.{i}/Conv"))
            source = f"h{i}"
        tensors = [t for i, b in enumerate(biases) for t in (weight(f"m.{i}.weight", 8, 8, 1, 1), weight(b, 8))]
        if norm:  # before an activation, as in DenseNet: nothing to fold it into
            keys = ("weight", "bias", "running_mean", "running_var")
            nodes.append(node("BatchNormalization", [source, *(f"n.{k}" for k in keys)], ["y"], training_mode=0))
            tensors += [weight(f"n.{k}", 8) for k in keys]
        return run(tmp_path, nodes, tensors, (1, 8, 4, 4))

    def warned(graph: Graph) -> list[int]:
        return [note.count for note in graph.notes if note.code == "SM261"]

    assert warned(convs("onnx::Conv_34", "onnx::Conv_37")) == [2]
    assert warned(convs("m.0.bias", "213", norm=True)) == [1]
    assert warned(convs("m.0.bias", "m.1.bias", "m.2.bias")) == []
    assert warned(convs("bias", "shift", "b")) == []  # of the module that is the model


def test_without_names_of_modules_a_folded_batch_norm_is_suspected(tmp_path: Path) -> None:
    def convs(names: list[str]) -> Graph:
        nodes: list[object] = []
        source = "x"
        for i, name in enumerate(names):
            nodes.append(node("Conv", [source, f"{i * 2}", f"{i * 2 + 1}"], [f"h{i}"], name=f"/{name}/Conv"))
            after = f"m.{i * 2 + 1}" if name.startswith("m.") else "act"
            nodes.append(node("Relu", [f"h{i}"], [f"r{i}"], name=f"/{after}/Relu"))
            source = f"r{i}"
        tensors = [t for i in range(len(names)) for t in (weight(f"{i * 2}", 8, 8, 1, 1), weight(f"{i * 2 + 1}", 8))]
        return run(tmp_path, nodes, tensors, (1, 8, 4, 4))

    assert [(n.code, n.count) for n in convs(["conv1", "conv2", "conv3"]).notes] == [("SM261", 3)]
    assert not convs(["m.0", "m.2", "m.4"]).notes
    assert not convs(["conv1", "conv2"]).notes


def blocks(tmp_path: Path, parts: str, count: int = 10, plain: int = 1, norm: int = 0) -> Graph:
    """A network of convolutions with a bias, each in a block with an activation; `plain` more without a bias, and
    `norm` batch norms. `parts` are the names of both in a block, in which `{}` is the block's number."""
    nodes: list[object] = []
    tensors, source = [], "x"
    for i in range(count + plain):
        conv, act = (name.format(i) for name in parts.split())
        inputs = [f"{conv}.weight", *([f"{conv}.bias"] if i < count else [])]
        scope, act_scope = ("/" + "/".join(name.split(".")) for name in (conv, act))
        nodes.append(node("Conv", [source, *inputs], [f"h{i}"], name=f"{scope}/Conv"))
        source = f"h{i}"
        if i < norm:
            keys = [f"b.{i}.norm.{k}" for k in ("weight", "bias", "running_mean", "running_var")]
            nodes.append(node("BatchNormalization", [source, *keys], [f"n{i}"], name=f"/b/{i}/norm/BatchNormalization"))
            tensors += [weight(key, 8) for key in keys]
            source = f"n{i}"
        nodes.append(node("Relu", [source], [f"r{i}"], name=f"{act_scope}/Relu"))
        source = f"r{i}"
        tensors += [weight(f"{conv}.weight", 8, 8, 1, 1), *([weight(f"{conv}.bias", 8)] if i < count else [])]
    return run(tmp_path, nodes, tensors, (1, 8, 16, 16))


@pytest.mark.parametrize(
    ("parts", "words", "folded"),
    [
        ("b.{}.conv b.{}.act", {}, 10),  # a detector after fuse(); a last convolution has no bias
        ("b.{}.conv b.{}.act", {"count": 20, "norm": 1}, 19),  # one norm could not be folded
        ("b.{}.conv b.{}.act", {"count": 4, "plain": 6}, 0),  # few
        ("b.{}.conv b.{}.act", {"count": 20, "norm": 10}, 0),  # norms are there: the others never had one
        ("b.{}.0 b.{}.1", {}, 0),  # numbered: there is no place for a norm
        ("b.conv{0} b.act{0}", {}, 0),  # one after the other in one module, as without norms
        ("b.{}.squeeze b.{}.squeeze_activation", {}, 0),
    ],
)
def test_blocks_that_lost_their_norm_are_counted(
    parts: str, words: dict[str, int], folded: int, tmp_path: Path
) -> None:
    """Where code folds its norms before the export, the tensors keep the names of modules."""
    counts = [note.count for note in blocks(tmp_path, parts, **words).notes if note.code == "SM261"]
    assert counts == ([folded] if folded else [])


def test_the_band_has_the_norms_that_may_be_missing(tmp_path: Path) -> None:
    blocks(tmp_path, "b.{}.conv b.{}.act")
    (path,) = tmp_path.glob("*.onnx")
    report, unfolded = (staticmem.analyze(path, optimizer="sgd", unfold_batchnorm=there) for there in (False, True))
    assert report.peak.live_bytes < unfolded.peak.live_bytes <= report.peak.bands["live"].high
    assert "SM261" in [note.code for note in report.warnings]


def test_a_parameter_of_the_model_itself_is_no_layer(tmp_path: Path) -> None:
    """`softmax(x @ memory.T) @ memory`: the parameter keeps its sizes, though a product reads it as it is."""
    nodes = [
        node("Transpose", ["memory"], ["t"], perm=[1, 0]),
        node("MatMul", ["x", "t"], ["s"]),
        node("MatMul", ["s", "memory"], ["y"]),
    ]
    graph = bound(model(nodes, [value("x", [4, 8])], ["y"], [weight("memory", 30, 8)]), tmp_path)
    assert [p.value.shape for p in graph.parameters] == [(30, 8)]
    assert targets(graph)[-1] == "aten::matmul"


@pytest.mark.parametrize(
    ("slope", "target"),
    [((1,), "aten::prelu"), ((4, 1), "aten::prelu"), ((5,), "aten::_prelu_kernel"), ((3, 1, 1), "aten::_prelu_kernel")],
)
def test_slopes_of_prelu_broadcast_from_the_last_axis(tmp_path: Path, slope: tuple[int, ...], target: str) -> None:
    proto = model([node("PRelu", ["x", "s"], ["y"])], [value("x", [3, 4, 5])], ["y"], [weight("s", *slope)])
    assert targets(bound(proto, tmp_path)) == [target]
    assert staticmem.analyze(str(tmp_path / "model.onnx"), optimizer="sgd").model.outputs[0].shape == (3, 4, 5)


def slices(order: tuple[int, ...], shared: bool) -> tuple[list[object], list[object]]:
    """Thirds of the last axis, read one by one in this order; `shared`: a slice ends at the tensor the next starts at,
    as PyTorch writes `chunk`."""
    nodes: list[object] = []
    tensors: list[object] = [ints("axes", -1)]
    for part in order:
        start, end = (f"at{part}", f"at{part + 1}") if shared else (f"start{part}", f"end{part}")
        tensors += [ints(name, at) for name, at in ((start, part * 4), (end, part * 4 + 4))]
        nodes.append(node("Slice", ["x", start, end, "axes"], [f"s{part}"], name=f"/Slice_{part}"))
        nodes.append(node("Relu", [f"s{part}"], [f"r{part}"], name=f"/Relu_{part}"))
    unique = {tensor.name: tensor for tensor in tensors}  # type: ignore[attr-defined]
    return [*nodes, node("Sum", ["r0", "r1", "r2"], ["y"])], list(unique.values())


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_slices_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    """The chunk stood where slice 0 did, after the op that read another slice first."""
    graph = run(tmp_path, *slices(order, shared=False), shape=(2, 6, 12))
    assert [op.target for op in graph.ops[:2]] == ["aten::slice.Tensor", "aten::relu"]
    chunked = run(tmp_path, *slices(order, shared=True), shape=(2, 6, 12))
    assert [op.target for op in chunked.ops[:2]] == ["aten::chunk", "aten::relu"]
    assert chunked.ops[0].outputs == ("s0", "s1", "s2")
    assert staticmem.analyze(str(tmp_path / "model.onnx"), optimizer="sgd").peak.live_bytes


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "MatMul with a bias"])
def test_a_product_with_a_stored_tensor_that_is_no_parameter(kind: str, tmp_path: Path) -> None:
    """The tensor stays [in, out] as it is stored: no Linear turned it."""
    table = onnx.helper.make_tensor("t", TensorProto.FLOAT, [8, 4], [0.5] * 32)
    nodes = [
        node("MatMul", ["x", "fc.weight"], ["h"]),
        node("Constant", [], ["table"], value=table),
        node("Gemm" if kind == "Gemm" else "MatMul", ["h", "table"], ["y"]),
    ]
    if kind == "MatMul with a bias":
        nodes.append(node("Add", ["y", "bias"], ["z"]))
    proto = model(nodes, [value("x", [6, 8])], [nodes[-1].output[0]], [weight("fc.weight", 8, 8), weight("bias", 4)])
    proto.producer_name, proto.producer_version = "pytorch", "2.13.0"
    graph = bound(proto, tmp_path)
    product = "aten::mm" if kind == "Gemm" else "aten::matmul"
    assert targets(graph)[:2] == ["aten::matmul", product]
    assert [buffer.value.shape for buffer in graph.buffers] == [(8, 4)]
    for optimizer in (None, "adam"):
        assert staticmem.analyze(str(tmp_path / "model.onnx"), optimizer=optimizer).peak.live_bytes
