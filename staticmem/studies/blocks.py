"""The blocks of a model that are worth a checkpoint: modules that repeat, with modules in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from staticmem.ir.graph import Frame, Graph

SHARE = 0.3  # of the forward's ops: blocks with less of it keep little, whatever is done with them
MANY = 6  # blocks that are enough to choose among


@dataclass(frozen=True)
class Blocks:
    """Blocks that are called by one name: `selector` is what `--checkpoint` takes, `paths` the modules it names.

    `row` is the most of them in one parent, which can share checkpoints.
    """

    selector: str
    paths: tuple[str, ...]
    row: int


def repeated_blocks(graph: Graph) -> list[Blocks]:
    """Classes of modules that the forward calls more than once, that contain others, and that have much of its ops;
    outermost first.

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
    ops = Counter(name for op in graph.ops for name in {selectors.get(frame.path, "") for frame in op.modules})
    found: list[tuple[float, Blocks]] = []
    for name in dict.fromkeys(selectors.values()):
        paths = tuple(path for path, other in selectors.items() if other == name)
        if len(paths) >= 2 and ops[name] >= SHARE * len(graph.ops):
            row = max(Counter(path.rpartition(".")[0] for path in paths).values())
            found.append((sum(inner[path][1] for path in paths) / len(paths), Blocks(name, paths, row)))
    return [blocks for _, blocks in sorted(found, key=lambda pair: (pair[0], pair[1].selector))]


def blocks_to_choose(graph: Graph) -> Blocks | None:
    """The outermost blocks that are many enough to choose among, else the outermost."""
    found = repeated_blocks(graph)
    return next((blocks for blocks in found if len(blocks.paths) >= MANY), found[0] if found else None)


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
