"""Module calls around ops: where stacks of frames part, when calls end, and which frames a value's readers share.

Stack traces that exporters keep with a node, as frames.
"""

from __future__ import annotations

import re
from functools import lru_cache

from staticmem.ir.graph import Frame, Graph, Op, SourceLine

Stack = tuple[Frame, ...]
LIBRARIES = ("torchvision.", "timm.", "transformers.")
_THEIR_FILES = re.compile(r"[/\\](?:torch|torchvision|timm|transformers)[/\\]")


def general_path(path: str) -> str:
    """The path of a module with `*` for numbers of lists: modules of one list have the same."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def common_depth(a: Stack, b: Stack) -> int:
    """How many frames two module stacks share."""
    if a is b:
        return len(a)
    n = 0
    for x, y in zip(a, b, strict=False):
        if x is not y and (x.path != y.path or x != y):  # most that differ have other paths
            break
        n += 1
    return n


def shared_frames(graph: Graph) -> dict[str, int]:
    """How many frames a value's maker shares with all of its readers."""
    stack_of: dict[str, Stack] = {}
    shared: dict[str, int] = {}
    for op in graph.ops:
        for name in op.refs():
            if name in stack_of:
                depth = common_depth(stack_of[name], op.modules)
                shared[name] = min(shared.get(name, depth), depth)
        stack_of.update(dict.fromkeys(op.outputs, op.modules))
    return {**shared, **{name: 1 for name in graph.outputs if name in stack_of}}


def call_ends(graph: Graph) -> dict[Stack, int]:
    """The last op of every module call."""
    ends: dict[Stack, int] = {}
    for index, op in enumerate(graph.ops):
        following = graph.ops[index + 1].modules if index + 1 < len(graph.ops) else ()
        if following is not op.modules:
            for level in range(len(op.modules)):
                ends[op.modules[: level + 1]] = index
    return ends


def is_published(op: Op) -> bool:
    """Whether an op is one of the code of a library that figures were compared for."""
    return any(frame.cls.startswith(LIBRARIES) for frame in op.modules[-2:])


def is_published_line(line: SourceLine) -> bool:
    """Whether a line is of such a library, or of PyTorch."""
    return _THEIR_FILES.search(line.file) is not None


MAX_TRACE = 50_000  # characters; a trace of a hundred frames is about 10,000
_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+), in (\S+)\s*$')


@lru_cache(maxsize=65536)
def source_lines(text: str) -> tuple[SourceLine, ...]:
    """Frames of a traceback as text, outermost first; () where there is none or it is not a traceback."""
    if not text or len(text) > MAX_TRACE:
        return ()
    frames: list[SourceLine] = []
    head: re.Match[str] | None = None
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match:
            if head is not None:
                frames.append(SourceLine(head[1], int(head[2]), head[3], ""))
            head = match
        elif head is not None:
            frames.append(SourceLine(head[1], int(head[2]), head[3], line.strip()))
            head = None
    if head is not None:
        frames.append(SourceLine(head[1], int(head[2]), head[3], ""))
    return tuple(frames)
