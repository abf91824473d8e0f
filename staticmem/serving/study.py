"""From a model's config and a request to the report of a serving engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from staticmem.config.lengths import numbers_of
from staticmem.devices import gpus
from staticmem.devices.gpus import BEFORE_AMPERE, Gpu
from staticmem.errors import ModelFileError, UsageError
from staticmem.frontends.architectures import architecture_of, read_config
from staticmem.ir import dtypes
from staticmem.ir.record import record
from staticmem.report.model import Band, NoteInfo
from staticmem.scenario.kinds import read_keywords
from staticmem.scenario.options import checked_choice
from staticmem.scenario.precision import precision
from staticmem.scenario.request import OPTIONS, SERVE, Request, as_flags, request_of
from staticmem.scenario.strategies import STRATEGIES
from staticmem.serving import report
from staticmem.serving.decoder import Decoder, decoder_of
from staticmem.serving.engine import MEASURED_ON, OTHER_END, Asked, Engine
from staticmem.serving.rules import Rules, rules_of
from staticmem.units import Band as Bounds
from staticmem.units import format_bytes

DEFAULT_ENGINE = "vllm"
AUTO = "auto"
# options of a request that an engine has; all others are of a step of PyTorch
TAKEN = ("mode", "gpu", "gpus_file", "dtype", "parallel", "devices")
MOST_RANKS = 8  # of one machine
WAYS = TENSOR, PIPELINE = ("tp", "pp")  # in which ranks share a model
TOO_OLD = ("sm_60", "sm_61")  # CMakeLists.txt of vLLM, CUDA_SUPPORTED_ARCHS


def takes(name: str) -> bool:
    """Whether an option says something to an engine."""
    return name in TAKEN or OPTIONS[name].table == "serve"


def serve(model: str | os.PathLike[str], gpu: str, **options: Any) -> report.ServeReport:
    """What a serving engine holds on a card with a model, and whether it starts.

    Args:
        model: the config.json of a model of transformers, a folder that has it, or hf:OWNER/NAME.
        gpu: a card by name or size.
        options: those of `--mode serve` (docs/how-to/serve.md): engine, utilization, max_len, max_seqs,
            max_batched_tokens, kv_dtype, load_as, enforce_eager, lengths, dtype, parallel (tp or pp), devices,
            gpus_file.

    Returns:
        The report; all figures in bytes, of one rank.

    Raises:
        StaticmemError: the model, the engine or an option is not covered; the message says what to do.
    """
    asked = request_of(read_keywords("serve", {**options, "gpu": gpu, "mode": SERVE}))
    return serve_report(os.fspath(model), asked)


def serve_report(path: str, request: Request) -> report.ServeReport:
    """The report of an engine that a request describes.

    Raises:
        UsageError: no card, an unknown engine, or an option that does not apply to one (SM602).
        ModelFileError: no config of a decoder that is covered (SM601).
    """
    if request.gpu is None:
        why = "How much memory an engine takes depends on the card."
        raise UsageError("no card to serve on", why, "Add --gpu h100.", "SM602")
    card = gpus.find(request.gpu, file=request.gpus_file)
    if not is_covered(card):
        why = "Read were the rules for cards of NVIDIA from Volta on, with memory that is theirs alone."
        raise UsageError(f"an engine on {card.name} is not covered", why, "Example: --gpu h100", "SM602")
    if card.architecture in BEFORE_AMPERE and precision("dtype", request.dtype) is dtypes.bfloat16:
        why = "The engine takes bfloat16 from compute capability 8.0 on, and float16 by itself before."
        raise UsageError(f"--dtype bf16 on {card.name}", why, "Use --dtype fp16, or leave it out.", "SM602")
    return _report(path, served(path, request), card)


def is_covered(card: Gpu) -> bool:
    """Whether the rules are for a card: the engine's wheel begins with compute capability 7.0."""
    return card.vendor == "NVIDIA" and not card.unified and card.chip not in TOO_OLD


