"""The model of a reading and what staticmem predicts for it, for `compare_readings.py`."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

import staticmem  # noqa: E402 - from this checkout
from staticmem.allocators.peaks import outline  # noqa: E402
from staticmem.devices.meters import process_on  # noqa: E402
from staticmem.frontends.recorded import RecordedModel  # noqa: E402
from staticmem.scenario.request import Request  # noqa: E402
from staticmem.studies import Study  # noqa: E402

FEW = (2, 4)  # layers of which peaks are predicted where a decoder has more: each further layer adds as much
BETWEEN = "between steps"  # the moment of a reading that is no peak
Bands: TypeAlias = dict[str, tuple[int, int, int]]  # prediction, lower and upper end for each meter


def predictions(
    reading: dict[str, Any], document: dict[str, Any], words: dict[str, Any], folder: Path
) -> tuple[str, dict[str, Any], Bands]:
    """Name of the network, its sizes, and the meters of a reading."""
    if "architecture" not in reading:
        network, settings, model = _model_of(reading, folder)
        return network, settings, _bands(staticmem.analyze(model, **words))
    name = reading["architecture"]
    architecture = {**document["architectures"][name], **reading.get("sizes", {})}
    whole = bool(reading.get("whole"))
    settings = {**reading.get("sizes", {}), **({"whole": True} if whole else {})}
    if "input" in reading:
        settings["input"] = "x".join(map(str, reading["input"]))
    key = "num_hidden_layers" if "model_type" in architecture else "layers"
    layers = architecture[key]
    if whole:  # the peak moves to another moment with the number of layers
        study = _studied(architecture, reading, words)
        bands = _bands(study.report)
        return name, settings, _of_first_step(study, bands) if _is_first(architecture) else bands
    few, more = (_studied({**architecture, key: k}, reading, words) for k in FEW)
    grown = _grown(few.report, more.report, layers)
    if reading.get("moment") == BETWEEN:
        settings["moment"] = BETWEEN
        grown["allocated"] = _between_steps(few, more, layers)
    if "cards" in reading:
        settings["cards"] = reading["cards"]
        embedded = 2 * architecture["hidden_size"] * words["prompt"]  # on the first card, through the whole forward
        of_layers = max(_of_layers(few.report, more.report, layers) - embedded, 0)
        others = (reading["cards"] - 1) * (of_layers + _kept_workspaces(few))
        grown["allocated"] = tuple([nbytes + others for nbytes in grown["allocated"]])
    return name, settings, grown


def _line(few: int, more: int, layers: int) -> int:
    """What has two values with few layers and with more, with `layers` layers."""
    first, second = FEW
    return few + (more - few) * (layers - first) // (second - first)


def _between_steps(few: Study, more: Study, layers: int) -> tuple[int, int, int]:
    """What is allocated between two of the last steps of `generate`: the model, the cache, and the workspace of cuBLAS.
    At most it is what the step has at its peak."""
    held, peaks = [], []
    for study in (few, more):
        report = study.report
        assert report.generation is not None
        assert report.phases.decode is not None
        kept = _kept_workspaces(study)
        held.append(report.parameters.bytes + report.generation.cache_bytes + kept)
        peaks.append(report.phases.decode.peak_bytes + kept)
    expected, most = (_line(*ends, layers) for ends in (held, peaks))
    return expected, expected, most


def _of_layers(few: staticmem.Report, more: staticmem.Report, layers: int) -> int:
    """What layers need beside weights and cache where `generate` has its peak in the prompt: each card with some of
    them does, and the sum over cards of their peaks has it of each. In a decode step it is next to nothing."""
    first = [report.phases.forward.peak_bytes for report in (few, more)]
    last = [report.phases.decode.peak_bytes if report.phases.decode else 0 for report in (few, more)]
    if _line(*last, layers) >= _line(*first, layers):
        return 0
    infos = [report.generation for report in (few, more)]
    caches = [info.token_bytes * info.prompt if info is not None else 0 for info in infos]
    beside = [p - r.parameters.bytes - c for p, r, c in zip(first, (few, more), caches, strict=True)]
    return _line(*beside, layers)


def _kept_workspaces(study: Study) -> int:
    """Workspaces that stay when a step is over."""
    process = process_on(study.result, study.device)
    alive = {call for call in process.calls if call >= 0} - {~call for call in process.calls if call < 0}
    return sum(process.sizes[id] for id in alive if process.origins[id].buffer < 0)


def _grown(few: staticmem.Report, more: staticmem.Report, layers: int) -> Bands:
    """The meters of a decoder with `layers` layers. Each phase grows by itself, because the peak may be in another one
    than with few layers; what a meter and the ends of its band have beside live tensors grows as the peak's."""
    phases = zip(_phases(few), _phases(more), strict=True)
    live = max(_line(p, q, layers) for p, q in phases)
    grown: Bands = {}
    for meter, (value, low, high) in _bands(more).items():
        of_few = _bands(few)[meter]
        ends = [
            live + _line(a - few.peak.live_bytes, b - more.peak.live_bytes, layers)
            for a, b in zip(of_few, (value, low, high), strict=True)
        ]
        grown[meter] = ends[0], min(ends), max(ends)
    return grown


