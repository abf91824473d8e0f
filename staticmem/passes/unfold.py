"""BatchNorms that the exporter folded into convolutions and linear layers: their FX text stays on the node, so they can
be put back.

onnxscript's optimizer (rewriter rules FuseBatchNormIntoConv, -ConvTranspose and -Gemm) folds them in training exports
as well. The text has the
normalisation's arguments, the graph signature its parameters, and the Conv node the convolution's attributes.
"""

from __future__ import annotations

from dataclasses import replace

from staticmem.ir.graph import Frame, Op, Ref, SourceLine, Value
from staticmem.ir.onnx_graph import Net, Node, frames
from staticmem.ir.source import source_lines
from staticmem.ops import kinds_of
from staticmem.ops.onnx import table
from staticmem.ops.onnx.context import Context
from staticmem.passes import fx_text

_FOLDED = {"Conv": "conv.Conv{}d", "ConvTranspose": "conv.ConvTranspose{}d", "Gemm": "linear.Linear"}


def is_folded(fx: fx_text.FxNode, node: Node) -> bool:
    """Whether a convolution or a linear layer stands for itself and a batch norm."""
    return "batch_norm" in kinds_of(fx.target.split(".", 1)[0]) and node.op in _FOLDED and len(node.inputs) > 1


def unfold(net: Net, ctx: Context, fx: fx_text.FxNode, node: Node) -> tuple[list[Op], dict[str, Value]] | None:
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
    known = bias in net.aliases.values()
    plain = replace(node, inputs=(*node.inputs[:2], *((bias,) if known else ())))
    name = f"{output}::convolution"
    ctx.frames = _frames(node, path, len(value.shape) - 2)
    ops, meaning = table.translate(ctx, plain)
    if not meaning or not ops or ops[-1].outputs != (output,):
        return None
    stack = source_lines(node.stack)
    ops[-1] = replace(ops[-1], outputs=(name,), stack=_lines(stack))
    net.values[name] = Value(name, value.dtype, out)
    norm_args = (Ref(name), *(Ref(n) for n in names if n is not None), *fx.args[5:])
    ops.append(Op(fx.name, fx.target, norm_args, dict(fx.kwargs), (output,), frames(node), node.op, stack))
    added = {n: Value(n, value.dtype, (out[1],)) for n in (*names, bias if known else None) if n is not None}
    return ops, added


def _lines(stack: tuple[SourceLine, ...]) -> tuple[SourceLine, ...]:
    """Lines of the convolution: the fold left those of the norm, whose caller is taken to call both."""
    return (*stack[:-1], SourceLine("torch/nn/modules/conv.py", 0, "forward", "")) if len(stack) > 1 else stack


def _frames(node: Node, path: str, dims: int) -> tuple[Frame, ...]:
    """Module calls of the convolution: those of the norm as far as they contain it."""
    around = [f for f in frames(node)[:-1] if not f.path or path.startswith(f"{f.path}.")]
    return (*around, Frame(path, f"torch.nn.modules.{_FOLDED[node.op].format(dims)}"))
