"""The model of a reading and what staticmem predicts for it, for `compare_readings.py`."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "models")]

import staticmem  # noqa: E402 - from this checkout
from staticmem.frontends.recorded import RecordedModel  # noqa: E402
from staticmem.scenario.request import Request  # noqa: E402
from staticmem.studies import Study  # noqa: E402

FEW = (2, 4)  # layers of which peaks are predicted where a decoder has more: each further layer adds as much
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
    settings = {**reading.get("sizes", {}), **({"whole": True} if reading.get("whole") else {})}
    if "input" in reading:
        settings["input"] = "x".join(map(str, reading["input"]))
    key = "num_hidden_layers" if "model_type" in architecture else "layers"
    layers = architecture[key]
    if reading.get("whole"):  # the peak moves to another moment with the number of layers
        return name, settings, _bands(_analyzed(architecture, reading, words))
    few, more = (_analyzed({**architecture, key: k}, reading, words) for k in FEW)
    return name, settings, _grown(few, more, layers)


def _grown(few: staticmem.Report, more: staticmem.Report, layers: int) -> Bands:
    """The meters of a decoder with `layers` layers. Each phase grows by itself, because the peak may be in another one
    than with few layers; what a meter and the ends of its band have beside live tensors grows as the peak's."""
    first, second = FEW

    def at(a: int, b: int) -> int:
        return a + (b - a) * (layers - first) // (second - first)

    phases = zip(_phases(few), _phases(more), strict=True)
    live = max(at(p, q) for p, q in phases)
    grown: Bands = {}
    for meter, (value, low, high) in _bands(more).items():
        of_few = _bands(few)[meter]
        ends = [
            live + at(a - few.peak.live_bytes, b - more.peak.live_bytes)
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


def _analyzed(architecture: dict[str, Any], reading: dict[str, Any], words: dict[str, Any]) -> staticmem.Report:
    """What `staticmem.analyze` says of an architecture, of which only the mode that is asked for is recorded."""
    recorded = _recorded(json.dumps([architecture, reading.get("input")]), words["mode"] == "train", "amp" in words)
    return Study(recorded, Request(**words)).report


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