def _phases(report: staticmem.Report) -> list[int]:
    """The live peak of each phase of the step."""
    phases = report.phases
    named = (phases.forward, phases.backward, phases.optimizer, phases.decode)
    return [phase.peak_bytes for phase in named if phase is not None]


def _bands(report: staticmem.Report) -> Bands:
    peak = report.peak
    meters = {name: getattr(peak, f"{name}_bytes") for name in peak.bands}
    return {name: (value, peak.bands[name].low, peak.bands[name].high) for name, value in meters.items()}


def _is_first(architecture: dict[str, Any]) -> bool:
    """Whether the first step of all is asked for."""
    return bool(architecture.get("adapters", {}).get("first"))


def _of_first_step(study: Study, bands: Bands) -> Bands:
    """Allocated memory of the first step alone: the workspace of cuBLAS for the thread of the backward is not there
    before that thread multiplies, and blocks are as new."""
    process = process_on(study.result, study.device)
    end = next(mark.event for mark in process.marks if mark.step == 2)
    first, all_steps = (outline(process.calls[:last], process.sizes).peak_allocated for last in (end, None))
    low, expected, high = (nbytes + first - all_steps for nbytes in bands["allocated"])
    return {**bands, "allocated": (low, expected, high)}


def _studied(architecture: dict[str, Any], reading: dict[str, Any], words: dict[str, Any]) -> Study:
    """The study of an architecture, of which only the mode that is asked for is recorded."""
    recorded = _recorded(json.dumps([architecture, reading.get("input")]), words["mode"] == "train", "amp" in words)
    study = Study(recorded, Request(**words))
    if "packed" in architecture.get("adapters", {}):
        _loads_packed(study)
    return study


def _loads_packed(study: Study) -> None:
    """Weights of 4 bits are packed on the GPU, as those of `--quantize` are: 4 bytes of 16 bits become one."""
    trace = study.result.trace
    loaded = [buffer for buffer in trace.buffers if buffer.category == "buffer" and buffer.name.endswith(".packed")]
    trace.loading.update({buffer.id: 4 * buffer.nbytes for buffer in loaded})


@lru_cache(maxsize=8)
def _recorded(described: str, training: bool, autocast: bool) -> RecordedModel:
    """A network in training at the sizes of its input, or a decoder of transformers whose prompt is open."""
    import torch

    from staticmem.recording import record as recording

    architecture, shape = json.loads(described)
    recording.MODES = ((training, None), (training, torch.bfloat16))[: 1 + autocast]
    if "model_type" in architecture:
        import text

        network: Any = text.Logits(_of_transformers(architecture))
        document = recording.record(network, (torch.empty(2, 16, dtype=torch.int64, device="meta"),))
        return RecordedModel("<decoder>", document, "pt2")
    name, network, inputs = _network(architecture, shape)
    document = recording.record(network, inputs, as_given=True, axes=[{} for _ in inputs])
    return RecordedModel(f"<{name}>", document, "pt2")


def _of_transformers(config: dict[str, Any]) -> Any:
    """A decoder of transformers in bfloat16 and evaluation mode, from its config.json, on the meta device."""
    import torch
    import transformers

    rest = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(config["model_type"], **rest)
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()


def _network(sizes: dict[str, Any], shape: list[int]) -> tuple[str, Any, tuple[Any, ...]]:
    """Name, module and inputs, on the meta device."""
    import decoders
    import finetuned
    import torch

    if "timm" in sizes:
        import timm

        with torch.device("meta"):
            options = {"depth": sizes["layers"], "num_classes": sizes["classes"], "img_size": shape[-1]}
            return sizes["timm"], timm.create_model(sizes["timm"], **options).train(), (torch.empty(shape),)
    name = sizes.pop("network")
    return name, *(decoders if name in decoders.NETWORKS else finetuned).example(name, sizes, shape)


def _model_of(reading: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any], Any]:
    """Name, sizes and model of a reading: an export beside the file or in the repository, or a network that PyTorch
    exports now."""
    if "model" in reading:
        path = next(p for p in (folder / reading["model"], ROOT / reading["model"]) if p.exists())
        return path.stem, {}, path
    sizes = reading["sizes"]
    shown = {**sizes, "input": "x".join(map(str, reading["input"]))} if "input" in reading else sizes
    return reading["network"], shown, _exported(json.dumps([reading["network"], sizes, reading.get("input")]))


@lru_cache(maxsize=1)  # sources list a network several times in a row
def _exported(described: str) -> Any:
    """The exported program of a network of `models/`, from its name, sizes and shape of the input as JSON."""
    import layers
    import text
    import torch
    import video

    name, sizes, shape = json.loads(described)
    for module in (layers, text, video):
        if name in module.NETWORKS:
            network, inputs = module.example(name, sizes, *([] if shape is None else [shape]))
            return torch.export.export(network, inputs, strict=False)
    names = sorted({*layers.NETWORKS, *text.NETWORKS, *video.NETWORKS})
    sys.exit(f"models/ has no network '{name}'; it has {', '.join(names)}")
