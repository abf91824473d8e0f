"""Which ops of a graph `torch.compile` compiles: the whole model, or the modules that a scenario names, each for
itself.

Dynamo ends a graph at an op whose sizes, or whose branches, follow from the contents of a tensor, runs it by itself,
and begins another graph behind it.

Under DistributedDataParallel it cuts each graph where a bucket of gradients is full, so that buckets can be reduced
while the backward still runs.

Source: torch/_dynamo/config.py (`capture_dynamic_output_shape_ops`, `capture_scalar_outputs`: False), the tags
`dynamic_output_shape` and `data_dependent_output` of aten/src/ATen/native/native_functions.yaml;
torch/_dynamo/backends/distributed.py (`DDPOptimizer.compile_fn`) (PyTorch 2.15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Op, Ref, Region
from staticmem.ir.module_spans import calls_of, region_of, selected
from staticmem.ops.tags import graph_breaks
from staticmem.scenario.compiling import WHOLE
from staticmem.scenario.step import DDP_BUCKET, DDP_FIRST_BUCKET, Scenario


def compile_regions(graph: Graph, scenario: Scenario) -> tuple[Region, ...]:
    """The regions that are compiled, in order; none is inside of another.

    Raises:
        UsageError: a name that no module has.
    """
    if WHOLE in scenario.compile:
        return (Region(0, len(graph.ops), 0, ""),)
    regions: list[Region] = []
    for call in selected(calls_of(graph), scenario.compile, "--compile"):
        if not regions or call.start >= regions[-1].end:
            regions.append(region_of([call]))
    return tuple(regions)


def breaks_of(graph: Graph, region: Region) -> Iterator[int]:
    """The ops of a region at which Dynamo breaks the graph."""
    bases, breaking = graph.bases, graph_breaks()
    if breaking.isdisjoint(bases) and "aten::index" not in bases and "aten::repeat_interleave" not in bases:
        return
    for index in range(region.start, region.end):
        op = graph.ops[index]
        if op.base in breaking or _is_mask(graph, op) or _repeats_by_tensor(op):
            yield index


def _is_mask(graph: Graph, op: Op) -> bool:
    """`x[mask]`: as many elements as the mask has True."""
    if op.base != "aten::index" or len(op.args) < 2 or not isinstance(op.args[1], tuple):
        return False
    values = [graph.values.get(arg.name) for arg in op.args[1] if isinstance(arg, Ref)]
    return any(value is not None and value.dtype is dtypes.bool_ for value in values)


def _repeats_by_tensor(op: Op) -> bool:
    """`repeat_interleave(x, repeats)` with a tensor of repeats, whose sum nobody gives (`output_size`)."""
    if op.base != "aten::repeat_interleave" or op.kwargs.get("output_size") is not None:
        return False
    return op.target.endswith(".Tensor") or (len(op.args) > 1 and isinstance(op.args[1], Ref))


def ddp_cuts(graph: Graph, start: int, end: int, nbytes: Mapping[str, int], checkpoints: Sequence[Region]) -> list[int]:
    """The ops before which DDPOptimizer cuts the graph of the ops [start, end), in order.

    It goes backwards through the calls and adds up the parameters that each reads, as often as they are read; a call
    that fills the bucket is the first of its graph. Calls before the first parameter join the graph behind them. A
    checkpoint is one call. `nbytes` has the bytes of trained parameters by the names of their values, and `checkpoints`
    the outermost ones within these ops.
    """
    begin_at = {index: region.start for region in checkpoints for index in range(region.start, region.end)}
    cuts: list[int] = []
    filled, limit, index = 0, DDP_FIRST_BUCKET, end
    while index > start:
        if filled >= limit:
            cuts.append(index)
            filled, limit = 0, DDP_BUCKET
        last = index - 1
        index = max(begin_at.get(last, last), start)
        if index == last:
            filled += sum(nbytes.get(arg.name, 0) for arg in graph.ops[last].args if isinstance(arg, Ref))
        else:
            read = {name for op in graph.ops[index : last + 1] for name in op.refs()}
            filled += sum(nbytes.get(name, 0) for name in read)
    if cuts and not filled:
        cuts.pop()
    return cuts[::-1]
