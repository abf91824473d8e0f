"""`staticmem analyze` beside what a user would otherwise run on the same model, in turn."""

from __future__ import annotations

import sys
from pathlib import Path

from measure import ROOT, Series, interleaved, run
from rows import Row, mib, ms

FASTER = 10  # times MemTracker, at least
MODELS = (("resnet50", 32), ("vit-b16", 32), ("decoder-1b", 1), ("decoder-70b", 1))
WITHOUT_PEERS = ("decoder-70b",)  # minutes a run
WITHOUT_TORCHINFO = ("decoder-1b",)  # it does not run on the meta device there


def footprint(onnxsim: str, staticmem: list[str], folder: Path, rounds: int) -> tuple[list[Row], list[Series]]:
    """An inference of ResNet-50 from ONNX: the whole report, and onnxsim's "Memory Footprint" of the same graph.

    Args:
        onnxsim: an interpreter that has onnxsim.
        staticmem: the command that is measured, up to the path.
        folder: for the file with weights, which onnxsim reads, and for what it writes.
    """
    source, full = ROOT / "models" / "resnet50.onnx", folder / "footprint.onnx"
    run([sys.executable, str(ROOT / "benchmarks" / "graphs.py"), "embed", str(source), str(full)])
    simplify = [onnxsim, "-m", "onnxsim", str(full), str(folder / "simplified.onnx")]
    found = interleaved(
        {
            "staticmem": [*staticmem, str(full), "--mode", "infer", "--batch", "1"],
            "onnxsim": [*simplify, "--overwrite-input-shape", "x:1,3,224,224"],
        },
        rounds,
    )
    ours, other = found["staticmem"], found["onnxsim"]
    return [
        Row("cold resnet50.onnx with weights, inference, batch 1", ms(ours.seconds), mib(ours.rss)),
        Row("  onnxsim", ms(other.seconds), mib(other.rss), f"{other.seconds / ours.seconds:.1f}x ours"),
    ], [ours, other]


def compare(exports: Path | None, python: str, staticmem: list[str], rounds: int) -> tuple[list[Row], list[Series]]:
    """Rows of every model that is there.

    Args:
        exports: folder of exports.py; None: ResNet-50 alone, which the project has.
        python: an interpreter with PyTorch, and with torchvision and transformers for the exports; "": no comparison.
        staticmem: the command that is measured, up to the path.
    """
    rows: list[Row] = []
    series: list[Series] = []
    for name, batch in MODELS:
        folder = ROOT / "models" if name == "resnet50" else exports
        if folder is None or not (folder / f"{name}.pt2").exists():
            continue
        path = str(folder / f"{name}.pt2")
        commands = {name: [*staticmem, path, "--optimizer", "adam", "--batch", str(batch)]}
        if python and name not in WITHOUT_PEERS:
            for peer in ("memtracker", "torchinfo"):
                if peer == "torchinfo" and name in WITHOUT_TORCHINFO:
                    continue
                commands[peer] = [python, str(ROOT / "benchmarks" / "peers.py"), peer, name, str(batch)]
        found = interleaved(commands, rounds)
        ours = found.pop(name)
        rows.append(Row(f"cold {name}.pt2, Adam, batch {batch}", ms(ours.seconds), mib(ours.rss)))
        for peer, other in found.items():
            times = other.seconds / ours.seconds
            row = Row(f"  {peer}", ms(other.seconds), mib(other.rss), f"{times:.1f}x ours")
            if peer == "memtracker":
                row.target, row.ok = f">= {FASTER}x", times >= FASTER
            rows.append(row)
        series += [ours, *found.values()]
    return rows, series
