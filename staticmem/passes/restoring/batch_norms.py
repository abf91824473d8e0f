"""Batch norms that an export folded into convolutions or has in evaluation form.

onnxscript's optimizer (rewriter rules FuseBatchNormIntoConv, -ConvTranspose and -Gemm) folds them in training exports
as well. The FX text stays on the node and has the normalisation's arguments; the graph signature has its parameters,
and the Conv node has the convolution's attributes.

Where the file kept no trace of them, `--unfold-batchnorm` puts them back: exporters in inference mode fold
`BatchNorm(Conv(x))` into one convolution with a bias (torch/nn/utils/fusion.py folds so). In training the norm is
there: its input is saved, its output is another tensor, its weight and bias are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Frame, Graph, Note, Op, Parameter, Ref, SourceLine, Value
from staticmem.ir.onnx_graph import Net, Node, frames
from staticmem.ir.stacks import source_lines
from staticmem.ops import kinds_of
from staticmem.ops.onnx import Context, calls_of
from staticmem.passes.restoring.fx_text import FxNode


def train_batch_norm(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """An export in eval mode that is analysed for training: `model.train()` puts every batch norm in training form.

    Where some are in training form already, the others are frozen on purpose and stay.
    """
    norms = [op for op in graph.ops if op.base == "aten::batch_norm" and len(op.args) > 5]
    if not norms or any(op.args[5] is True for op in norms):
        return graph, ()
    changed = {id(op): replace(op, args=(*op.args[:5], True, *op.args[6:])) for op in norms}
    text = "batch norms were exported in eval mode; training runs them in training form"
    trained = replace(graph, ops=tuple(changed.get(id(op), op) for op in graph.ops))
    return trained, [Note("assumption", "SM323", text, len(norms))]


def unfold_batch_norms(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """The graph with a batch norm behind every convolution with a bias whose result another op reads.

    The bias goes (a convolution before a norm has none); the norm brings weight, bias, running mean and variance of C
    elements each and a counter of 8 bytes.
    """
    owned = {p.value.name: p for p in graph.parameters}
    ops: list[Op] = []
    added: list[Parameter] = []
    buffers: list[Parameter] = []
    dropped: set[str] = set()
    for op in graph.ops:
        bias = op.args[2] if len(op.args) > 2 else op.kwargs.get("bias")
        parameter = owned.get(bias.name) if isinstance(bias, Ref) else None
        kinds = kinds_of(op.base)
        is_convolution = "convolution" in kinds and "enlarging" not in kinds  # fuse_conv_bn_eval folds few others
        if not is_convolution or parameter is None or op.outputs[0] in graph.outputs:
            ops.append(op)
            continue
        shape, dtype = parameter.value.shape, parameter.value.dtype
        plain = op.outputs[0] + "::convolution"
        path = parameter.fqn.rpartition(".")[0] + ".unfolded_norm"
        names = [f"{path}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
        of_norm = [Parameter(Value(n, dtype, shape), n, trainable=i < 2) for i, n in enumerate(names)]
        added += of_norm[:2]
        counter = f"{path}.num_batches_tracked"
        buffers += [*of_norm[2:], Parameter(Value(counter, dtypes.int64, ()), counter, trainable=False)]
        dropped.add(parameter.value.name)
        args = (*op.args[:2], None, *op.args[3:]) if len(op.args) > 2 else op.args
        kwargs = {k: v for k, v in op.kwargs.items() if k != "bias"}
        ops.append(replace(op, args=args, kwargs=kwargs, outputs=(plain,)))
        refs = tuple(Ref(n) for n in names)
        modules = (*op.modules, Frame(path, "torch.nn.modules.batchnorm.BatchNorm2d")) if op.modules else ()
        norm_args: tuple[Arg, ...] = (Ref(plain), *refs, True, 0.1, 1e-5, True)
        ops.append(Op(f"{op.name}.unfolded_norm", "aten::batch_norm", norm_args, {}, op.outputs, modules, op.source))
    if not added:
        return graph, ()
    still_read = {name for op in ops for name in op.refs()}
    gone = dropped - still_read
    text = "batch norms were put back after convolutions with a bias, whose bias they replace (--unfold-batchnorm)"
    unfolded = replace(
        graph,
        ops=tuple(ops),
        parameters=(*(p for p in graph.parameters if p.value.name not in gone), *added),
        buffers=(*graph.buffers, *buffers),
    )
    return unfolded, [Note("assumption", "SM324", text, len(added) // 2)]


_FOLDED = {"Conv": "conv.Conv{}d", "ConvTranspose": "conv.ConvTranspose{}d", "Gemm": "linear.Linear"}


def unfold(net: Net, ctx: Context, fx: FxNode, node: Node) -> tuple[list[Op], dict[str, Value]] | None:
    """The convolution (or linear layer) and the norm, and the tensors that the fold used up.

    None where the text does not say enough.
    """
    weight, output = node.inputs[1], node.outputs[0]
    value, out = net.values.get(weight), net.shape(output)
    if value is None or value.shape is None or out is None or len(out) < (2 if node.op == "Gemm" else 3):
        return None
    names = [net.aliases.get(a.name) if isinstance(a, Ref) else None for a in fx.args[1:5]]
    if any(name is None for name in names):
        return None
    path = weight.rpartition(".")[0]
    bias = f"{path}.bias"
    has_bias = bias in net.aliases.values()
    plain = replace(node, inputs=(*node.inputs[:2], *((bias,) if has_bias else ())))
    name = f"{output}::convolution"
    ctx.frames = _convolution_frames(node, path, len(value.shape) - 2)
    ops, meaning = calls_of(ctx, plain)
    if not meaning or not ops or ops[-1].outputs != (output,):
        return None
    stack = source_lines(node.stack)
    ops[-1] = replace(ops[-1], outputs=(name,), stack=_lines(stack))
    net.values[name] = Value(name, value.dtype, out)
    norm_args = (Ref(name), *(Ref(n) for n in names if n is not None), *fx.args[5:])
    ops.append(Op(fx.name, fx.target, norm_args, dict(fx.kwargs), (output,), frames(node), node.op, stack))
    added = {n: Value(n, value.dtype, (out[1],)) for n in (*names, bias if has_bias else None) if n is not None}
    return ops, added


def _lines(stack: tuple[SourceLine, ...]) -> tuple[SourceLine, ...]:
    """Lines of the convolution: the fold left those of the norm, whose caller is taken to call both."""
    return (*stack[:-1], SourceLine("torch/nn/modules/conv.py", 0, "forward", "")) if len(stack) > 1 else stack


def _convolution_frames(node: Node, path: str, dims: int) -> tuple[Frame, ...]:
    """Module calls of the convolution: those of the norm as far as they contain it."""
    around = [f for f in frames(node)[:-1] if not f.path or path.startswith(f"{f.path}.")]
    return (*around, Frame(path, f"torch.nn.modules.{_FOLDED[node.op].format(dims)}"))