@record(frozen=True)
class Served:
    """A decoder, the rules of the engine that serves it, and what was asked."""

    decoder: Decoder
    rules: Rules
    request: Request

    def on(self, card: Gpu, **others: Any) -> Engine:
        """The engine on a card. `others` are options that hold in place of those that were asked."""
        asked = _asked(replace(self.request, **others), self.decoder, card, self.rules)
        return Engine(self.decoder, card, self.rules, asked)


def served(path: str, request: Request) -> Served:
    """What a request asks to serve.

    Raises as `serve_report`.
    """
    _check(request)
    rules = rules_of(request.engine or DEFAULT_ENGINE)
    loads_as = "" if request.load_as == AUTO else request.load_as
    decoder = decoder_of(_content(path), path, rules.data, precision("dtype", request.dtype), loads_as)
    return Served(decoder, rules, request)


def _check(request: Request) -> None:
    given = [one for name, one in OPTIONS.items() if getattr(request, name) not in (one.default, None, {}, ())]
    others = [one.spelt for one in given if not takes(one.name)]
    if others:
        what = f"{', '.join(others)} {'does' if len(others) == 1 else 'do'} not apply to a serving engine"
        why = "It is an option of a step of PyTorch, which an engine does not run."
        raise UsageError(what, why, "Leave it out; 'staticmem analyze --help' lists the engine's.", "SM602")
    for name in ("kv_dtype", "load_as"):
        checked_choice(OPTIONS[name].flag.removeprefix("--"), getattr(request, name), OPTIONS[name].choices)
    if request.utilization is not None and not 0 < request.utilization <= 1:
        why = "It is a share of the card, more than 0 and at most 1."
        raise UsageError(f"--utilization {request.utilization:g}", why, "Example: --utilization 0.9", "SM602")
    parallel = STRATEGIES[request.parallel].room if request.parallel is not None else None
    if parallel not in (None, "tensor", "pipeline"):
        why = "Covered are shared layers, and stages of layers; data and expert parallelism are not."
        raise UsageError(f"--parallel {request.parallel} of an engine", why, "Use --parallel tp or pp.", "SM602")
    if (request.devices or 1) > 1 and parallel is None:
        why = "Ranks have parts of each layer, or some of the layers."
        raise UsageError("--devices without --parallel", why, "Add --parallel tp, or --parallel pp.", "SM602")
    if parallel is not None and (request.devices or 1) < 2:
        why = "It divides a model over at least two."
        raise UsageError(f"--parallel {request.parallel} of one card", why, "Add --devices 2.", "SM602")


def _content(path: str) -> dict[str, Any]:
    """The config of a model, as it is written: how weights are packed is read from it."""
    architecture = architecture_of(path)
    if architecture is None or architecture.package != "transformers":
        if not os.path.exists(path):
            raise ModelFileError(f"{path} does not exist", "There is no such file.", "Check the path.", "SM145")
        what, why = f"{path} is no config of a model", "An engine builds a model from its config, and reads no graph."
        raise ModelFileError(what, why, "Give a config.json, a folder that has one, or hf:OWNER/NAME.", "SM601")
    if architecture.options:
        what, why = f"options of {path}", "They say how transformers builds a model, and an engine builds its own."
        raise UsageError(what, why, "Leave them out; --dtype has the type.", "SM602")
    if not architecture.revision:
        return read_config(architecture.name)
    from staticmem.recording import hub  # late: most configs are files

    return hub.config_of_repository(architecture)


def _asked(request: Request, decoder: Decoder, card: Gpu, rules: Rules) -> Asked:
    tokens, sequences = rules.defaults(card)
    length = request.max_len or decoder.usual
    sequences = request.max_seqs or sequences
    # EngineArgs._set_default_max_num_seqs_and_batched_tokens_args, vllm/engine/arg_utils.py
    batched = request.max_batched_tokens or min(sequences * length, tokens)
    if request.max_seqs is None:
        sequences = min(sequences, batched)
    ranks = request.devices or 1
    shared = request.parallel is not None and STRATEGIES[request.parallel].room == "tensor"
    return Asked(
        rules.data["utilization"] if request.utilization is None else request.utilization,
        length,
        sequences,
        batched,
        (decoder.kv_item or decoder.dtype.itemsize) if request.kv_dtype == AUTO else 1,
        request.enforce_eager,
        ranks if shared else 1,
        1 if shared else ranks,
    )


