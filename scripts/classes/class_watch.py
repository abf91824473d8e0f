"""Watches a model's Python code run: which names hold which results, and what runs in place.

`observed(model, args, kwargs)` runs one forward on meta tensors (no data, no memory) at the level at which torch.export
records ops, and looks at the local variables of all running frames before every op. What an export's stack traces say
by their source lines, and what they leave out (other functions than `forward`, loops, `del`), is seen here directly.
Needs torch; used by the scripts that make tables of published classes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from staticmem.ir.graph import Arg, Frame, Graph, Op, Ref

Stack = tuple[Frame, ...]
Held = dict[str, frozenset[int]]  # a name -> the tensor objects it holds; `xs[]` for what a container holds
_CALL = torch.nn.Module._call_impl.__code__
# Frames between a module and an op that is called: the arguments they hold are those of the op itself
_MACHINERY = re.compile(r"torch/(nn/modules/module|_[^/]*|utils/_[^/]*|overrides|_[^/]*/.*)\.py$")
_OWN_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)
_LARGEST_LIST = 1000


@dataclass
class Call:
    """A module call: before which op which names of its frames held what (changes only)."""

    shots: list[tuple[int, Held]] = field(default_factory=list)


@dataclass(frozen=True)
class Observed:
    """One forward: its ops as an export has them, and what names held meanwhile."""

    graph: Graph
    calls: Mapping[Stack, Call]
    objects: Mapping[str, int]  # value -> the tensor object that had it: an op in place gives the same again


class _Watch(SchemaCheckMode):
    """Sees every op above autograd. A SchemaCheckMode by name only: PyTorch lets no others in at that level."""

    def __init__(self, root: torch.nn.Module) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.root = root
        self.owned = {id(t) for t in (*root.parameters(), *root.buffers())}
        self.seen: list[Op] = []
        self.kept: list[Any] = []  # every result stays alive, so that an id means one object
        self.latest: dict[int, str] = {}
        self.made: dict[tuple[object, ...], int] = {}  # by storage and strides: autograd gives other objects for some
        self.objects: dict[str, int] = {}
        self.calls: dict[Stack, Call] = {}
        self._running: list[tuple[FrameType, Frame]] = []
        self._counts: dict[str, int] = {}
        self._paths: dict[int, dict[int, str]] = {}
        self._machinery: dict[CodeType, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        modules = self._look()
        given = tuple(self._arg(a) for a in args)
        named = {k: self._arg(v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        outputs = tuple(self._name(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        overload = "" if func._overloadname == "default" else f".{func._overloadname}"
        name = f"op{len(self.seen)}"
        self.seen.append(Op(name, f"{func._schema.name}{overload}", given, named, outputs, modules))
        return result

    def _name(self, tensor: torch.Tensor) -> str:
        name = f"v{len(self.kept)}"
        self.kept.append(tensor)
        self.made[_place(tensor)] = id(tensor)
        self.latest[id(tensor)] = name
        self.objects[name] = id(tensor)
        return name

    def _known(self, tensor: torch.Tensor) -> int | None:
        """The object that a tensor is, if an op made it."""
        if id(tensor) in self.latest and id(tensor) not in self.owned:
            return id(tensor)
        return None if id(tensor) in self.owned else self.made.get(_place(tensor))

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            key = self._known(arg)
            return Ref("outside" if key is None else self.latest[key])
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(a) for a in arg)
        return arg if isinstance(arg, (int, float, bool, str)) else None

    def _look(self) -> Stack:
        """The module calls that run now; notes what the names in their frames hold."""
        levels: list[tuple[FrameType, list[FrameType]]] = []
        own: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not observed.__code__:
            if frame.f_code is _CALL:
                levels.append((frame, own))
                own = []
            elif not self._is_machinery(frame.f_code):
                own.append(frame)
            frame = frame.f_back
        levels.reverse()
        self._enter([frame for frame, _ in levels])
        modules = tuple(frame for _, frame in self._running)
        for level, (call, frames) in enumerate(levels):
            held = self._held(call.f_locals["self"], frames)
            shots = self.calls.setdefault(modules[: level + 1], Call()).shots
            if not shots or shots[-1][1] != held:
                shots.append((len(self.seen), held))
        return modules

    def _is_machinery(self, code: CodeType) -> bool:
        known = self._machinery.get(code)
        if known is None:
            known = self._machinery[code] = code.co_filename == __file__ or bool(_MACHINERY.search(code.co_filename))
        return known

    def _enter(self, calls: list[FrameType]) -> None:
        same = 0
        while same < min(len(calls), len(self._running)) and self._running[same][0] is calls[same]:
            same += 1
        del self._running[same:]
        for call in calls[same:]:
            module = call.f_locals["self"]
            path = self._path(module)
            count = self._counts[path] = self._counts.get(path, -1) + 1
            cls = type(module)
            self._running.append((call, Frame(path, f"{cls.__module__}.{cls.__qualname__}", count)))

    def _path(self, module: torch.nn.Module) -> str:
        """As torch.export has it: the way from the calling module, if there is one."""
        if self._running:
            frame, known = self._running[-1]
            parent = frame.f_locals["self"]
            if id(parent) not in self._paths:
                ways = ((id(m), n) for n, m in parent.named_modules(remove_duplicate=False))
                self._paths[id(parent)] = {}
                for key, way in ways:
                    self._paths[id(parent)].setdefault(key, way)
            way = self._paths[id(parent)].get(id(module))
            if way is not None:
                return f"{known.path}.{way}" if known.path else way
        return next((n for n, m in self.root.named_modules() if m is module), "")

    def _held(self, module: torch.nn.Module, frames: list[FrameType]) -> Held:
        held: dict[str, set[int]] = {}
        for depth, frame in enumerate(reversed(frames)):
            mark = f"@{depth}.{id(frame)}" if depth else ""
            for name, value in frame.f_locals.items():
                self._find(name + mark, value, held, 2)
        for name, value in (*module.__dict__.items(), *module._buffers.items()):
            if name not in _OWN_ATTRIBUTES:
                self._find(f"self.{name}", value, held, 2)
        return {name: frozenset(ids) for name, ids in held.items()}

    def _find(self, name: str, value: Any, held: dict[str, set[int]], depth: int) -> None:
        if isinstance(value, torch.Tensor):
            key = self._known(value)
            if key is not None:
                held.setdefault(name, set()).add(key)
        elif depth and isinstance(value, (list, tuple, dict)) and len(value) <= _LARGEST_LIST:
            inner = name if name.endswith("[]") else f"{name}[]"
            for item in tuple(value.values() if isinstance(value, dict) else value):
                self._find(inner, item, held, depth - 1)


def observed(model: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Observed:
    """One forward of `model`, which is on the meta device like its arguments, in the mode it is in."""
    watch = _Watch(model)
    with torch.no_grad(), enable_python_dispatcher(), watch:
        result = model(*args, **(kwargs or {}))
    made = (watch._known(t) for t in _tensors(result))
    outputs = dict.fromkeys(watch.latest[key] for key in made if key is not None)
    graph = Graph(type(model).__name__, "fx", "", (), (), (), tuple(watch.seen), tuple(outputs))
    return Observed(graph, watch.calls, watch.objects)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # of vmap: it has no storage
        return (id(tensor),)
    return tensor.untyped_storage()._cdata, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """All tensors of a result, also in transformers' ModelOutput."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        for item in result.values():
            yield from _tensors(item)
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _tensors(item)
