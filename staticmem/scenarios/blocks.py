"""The blocks of a model that are worth a checkpoint: modules that repeat, with modules in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from staticmem.graph.ir import Frame, Graph


@dataclass(frozen=True)
class Blocks:
    """Blocks that are called by one name: `selector` is what `--checkpoint` takes, `paths` the modules it names."""

    selector: str
    paths: tuple[str, ...]


def repeated_blocks(graph: Graph) -> list[Blocks]:
    """Classes of modules that the forward calls more than once and that contain others; outermost and most first.

    Modules of torch.nn itself are left out (a Sequential is how others are written), but for its own encoder layers.
    Where a file has no classes, blocks are siblings that are numbered (`layers.0`, `layers.1`).
    """
    frames: dict[str, tuple[Frame, int]] = {}
    parents: set[str] = set()
    for op in graph.ops:
        for depth, frame in enumerate(op.modules):
            frames.setdefault(frame.path, (frame, depth))
            if depth:
                parents.add(op.modules[depth - 1].path)
    inner = {path: pair for path, pair in frames.items() if path in parents and path}
    named = {path: frame.cls.rpartition(".")[2] for path, (frame, _) in inner.items() if _is_own(frame.cls)}
    selectors = named or {path: _numbered(path) for path in inner if _numbered(path)}
    counts = Counter(selectors.values())
    found = [
        Blocks(name, tuple(path for path, other in selectors.items() if other == name))
        for name, count in counts.items()
        if count >= 2
    ]
    return sorted(found, key=lambda b: (min(inner[p][1] for p in b.paths), -len(b.paths), b.selector))


_BLOCKS_OF_TORCH = ("TransformerEncoderLayer", "TransformerDecoderLayer")


def _is_own(cls: str) -> bool:
    short = cls.rpartition(".")[2]
    return bool(cls) and (
        not cls.startswith("torch.nn.") or short in ("TransformerEncoderLayer", "TransformerDecoderLayer")
    )


def _numbered(path: str) -> str:
    parent, _, last = path.rpartition(".")
    return f"{parent}.*" if parent and last.isdigit() else ""


def last_layer(graph: Graph) -> str:
    """The path of the last module with parameters that the forward runs: the head; empty where there is none."""
    owners = {p.value.name: p.fqn.rpartition(".")[0] for p in graph.parameters}
    for op in reversed(graph.ops):
        for name in op.refs():
            if owners.get(name):
                return owners[name]
    return ""