def _report(path: str, question: Served, card: Gpu) -> report.ServeReport:
    engine, request = question.on(card), question.request
    decoder, asked, rules = engine.decoder, engine.asked, engine.rules
    model = report.ServeModel(path, decoder.kind, decoder.dtype.name, decoder.packed.title, decoder.layers)
    scenario = report.ServeScenario(
        rules.data["title"],
        rules.version,
        rules.data["read"],
        engine.card.name,
        asked.tensor,
        asked.pipeline,
        asked.utilization,
        asked.length,
        asked.sequences,
        asked.batched,
        "fp8" if asked.item == 1 else decoder.dtype.name,
        request.load_as,
        asked.eager,
        request.lengths or "",
    )
    stages = tuple(
        report.ServeStage(
            rank * asked.tensor,
            stage.share.last - stage.share.first,
            stage.weights.expected,
            stage.activation.expected,
            max(stage.left.expected, 0),
            stage.blocks.expected,
        )
        for rank, stage in enumerate(engine.stages)
    )
    notes = list(_notes(engine))
    return report.ServeReport(
        report.SCHEMA,
        model,
        scenario,
        _serve(question, engine),
        stages,
        _sources(engine),
        tuple(NoteInfo(code, text, 1) for kind, code, text in notes if kind == "assumption"),
        tuple(NoteInfo(code, text, 1) for kind, code, text in notes if kind == "warning"),
    )


def _serve(question: Served, engine: Engine) -> report.Serve:
    stage, refusal, lengths = engine.fewest, engine.refusal(), question.request.lengths
    fitting: tuple[float | None, int | None] = (None, None)
    if lengths is not None:
        drawn = numbers_of(lengths, most=engine.asked.length)
        fitting = engine.cache.at_once(engine.blocks.expected, drawn, engine.asked.batched, engine.asked.sequences)
    ends = {engine.refusal("low") is None, engine.refusal("high") is None}
    left = Bounds(*(max(nbytes, 0) for nbytes in stage.left))
    bands = (stage.weights, stage.activation, stage.outside, stage.graphs, engine.at_start, left, engine.tokens)
    parts = zip((*report.PARTS, "kv_cache_tokens"), bands, strict=True)
    return report.Serve(
        engine.stages.index(stage) * engine.asked.tensor,
        engine.requested,
        stage.weights.expected,
        stage.activation.expected,
        stage.outside.expected,
        stage.graphs.expected,
        engine.at_start.expected,
        left.expected,
        engine.blocks.expected,
        engine.tokens.expected,
        stage.block,
        round(engine.concurrency, 2),
        *fitting,
        stage.phase.value,
        refusal is None,
        len(ends) == 1,
        refusal.message if refusal is not None else "",
        refusal.missing if refusal is not None else 0,
        _change(question, engine) if refusal is not None else "",
        engine.largest_length(),
        engine.largest_sequences(),
        {name: Band(band.low, band.high) for name, band in parts},
    )


def _change(asked: Served, engine: Engine) -> str:
    """The first change with which an engine starts."""
    ways = (options for options in changes(engine) if asked.on(engine.card, **options).refusal() is None)
    return next((as_flags(options) for options in ways), "")


