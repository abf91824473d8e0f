"""`staticmem analyze` beside what a user would otherwise run on the same model, in turn."""

from __future__ import annotations

from pathlib import Path

from measure import ROOT, Series, interleaved
from rows import Row, mib, ms

FASTER = 10  # times MemTracker, at least
MODELS = (("resnet50", 32), ("vit-b16", 32), ("decoder-1b", 1), ("decoder-70b", 1))
WITHOUT_PEERS = ("decoder-70b",)  # minutes a run


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
