"""The memory of the host: what the process of a study needs there, which decides `devices.host`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from staticmem.devices import host
from staticmem.devices.host import HostMoment, HostNeeds, Offload
from staticmem.errors import UsageError
from staticmem.frontends.architectures import architecture_of
from staticmem.report.model import Band as BandInfo
from staticmem.report.model import HostInfo
from staticmem.scenario.device import GATHERED
from staticmem.scenario.step import ON_GPU, PINNED, STREAMS
from staticmem.scenario.strategies import DEEPSPEED, facts_of
from staticmem.units import Band, ceil_div, exactly

if TYPE_CHECKING:
    from staticmem.engine.step import StepResult
    from staticmem.ir.graph import Graph
    from staticmem.ir.model_file import ModelFile
    from staticmem.liveness import Lifetimes
    from staticmem.scenario.request import Request
    from staticmem.scenario.step import Scenario


class Study(Protocol):
    """What is asked of a `studies.study.Study`, which asks this module."""

    model: ModelFile
    request: Request

    @property
    def scenario(self) -> Scenario: ...

    @property
    def graph(self) -> Graph: ...

    @property
    def result(self) -> StepResult: ...

    @property
    def lifetimes(self) -> Lifetimes: ...

    def ask(self, request: Request) -> Study: ...


def host_of(study: Study) -> HostInfo:
    """The memory of the host at its largest moment, for the rank that saves and for all ranks of a node.

    Raises:
        UsageError: the confidence is no probability above one half.
    """
    request = checked(study.request)
    needs = needs_of(study)
    first, other = host.moments(needs, request), host.moments(needs, request, saves=False)
    ranks = max(request.devices or 1, request.context_parallel or 1)
    return host_info(first, other, ranks, request.confidence)


def host_of_instants(instants: Sequence[tuple[str, Study, int, Sequence[str]]]) -> HostInfo:
    """The memory of the host at the largest of some moments, each with the step that it is of, what is on the host
    besides, and the categories that rank 0 gathers there whole."""
    first: list[HostMoment] = []
    other: list[HostMoment] = []
    for name, study, besides, gathered in instants:
        needs, options = replace(needs_of(study), own=exactly(besides)), study.request
        if gathered:
            needs, options = replace(needs, state=whole_state(study, gathered)), replace(options, saving=GATHERED)
        for saves, of_rank in ((True, first), (False, other)):
            moments = {moment.name: moment for moment in host.moments(needs, options, saves)}
            of_rank.append(moments.get(name, moments[host.IN_STEP]))
    request = checked(instants[0][1].request)
    return host_info(tuple(first), tuple(other), max(request.devices or 1, 1), request.confidence)


def checked(request: Request) -> Request:
    """Raises:
    UsageError: the confidence is no probability above one half.
    """
    if not 0.5 <= request.confidence < 1:
        why = "It is a probability: what is expected holds with 0.5."
        raise UsageError(f"--confidence {request.confidence:g} is out of range", why, "Try 0.95.", "SM446")
    return request


def host_info(first: tuple[HostMoment, ...], other: tuple[HostMoment, ...], ranks: int, confidence: float) -> HostInfo:
    """The figures of the moments of rank 0 and of the other ranks."""
    totals = [moment.total for moment in first]
    of_node = [
        Band(*(one + (ranks - 1) * more for one, more in zip(total, rest.total, strict=True)))
        for total, rest in zip(totals, other, strict=True)
    ]
    at = max(range(len(first)), key=lambda number: totals[number].expected)
    largest = max(of_node, key=lambda band: band.expected)
    node = Band(largest.low, largest.expected, max(band.high for band in of_node))
    return HostInfo(
        bytes=totals[at].expected,
        band=BandInfo(totals[at].low, max(total.high for total in totals)),
        moment=first[at].name,
        parts={name: part.expected for name, part in first[at].parts.items() if part.expected},
        mapped_bytes=max(moment.mapped for moment in first),
        pinned_bytes=max(moment.pinned for moment in first),
        processes=ranks,
        node_bytes=node.expected,
        node_band=BandInfo(node.low, node.high),
        confidence=confidence,
        limit_bytes=host.limit(node, confidence),
    )


def needs_of(study: Study) -> HostNeeds:
    """What decides the memory of the process of a step. The file of the model stands for its checkpoint."""
    request, scenario, model = study.request, study.scenario, study.graph
    base: Mapping[str, Band] = {"imports": host.IMPORTS}
    if request.preset is not None or architecture_of(study.model.path) is not None:
        base = {**base, "transformers": host.TRANSFORMERS}
    stored = [p.value.dtype.nbytes(p.value.numel) for p in model.parameters if p.alias_of is None]
    buffers = study.result.trace.buffers
    batch = [n for n, kind in zip(buffers.nbytes, buffers.categories, strict=True) if kind == "input"]
    offloads = scenario.offload_activations != ON_GPU and scenario.training
    moved = study.result.moved if offloads else 0
    needs = HostNeeds(
        base=base,
        stored=stored,
        batch=batch,
        activations=moved // 2,
        activations_pinned=scenario.offload_activations in (PINNED, STREAMS),
        state=whole_state(study) if scenario.training else 0,
        training=scenario.training and scenario.optimizer is not None,
    )
    updates = scenario.optimizer is not None and scenario.training
    if not (request.offload_parameters or (scenario.offload_optimizer and updates)):
        return needs
    trained = [p for p in model.parameters if p.trainable and p.alias_of is None]
    sizes = [p.value.dtype.nbytes(p.value.numel) for p in trained]
    if offloads:
        needs = replace(needs, activations=max(moved - 2 * sum(sizes), 0) // 2)
    return replace(needs, offload=offload_of(study, sizes, max((p.value.numel for p in trained), default=0)))


def whole_state(study: Study, kinds: Sequence[str] = ("parameter", "optimizer_state")) -> int:
    """Bytes of parameters and of the optimizer's state of the whole model, all ranks together."""
    asked = replace(
        study.request,
        offload_optimizer=False,
        parallel=None,
        devices=None,
        expert_parallel=None,
        replicas=None,
        offload_parameters=False,
    )
    one = study if asked == study.request else study.ask(replace(asked, context_parallel=None))
    last = one.lifetimes.by_category(max(one.lifetimes.ticks - 1, 0))
    return sum(last.get(kind, 0) for kind in kinds)