def changes(engine: Engine, at: str = "expected", requests: int | None = None) -> Iterator[dict[str, Any]]:
    """What may be changed of an engine, in the order: requests shorter, fewer, more of the card, fewer tokens of a
    step, no compiler, more cards. Sizes are those with which it starts `at` an end of its bands, and holds so many
    `requests` at once."""
    asked = engine.asked
    longest = engine.largest_length(at, requests or 1)
    if 0 < longest < asked.length:
        yield {"max_len": longest}
    if asked.sequences > asked.batched:
        yield {"max_seqs": asked.batched}
    fewer = engine.largest_sequences(at) if requests is None else requests
    if 0 < fewer < asked.sequences:
        yield {"max_seqs": fewer}
    # in hundredths, as people write it
    beside = [getattr(band, OTHER_END[at]) for band in (engine.at_start, engine.fewest.graphs)]
    share = int(100 * (engine.card.usable - sum(beside)) / engine.card.usable) / 100
    if 0 < share < 1 and share != asked.utilization:
        yield {"utilization": share}
    tokens = max(engine.rules.fewest_tokens, asked.sequences)
    if tokens < asked.batched:
        yield {"max_batched_tokens": tokens}
    if not asked.eager:
        yield {"enforce_eager": True}
    for ranks in (2, 4, MOST_RANKS):
        if asked.pipeline == 1 and (ranks > asked.tensor or engine.decoder.heads % asked.tensor):
            yield {"parallel": TENSOR, "devices": ranks}
    for ranks in (2, 4, MOST_RANKS):
        if asked.tensor == 1 and asked.pipeline < ranks <= engine.decoder.layers:
            yield {"parallel": PIPELINE, "devices": ranks}


def enough_for(engine: Engine, requests: int) -> dict[str, Any]:
    """What an engine is asked beside its defaults so that it may run so many requests at once."""
    more = {"max_seqs": requests, "max_batched_tokens": max(engine.asked.batched, requests)}
    return more if engine.asked.sequences < requests else {}


def check_concurrency(request: Request, concurrency: int) -> None:
    """Raises:
    UsageError: the engine is to run fewer requests at once than it is to hold (SM602).
    """
    for flag, given in (("--max-seqs", request.max_seqs), ("--max-batched-tokens", request.max_batched_tokens)):
        if given is not None and given < concurrency:
            what, why = f"{flag} {given} with --concurrency {concurrency}", "The engine runs no more requests at once."
            raise UsageError(what, why, f"Leave {flag} out.", "SM602")


def _sources(engine: Engine) -> dict[str, str]:
    """Where each part is from."""
    data, kind = engine.rules.data, engine.decoder.kind
    version, file = data["read"], {**data["models"], **data["encoders"]}[kind]["file"]
    title = f"{engine.rules.data['title']} {version}"
    return {
        "weights": f"tensors of models/{file} of {title}, in blocks of PyTorch's allocator",
        "activation": f"profile_run of v1/worker/gpu_model_runner.py of {title}, replayed",
        "non_torch": f"measured, {title} on H100",
        "cuda_graph": f"measured, {title} on H100, by layers and captured sizes ({len(engine.captured)})",
        "kv_cache": f"v1/core/kv_cache_utils.py of {title}",
    }


def chip_of(card: Gpu) -> str:
    return card.chip or card.architecture


def _notes(engine: Engine) -> Iterator[tuple[str, str, str]]:
    rules, asked = engine.rules, engine.asked
    if not rules.was_read:
        text = (
            f"rules of {rules.data['title']} {rules.data['read']} stand for those of {rules.version}, whose files were "
            "not read: the bands are wider"
        )
        yield "warning", "SM603", text
    if chip_of(engine.card) != MEASURED_ON:
        text = (
            f"no engine was read on {engine.card.name}: memory outside of PyTorch and of CUDA graphs is that of an H100"
        )
        yield "warning", "SM603", f"{text}, with wider bands; the engine's own log settles it"
    if asked.eager:
        text = (
            "--enforce-eager: no reading of an engine without the compiler was at hand, the activations are a forward"
        )
        yield "assumption", "SM604", f"{text} whose layers run one by one"
    if engine.decoder.is_unread:
        text = "rules for this kind of model are read from the engine's files, and no reading of one was at hand"
        yield "assumption", "SM604", text
    if engine.decoder.experts is not None:
        text = "experts run in vLLM's Triton kernels, whose workspaces stay; other kernels have others"
        yield "assumption", "SM604", text
    total = format_bytes(engine.card.usable)
    text = f"the card shows {total} to CUDA, and nothing else runs on it; its driver decides the last 0.1 GiB"
    yield "assumption", "SM604", text
    yield "assumption", "SM604", "not counted: speculative decoding, LoRA, data and expert parallelism"
    if engine.decoder.dtype is dtypes.float32 and asked.item == dtypes.float32.itemsize:
        yield "assumption", "SM604", "float32 was asked for: by itself the engine takes bfloat16"
