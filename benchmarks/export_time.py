"""How long `staticmem export` takes beside the bare `torch.export`, as ratios of processor time in one process.

    pip install torch torchvision timm transformers
    python benchmarks/export_time.py                 # all models
    python benchmarks/export_time.py resnet18 lstm   # some
    python benchmarks/export_time.py --save FOLDER   # the recordings too, as NAME.json

Models are built on the meta device. For each, `torch.export.export` runs with fixed sizes (`bare`), then with the open
sizes of our file, which it saves (`file`: what a user runs who has no staticmem), then what `staticmem export` does:
the graph with open sizes (`graph`), and the recording of the code (`record`). Feed-forward models are marked "f".
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Made = tuple[nn.Module, tuple[Any, ...]]


def image(side: int = 224) -> tuple[torch.Tensor]:
    return (torch.empty(2, 3, side, side),)


def torchvision(name: str, side: int = 224, **settings: Any) -> Callable[[], Made]:
    def build() -> Made:
        from torchvision import models

        return models.get_model(name, weights=None, **settings), image(side)

    return build


def timm(name: str, side: int = 224) -> Callable[[], Made]:
    def build() -> Made:
        import timm as package

        return package.create_model(name), image(side)

    return build


def transformers(name: str, **config: Any) -> Callable[[], Made]:
    def build() -> Made:
        import transformers as package

        cls = getattr(package, name)
        settings = cls.config_class(use_cache=False, **config)
        return cls(settings), (torch.zeros(2, 64, dtype=torch.int64),)

    return build


class OverTime(nn.Module):
    """A cell that Python calls for each step."""

    def __init__(self, steps: int = 50) -> None:
        super().__init__()
        self.cell, self.head, self.steps = nn.GRUCell(64, 128), nn.Linear(128, 10), steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 128)
        for step in range(self.steps):
            h = self.cell(x[:, step], h)
        result: torch.Tensor = self.head(h)
        return result


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = (
            nn.Embedding(1000, 64),
            nn.LSTM(64, 128, 2, batch_first=True),
            nn.Linear(128, 10),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.lstm(self.table(tokens))[0])
        return result


class Unet(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, 1, 1), nn.GroupNorm(8, b), nn.SiLU(), nn.Conv2d(b, b, 3, 1, 1), nn.SiLU()
            )

        sizes = [width << level for level in range(depth)]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(block(a + b, a) for a, b in pairwise(sizes))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = kept.pop()
        for block in reversed(self.up):
            skip = kept.pop()
            x = block(torch.cat((functional.interpolate(x, scale_factor=2.0), skip), 1))
        result: torch.Tensor = self.head(x)
        return result


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
FEED_FORWARD: dict[str, Callable[[], Made]] = {
    "resnet18": torchvision("resnet18"),
    "resnet50": torchvision("resnet50"),
    "mobilenet_v3_small": torchvision("mobilenet_v3_small"),
    "efficientnet_b0": torchvision("efficientnet_b0"),
    "densenet121": torchvision("densenet121"),
    "vit_b_16": torchvision("vit_b_16"),
    "swin_t": torchvision("swin_t"),
    "convnext_tiny": torchvision("convnext_tiny"),
    "fcn_resnet50": torchvision("fcn_resnet50", 128, weights_backbone=None),
    "mobilevitv2_075": timm("mobilevitv2_075"),
    "regnety_002": timm("regnety_002"),
    "mixer_s16": timm("mixer_s16_224"),
    "bert": transformers("BertForMaskedLM", intermediate_size=128, **SMALL),
    "gpt2": transformers("GPT2LMHeadModel", n_embd=64, n_layer=4, n_head=4, vocab_size=1000),
    "llama": transformers("LlamaForCausalLM", intermediate_size=128, **SMALL),
    "t5_encoder": transformers(
        "T5EncoderModel", d_model=64, d_kv=16, d_ff=128, num_layers=4, num_heads=4, vocab_size=1000
    ),
    "mixtral": transformers(
        "MixtralForCausalLM", intermediate_size=128, num_key_value_heads=4, num_local_experts=4, **SMALL
    ),
    "unet": lambda: (Unet(), image(64)),
    "encoder": lambda: (Encoder(), (torch.empty(2, 16, 128),)),
}
OTHERS: dict[str, Callable[[], Made]] = {
    "lstm": lambda: (Lstm(), (torch.zeros(2, 32, dtype=torch.int64),)),
    "over_time": lambda: (OverTime(), (torch.empty(2, 50, 64),)),
}
MODELS = {**FEED_FORWARD, **OTHERS}


def seconds(call: Callable[[], Any], rounds: int = 2) -> tuple[float, Any]:
    """The least processor time of a call, and what it gave."""
    best, result = float("inf"), None
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        result = call()
        best = min(best, time.process_time() - start)
    return best, result


def measure(build: Callable[[], Made], rounds: int) -> tuple[tuple[float, float, float, float], Any]:
    """Seconds of torch.export, of torch.export and its save with open sizes, of the graph and of the recording."""
    from staticmem.recording.export import ExportRequest, graph_file
    from staticmem.recording.record import record

    with torch.device("meta"):
        module, args = build()
    module.train()
    request = ExportRequest(module, args, ".pt2")
    with mock.patch.object(torch.export, "export", wraps=torch.export.export) as traced:
        graph_file(request)
    sizes = traced.call_args.kwargs["dynamic_shapes"]
    bare, _ = seconds(lambda: torch.export.export(module, args, strict=False), rounds)
    file, _ = seconds(lambda: save(torch.export.export(module, args, dynamic_shapes=sizes, strict=False)), rounds)
    graph, _ = seconds(lambda: graph_file(request), rounds)
    recording, document = seconds(lambda: record(module, args), rounds)
    return (bare, file, graph, recording), document


def save(program: torch.export.ExportedProgram) -> None:
    """Writes an exported program to memory, with its parameters as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, io.BytesIO())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models; default: all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    measure(OTHERS["lstm"], 1)  # what the first export imports
    ratios: dict[str, tuple[float, float]] = {}
    print(f"{'model':<20} {'bare':>7} {'file':>7} {'graph':>7} {'record':>7} {'total/bare':>10} {'total/file':>10}")
    for name in options.names or MODELS:
        try:
            (bare, file, graph, recording), document = measure(MODELS[name], options.rounds)
        except Exception as error:
            print(f"{name:<20} {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        total = graph + recording
        ratios[name] = total / bare, total / file
        mark = "f" if name in FEED_FORWARD else " "
        times = f"{bare:7.2f} {file:7.2f} {graph:7.2f} {recording:7.2f}"
        print(f"{name:<20} {times} {total / bare:9.1f}x {total / file:9.1f}x {mark}", flush=True)
        if options.save is not None:
            options.save.mkdir(parents=True, exist_ok=True)
            (options.save / f"{name}.json").write_text(json.dumps(document))
    for what, column in zip(("bare", "file"), zip(*ratios.values(), strict=True), strict=False):
        print(f"of {what}: median {median(column):.1f}x, {min(column):.1f}x to {max(column):.1f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
