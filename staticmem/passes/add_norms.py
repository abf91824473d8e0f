"""Puts batch norms back behind convolutions that took them in, where the file kept no trace of them.

Exporters in inference mode fold `BatchNorm(Conv(x))` into one convolution with a bias. In training the norm is there:
its input is saved, its output is another tensor, its weight and bias are trained (torch/nn/utils/fusion.py folds so).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.ir import dtypes
from staticmem.ir.graph import Arg, Frame, Graph, Note, Op, Parameter, Ref, Value

_CONVOLUTIONS = ("aten::conv1d", "aten::conv2d", "aten::conv3d")


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
        if op.base not in _CONVOLUTIONS or parameter is None or op.outputs[0] in graph.outputs:
            ops.append(op)
            continue
        shape, dtype = parameter.value.shape, parameter.value.dtype
        plain = op.outputs[0] + "::convolution"
        path = parameter.fqn.rpartition(".")[0] + ".unfolded_norm"
        names = [f"{path}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
        made = [Parameter(Value(n, dtype, shape), n, trainable=i < 2) for i, n in enumerate(names)]
        added += made[:2]
        counter = f"{path}.num_batches_tracked"
        buffers += [*made[2:], Parameter(Value(counter, dtypes.int64, ()), counter, trainable=False)]
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
    text = "batch norms were put back behind convolutions with a bias, whose bias they replace (--unfold-batchnorm)"
    unfolded = replace(
        graph,
        ops=tuple(ops),
        parameters=(*(p for p in graph.parameters if p.value.name not in gone), *added),
        buffers=(*graph.buffers, *buffers),
    )
    return unfolded, [Note("assumption", "SM324", text, len(added) // 2)]
