"""What `fit` is asked, what of it has no answer, and the settings of libraries for the step that was found.

No answer have no training step, no settings, and samples that cannot be shared. Settings come each with the figures of
the step as the library runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod

from staticmem.devices.gpus import Gpu
from staticmem.errors import UsageError
from staticmem.ir.graph import Graph
from staticmem.ir.module_spans import calls_of, selected
from staticmem.parallel.blocks import repeated_blocks
from staticmem.parallel.rank import on_one_device
from staticmem.report.fit import Settings
from staticmem.report.model import Report
from staticmem.report.settings import LIBRARIES, OF_OUTPUTS, OF_TARGETS, OF_THE_MODEL, Library, Modules, Run
from staticmem.report.settings.optimizers import WRITTEN
from staticmem.report.verdict import with_article
from staticmem.scenario.checkpointing import NO_CHECKPOINTS
from staticmem.scenario.combinations import FIT, check
from staticmem.scenario.request import Request, as_flags, flags_of
from staticmem.scenario.strategies import DATA_PARALLEL, DEEPSPEED, PYTORCH, STRATEGIES, facts_of, titles
from staticmem.studies import Study
from staticmem.studies.trials import options_of
from staticmem.units import MIB, format_bytes

# strategies that are tried on several devices where none is named: those of PyTorch
SHARED = tuple([name for name in DATA_PARALLEL if STRATEGIES[name].library == PYTORCH])


_OF_TRANSFORMERS = "transformers.models."  # begins the names of its classes of models


@dataclass(frozen=True)
class Options:
    """What `fit` is asked, apart from the step. The request's `devices` are there to be used, its `parallel` is a
    strategy that is taken in place of those that would be tried.

    Attributes:
        gpu: a card by name or size.
        global_batch: samples of a step of the optimizer over all devices; None: those of the request.
        allow: changes of training that may be made, of `CHANGES`.
        library: the settings of this one are needed, a key of `LIBRARIES`.
        config: settings of a config or of the environment are in the request, so that commands have to leave them out.
        progress: is called with the number of ways that were tried, and of all.
    """

    gpu: str
    global_batch: int | None = None
    allow: tuple[str, ...] = ()
    library: str | None = None
    config: bool = False
    progress: Callable[[int, int], None] = lambda done, total: None


def strategies_of(request: Request, library: str | None) -> tuple[str | None, ...]:
    """Those that are tried, that which gives up least first.

    Raises:
        UsageError: there are none.
    """
    if request.context_parallel is not None:
        instead = "or ask 'staticmem size --max-dim' for the longest sequence"
        raise _uncovered("context parallelism", "context-parallel", instead)
    if request.replicas is not None and library is not None and not LIBRARIES[library].takes_replicas:
        raise _uncovered(f"hybrid sharding in {LIBRARIES[library].title}", "replicas", "or leave -f out")
    if request.parallel is not None and request.parallel not in DATA_PARALLEL:
        why = f"Settings are written for {titles(DATA_PARALLEL)}."
        raise UsageError(
            f"fit has no settings for {STRATEGIES[request.parallel].title}",
            why,
            "Example: --parallel fsdp --devices 8",
            "SM295",
        )
    several = (request.devices or 1) > 1
    asked: tuple[str | None, ...] = SHARED if several else (None,)
    if request.parallel is not None and several:
        asked = (request.parallel,)
    if library is None:
        return asked
    able = LIBRARIES[library].strategies
    if several and request.parallel is None and not set(asked) & set(able):
        asked = able[1:]  # ZeRO-1 saves little where ZeRO-2 communicates as much
    tried = tuple(name for name in asked if name in able)
    if not tried:
        why = f"Its settings are those of {titles(able)}, on several devices."
        raise UsageError(
            f"there are no {LIBRARIES[library].title} settings for this",
            why,
            "Example: --devices 8 --parallel zero3",
            "SM295",
        )
    return tried


def replicas_of(request: Request, strategy: str, library: str | None) -> tuple[int | None, ...]:
    """Groups of the devices that have the whole model each, those that communicate least first; None: one group. They
    are tried where no strategy is named."""
    devices = request.devices or 1
    takes = STRATEGIES[strategy].shards_modules and (library is None or LIBRARIES[library].takes_replicas)
    if request.parallel is not None or not takes:
        return (request.replicas,)
    halves = [devices >> times for times in range(1, devices.bit_length())]
    return (*[count for count in halves if count > 1 and devices % count == 0], None)


def _uncovered(what: str, flag: str, instead: str) -> UsageError:
    why = f"It writes settings of libraries, and those for {what} are not covered."
    return UsageError(f"fit has no settings for {what}", why, f"Leave --{flag} out, {instead}.", "SM295")


def check_fit(study: Study, options: Options) -> None:
    """Raises:
    UsageError: nothing is trained, or options do not go together.
    """
    request = study.request
    check(FIT, request.given(global_batch=options.global_batch))
    if not study.scenario.training or request.optimizer is None:
        why = "Settings are those of a training step with an optimizer."
        raise UsageError("there is no training step to fit", why, "Name an optimizer: --optimizer adamw", "SM294")
    asked = options.library
    if asked is not None and LIBRARIES[asked].of_transformers and not _is_of_transformers(study.graph):
        why = "This model has no module of that package."
        hint = "Example: staticmem fit hf:Qwen/Qwen3-8B --optimizer adamw --gpu h100, or -f pytorch."
        raise UsageError(f"{LIBRARIES[asked].title} trains models of transformers alone", why, hint, "SM295")
    if request.optimizer not in WRITTEN:
        why = "Which parameters it has, and which another optimizer, the author of the model decides."
        hint = "'staticmem levers' says what makes the step smaller."
        raise UsageError(f"fit has no settings for {request.optimizer}", why, hint, "SM295")


def no_gpu() -> UsageError:
    """The error of a question without a card."""
    return UsageError("fit needs a GPU", "What fits depends on its memory.", "Example: --gpu rtx-4090", "SM297")


def commands(study: Study, request: Request, card: Gpu, limit: int, config: bool) -> tuple[str, str]:
    """The command that predicts a request on a card, and the one that fails where it needs more than a limit. `config`:
    there is a config, which would add to their flags."""
    options = options_of(study.model, request, card.slug) + " --no-config" * config
    return f"staticmem analyze {options}", f"staticmem check {options} --budget device={-(-limit // MIB)}MiB"


def settings_of(study: Study, request: Request, card: Gpu, options: Options) -> tuple[Settings, ...]:
    """The settings of every library that can express a request, or of one alone."""
    chosen = [options.library] if options.library is not None else list(LIBRARIES)
    is_of_transformers = _is_of_transformers(study.graph)
    able = [
        name
        for name in chosen
        if LIBRARIES[name].takes(LIBRARIES[name].as_run(request))
        and (is_of_transformers or not LIBRARIES[name].of_transformers)
    ]
    return tuple(_settings(study, request, card, name, options.config) for name in able)


def _is_of_transformers(graph: Graph) -> bool:
    """Whether modules of a model are classes of transformers."""
    return any(frame.cls.startswith(_OF_TRANSFORMERS) for op in graph.ops for frame in op.modules)


def _settings(study: Study, request: Request, card: Gpu, name: str, config: bool) -> Settings:
    library = LIBRARIES[name]
    asked = library.as_run(request)
    one = study.ask(replace(asked, gpu=card.slug))
    report = one.report
    band, fits = report.peak.bands["device"], report.gpu
    assert fits is not None
    assert report.peak.device_bytes is not None
    flags = flags_of(asked)
    analyze, check = commands(study, asked, card, band.high, config)
    graph = study.ask(on_one_device(asked)).graph
    checkpointed = _checkpointed(graph, asked)
    notes = tuple(_notes(name, library, asked, report, checkpointed))
    need = format_bytes(report.peak.device_bytes)
    heading = (
        f"Settings by 'staticmem fit' for {with_article(card.name)}, of which {format_bytes(card.usable)} are usable.",
        f"One device needs {need}, {format_bytes(band.low)} at least and {format_bytes(band.high)} at most.",
        f"Predicted by: {analyze}",
        f"As a gate: {check}",
        *notes,
    )
    run = Run(
        request=asked,
        heading=heading,
        sharded=_sharded(graph, asked),
        checkpointed=checkpointed,
        inputs=len(report.model.inputs),
        loss=_find_loss(graph, report),
        length=_find_length(report),
    )
    text = library.text(run)
    return Settings(
        name,
        library.file,
        flags,
        report.peak.live_bytes,
        band.low,
        report.peak.device_bytes,
        band.high,
        fits.fit,
        analyze,
        check,
        notes,
        text,
    )


def _find_loss(graph: Graph, report: Report) -> str:
    """What gives the loss: a function that was recorded, the model whose first output is a number, or the loop."""
    if graph.recorded is not None and graph.recorded.loss:
        return OF_OUTPUTS
    return OF_THE_MODEL if report.model.outputs[0].shape == () else OF_TARGETS


def _find_length(report: Report) -> int | None:
    """The tokens of a sample: the second size of the first input of whole numbers that has two."""
    tokens = [one.shape for one in report.model.inputs if one.dtype.startswith("int") and len(one.shape) == 2]
    return tokens[0][1] if tokens else None


def _checkpointed(graph: Graph, request: Request) -> Modules:
    """The modules that a request checkpoints one by one; none for groups and segments, which no text here sets."""
    if request.checkpoint in ((), NO_CHECKPOINTS) or request.checkpoint_every > 1 or request.checkpoint_save:
        return Modules()
    calls = selected(calls_of(graph), request.checkpoint, "--checkpoint")
    return _modules((call.path, call.cls) for call in calls)


def _is_of_deepspeed(request: Request) -> bool:
    strategy = facts_of(request.parallel)
    return strategy is not None and strategy.library == DEEPSPEED


def _sharded(graph: Graph, request: Request) -> Modules:
    """The modules that FSDP2 shards one by one."""
    strategy = facts_of(request.parallel)
    if strategy is None or not strategy.shards_modules:
        return Modules()
    paths = repeated_blocks(graph, {p.fqn: prod(p.value.shape or ()) for p in graph.parameters})
    classes = {frame.path: frame.cls for op in graph.ops for frame in op.modules}
    return _modules((path, classes.get(path, "")) for path in paths)


def _modules(listed: Iterable[tuple[str, str]]) -> Modules:
    by_path = dict(listed)
    names = {cls.rpartition(".")[2] for cls in by_path.values()}
    return Modules(tuple(by_path), names.pop() if len(names) == 1 else "")


def _notes(name: str, library: Library, request: Request, report: Report, checkpointed: Modules) -> Iterable[str]:
    """What the text does not set, and where the library differs from what is predicted."""
    unset = library.unset(request)
    if report.gpu is not None and report.gpu.fit != "fits":
        yield f"Not safe as this library runs the step ({report.gpu.fit}): fit -f {name} looks for a way that is."
    if checkpointed.paths and library.preset == "hf-trainer":
        yield (
            f"Checkpoints are predicted around {len(checkpointed.paths)} modules ({checkpointed.cls or 'by path'}); "
            f"{library.title} puts them around the layers that its models mark."
        )
    elif request.checkpoint and not checkpointed.paths and "--checkpoint" not in unset:
        unset = f"{as_flags({'checkpoint': request.checkpoint})} {unset}".rstrip()
    if unset:
        yield f"This file cannot set these, which the prediction includes: {unset}"
    if library.title == "DeepSpeed" and not request.clip_grad_norm:  # JSON has no place for it
        yield (
            "gradient_clipping 0.0 turns clipping off, as predicted: without that line DeepSpeed clips gradients at 1. "
            "--clip-grad-norm writes 1.0"
        )
    if library.title == "accelerate" and _is_of_deepspeed(request) and not request.clip_grad_norm:
        # a gradient_clipping of 0 is left out by `DeepSpeedPlugin` of accelerate/utils/dataclasses.py (1.15)
        yield "DeepSpeed clips gradients at 1, its default, which needs no memory; this file cannot turn it off."