def offload_of(study: Study, sizes: list[int], largest: int) -> Offload:
    """The optimizer on the CPU, of one rank: DeepSpeed's, or torchao's."""
    request = study.request
    strategy, ranks = facts_of(request.parallel), request.devices or 1
    if request.offload_parameters:
        kept = [p.value.dtype.nbytes(p.value.numel) for p in study.graph.parameters if p.alias_of is None]
        states = max(whole_state(study) - sum(kept), 0) if study.scenario.training else 0
        shards, updated = ([ceil_div(size, ranks) for size in listed] for listed in (kept, sizes))
        return host.fsdp_offload(shards, updated if study.scenario.training else [], ceil_div(states, ranks))
    parameters = sum(p.value.dtype.nbytes(p.value.numel) for p in study.graph.parameters if p.alias_of is None)
    states = max(whole_state(study) - parameters, 0)
    if strategy is None or strategy.library != DEEPSPEED:
        shares = ranks if strategy is not None and strategy.divides_parameters else 1
        return host.torchao_offload([ceil_div(size, shares) for size in sizes], ceil_div(states, shares))
    total = sum(p.value.numel for p in study.graph.parameters if p.trainable and p.alias_of is None)
    itemsize = max(sum(sizes) // max(total, 1), 1)
    kinds = round(states / max(itemsize * total, 1))
    stage = 3 if strategy.divides_parameters else 2
    return host.deepspeed_offload(ceil_div(total, ranks), itemsize, largest, kinds, stage)
