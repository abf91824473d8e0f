"""DeepSpeed's ZeRO stage 3: parameters are in partitions too, and each module's are gathered when it works.

Sources, DeepSpeed 0.19: deepspeed/runtime/zero/stage3.py (`__init__`: a bucket of `reduce_bucket_size` elements and a
flat buffer for the partition's gradients from the start; `_create_fp32_partitions`: a master copy unless the model is
in fp32; `_create_fp16_sub_groups`; `_prepare_fp32_grad_for_sub_group`), partition_parameters.py (partitions are padded
to a multiple of the ranks; parameters of at most `param_persistence_threshold` elements stay whole),
partitioned_param_coordinator.py (`fetch_sub_module`, prefetch of `prefetch_bucket_size` elements while fewer than
`max_live_parameters` are there; `__params_to_release`: what is used again within `max_reuse_distance` elements stays),
runtime/comm/coalesced_collectives.py (`reduce_scatter_coalesced` copies a bucket of several gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from staticmem.eager.trace import Trace
from staticmem.ir.graph import Graph
from staticmem.parallel.facts import Weight, ceil_div
from staticmem.parallel.rewrite import AFTER, BEFORE, COMMUNICATION, END_OF_PHASE, Piece, Rewrite
from staticmem.parallel.zero import Partition, ZeroConfig, master, replace_states, update

Use = tuple[int, int, tuple[str, ...]]  # tick of the first and behind the last allocation, and the parameters


def uses(trace: Trace, graph: Graph) -> list[Use]:
    """When modules work that own parameters, and which: DeepSpeed hooks every module."""
    names = {p.value.name: p.fqn for p in graph.parameters if p.alias_of is None}
    names |= {p.value.name: names.get(p.alias_of, p.fqn) for p in graph.parameters if p.alias_of is not None}
    own: dict[str, dict[str, None]] = {}
    modules = [op.modules[-1].path if op.modules else "" for op in graph.ops]
    for op, module in zip(graph.ops, modules, strict=True):
        for ref in op.refs():
            if ref in names:
                own.setdefault(module, {}).setdefault(names[ref])
    first = dict(reversed(trace.phases)).get("forward", 0)
    found: list[Use] = []
    at = ""
    for buffer in trace.buffers:
        kernel = trace.kernels[buffer.kernel]
        if buffer.born < first or kernel.phase == "optimizer" or not 0 <= kernel.op < len(modules):
            continue
        module = modules[kernel.op]
        if found and module == at:
            found[-1] = (found[-1][0], buffer.born + 1, found[-1][2])
        elif module in own:
            found.append((buffer.born, buffer.born + 1, tuple(own[module])))
        at = module
    return found


def apply(rewrite: Rewrite, listed: list[Weight], found: Sequence[Use], ranks: int, config: ZeroConfig) -> list[str]:
    """Shards the step. `found` is what `uses` gives."""
    trained = [w for w in listed if w.trained]
    dtype = listed[0].storage.dtype
    whole = {w.name for w in listed if w.numel <= config.param_persistence_threshold}
    share = {w.name: ceil_div(w.numel, ranks) for w in listed}
    for weight in listed:
        if weight.name not in whole:
            rewrite.drop(weight.storage)
    parts = sub_groups([share[w.name] for w in trained], config.sub_group_size)
    partitions = [Partition(numel, dtype) for numel in parts]
    frozen = sum(share[w.name] for w in listed if not w.trained)
    for number, numel in enumerate([*parts, frozen] if frozen else parts):
        rewrite.add(
            f"partition {number}", "parameter", dtype.nbytes(numel), dtype, (0, BEFORE), None, "ZeRO partition",
            "this rank's part of the parameters",
        )  # fmt: skip
    _fetch(rewrite, {w.name: w for w in listed if w.name not in whole}, found, config)
    if not trained:
        return [f"ZeRO-3: a rank keeps 1/{ranks} of the parameters"]
    for part in partitions:
        if part.master is not dtype:
            master(rewrite, part, "master weights")
    replace_states(rewrite, trained, partitions)
    rewrite.add(
        "gradients of the partition", COMMUNICATION, dtype.nbytes(sum(parts)), dtype, rewrite.setup, None,
        "ZeRO gradients", "gradients of this rank's partition, kept between steps",
    )  # fmt: skip
    rewrite.add(
        "reduce bucket", COMMUNICATION, dtype.nbytes(config.reduce_bucket_size), dtype, rewrite.setup, None,
        "ZeRO bucket", f"gradients on their way to the ranks (reduce_bucket_size {config.reduce_bucket_size:,})",
    )  # fmt: skip
    _reduce(rewrite, trained, config)
    update(rewrite, trained, [(part, None) for part in partitions])
    few = f"{len(whole)} parameters of at most {config.param_persistence_threshold:,} elements stay whole"
    return [f"ZeRO-3: a rank keeps 1/{ranks} of the parameters; {few}; DeepSpeed's default sizes of buckets"]


def sub_groups(sizes: Sequence[int], limit: int) -> list[int]:
    """Elements of the groups that the optimizer updates one after the other: closed by what fills them."""
    made: list[int] = []
    filling = 0
    for size in sizes:
        filling += size
        if filling >= limit:
            made.append(filling)
            filling = 0
    return [*made, filling] if filling else made


def _fetch(rewrite: Rewrite, split: dict[str, Weight], found: Sequence[Use], config: ZeroConfig) -> None:
    """Gathered parameters from their fetch, which may be ahead of their use, to the use after which they go."""
    live: dict[str, Piece] = {}  # what is to be used again: each goes with its last use at the latest
    numel = {name: weight.numel for name, weight in split.items()}
    present = 0
    passed = [0, *accumulate(sum(numel.get(name, 0) for name in names) for _, _, names in found)]
    following_use = _next_uses(found)
    for index, (start, end, names) in enumerate(found):
        for name in names:
            if name in split and name not in live:
                live[name] = _gather(rewrite, split[name], start)
                present += numel[name]
        ahead, following = 0, index + 1
        limit = min(config.prefetch_bucket_size, config.max_live_parameters - present)
        while following < len(found) and ahead < limit:
            for name in found[following][2]:
                if name in split and name not in live:
                    live[name] = _gather(rewrite, split[name], start)
                    present += numel[name]
                    ahead += numel[name]
            following += 1
        for name in names:
            again = following_use[index].get(name)
            soon = again is not None and passed[again] - passed[index + 1] < config.max_reuse_distance
            if name in live and not soon:
                rewrite.end(live.pop(name), (end, BEFORE))
                present -= numel[name]


def _next_uses(found: Sequence[Use]) -> list[dict[str, int]]:
    """For each use and each of its parameters, which use is the next."""
    latest: dict[str, int] = {}
    made: list[dict[str, int]] = []
    for index in range(len(found) - 1, -1, -1):
        names = found[index][2]
        made.append({name: latest[name] for name in names if name in latest})
        latest.update(dict.fromkeys(names, index))
    return made[::-1]


def _gather(rewrite: Rewrite, weight: Weight, tick: int) -> Piece:
    return rewrite.add(
        weight.name, "parameter", weight.storage.nbytes, weight.storage.dtype, (tick, BEFORE), None,
        "ZeRO all-gather", "gathered for the module that works", stream=True,
    )  # fmt: skip


def _reduce(rewrite: Rewrite, trained: list[Weight], config: ZeroConfig) -> None:
    """Gradients go into the bucket as they arrive; a full bucket is copied for its reduce-scatter."""
    arriving = sorted(((g, w) for w in trained for g in w.gradients), key=lambda pair: pair[0].born)
    backward = rewrite.span("backward")
    assert backward is not None
    filled: list[int] = []

    def flush(position: tuple[int, int]) -> None:
        if len(filled) > 1:
            dtype = trained[0].storage.dtype
            copy = rewrite.add(
                "bucket, copied", COMMUNICATION, dtype.nbytes(sum(filled)), dtype, position, None, "aten.cat.default",
                "the reduce-scatter of a bucket",
            )  # fmt: skip
            rewrite.end(copy, position)
        filled.clear()

    for gradient, weight in arriving:
        at = (gradient.born[0], AFTER)
        if filled and sum(filled) + weight.numel > config.reduce_bucket_size:
            flush(at)
        rewrite.end(gradient, at)
        filled.append(weight.numel)
    flush((backward[1], END_OF_PHASE))
