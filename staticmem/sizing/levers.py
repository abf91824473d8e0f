"""What would make a step smaller: each lever pulled alone, by its live peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from staticmem.analysis import Request, Study
from staticmem.errors import StaticmemError
from staticmem.parallel.facts import blocks
from staticmem.sizing.bench import Ask, Bench
from staticmem.sizing.model import Lever


def block_class(study: Study) -> str | None:
    """The class of the modules that a model repeats, as `--checkpoint` takes it; None where it repeats nothing."""
    graph = study.result.graph
    numel = {p.fqn: p.value.numel for p in graph.parameters if p.alias_of is None}
    paths = blocks(graph, numel)
    if not paths:
        return None
    for op in graph.ops:
        for frame in op.modules:
            if frame.path == paths[0]:
                return frame.cls.rpartition(".")[2] or None
    return None


def levers(bench: Bench, request: Request, blocks: str | None) -> tuple[Lever, ...]:
    """The levers that save something, the largest saving first."""
    now = bench.live(Ask(request))
    found = []
    for what, flags, words in _tried(bench.study, request, blocks):
        try:
            live = bench.live(Ask(replace(request, **words)))
        except StaticmemError:
            continue  # it does not go with the rest of the request
        if live < now:
            found.append(Lever(what, flags, live, now - live))
    return tuple(sorted(found, key=lambda lever: (-lever.saved_bytes, lever.what)))


def _tried(study: Study, request: Request, blocks: str | None) -> list[tuple[str, str, dict[str, Any]]]:
    scenario = study.scenario
    batch = study.report.scenario.batch
    tried: list[tuple[str, str, dict[str, Any]]] = []
    if scenario.amp is None and scenario.dtype is None:
        tried.append(("autocast to bfloat16", "--amp bf16", {"amp": "bf16"}))
    if scenario.dtype is None:
        tried.append(("the whole model in bfloat16", "--dtype bf16", {"dtype": "bf16", "amp": None}))
    if not scenario.training:
        return tried
    if blocks is not None and not request.checkpoint and not request.checkpoint_segments:
        what = f"activation checkpointing of every {blocks}"
        tried.append((what, f"--checkpoint {blocks}", {"checkpoint": (blocks,)}))
    if batch is not None and batch > 1 and batch % 2 == 0 and request.accumulate == 1:
        flags = f"--batch {batch // 2} --accumulate 2"
        tried.append((f"two micro-batches of {batch // 2}", flags, {"batch": batch // 2, "accumulate": 2}))
    if scenario.optimizer in ("sgd", "adam", "adamw", "adagrad") and request.optimizer_impl == "foreach":
        tried.append(("the fused optimizer", "--optimizer-impl fused", {"optimizer_impl": "fused"}))
    if scenario.optimizer in ("adam", "adamw"):
        name = f"{scenario.optimizer}-8bit"
        tried.append(("8-bit optimizer state", f"--optimizer {name}", {"optimizer": name, "optimizer_impl": "foreach"}))
    if scenario.optimizer is not None:
        tried.append(("optimizer state on the CPU", "--offload-optimizer", {"offload_optimizer": True}))
    return tried
