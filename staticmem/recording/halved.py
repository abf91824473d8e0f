"""Whether a module runs other ops once it is cast to 16 bits, as `model.to(torch.bfloat16)` does.

Code takes dtypes from tensors: `torch.softmax(scores, -1, dtype=scores.dtype)` names float32 in a float32 model, and
the recording of it does not tell that from a float32 that the code names itself. Casts are told apart all the same
(`ops.whole_model_cast`), as those of norms and rotary embeddings. Inference is recorded of the cast module in any case,
and training where labels go in, as a loss casts scores; where anything but such casts differs, or variables hold casts
otherwise than is taken, all modes are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from staticmem.frontends import recording_format as written
from staticmem.ops import kinds_of

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from staticmem.recording.watch import Program

HALF = torch.bfloat16  # float16 has the same sizes
_OWN = f"{written.DTYPE}float32"
_CAST = f"{written.DTYPE}bfloat16"


def is_float32(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a cast changes the module: its parameters are in float32."""
    return {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}


def halved(data: Sequence[torch.Tensor], fake: FakeTensorMode) -> list[torch.Tensor]:
    """Tensors in place of those that a module owns: of 16 bits where they are floating-point; one for each storage."""
    halves: dict[Any, torch.Tensor] = {}
    for tensor in data:
        key = tensor.untyped_storage()._cdata
        if key not in halves:
            with fake:
                dtype = HALF if tensor.is_floating_point() else tensor.dtype
                halves[key] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    return [halves[tensor.untyped_storage()._cdata] for tensor in data]


@dataclass
class Casts:
    """The casts in a program of the cast module: indices of those from the type of the module to float32, and whether
    any is not what `ops.whole_model_cast` takes it for: such a one, from float32 back, or from integers to float32."""

    up: set[int] = field(default_factory=set)
    otherwise: bool = False


def casts_of(program: Program, targets: Sequence[str]) -> Casts:
    """The casts of a program of the cast module."""
    casts = Casts()
    for index, (target, _, _, args, kwargs, *_) in enumerate(program.ops):
        if "cast" not in kinds_of(targets[target].partition(".")[0]) or not args or not isinstance(args[0], str):
            continue
        given = f"{written.DTYPE}{program.dtypes.get(int(args[0][1:]), '')}"
        asked = next((a for a in (*args[1:], *kwargs.values()) if a in (_OWN, _CAST)), None)
        of_device = targets[target] == "aten::to.dtype_layout"  # `x.to(device)`, which keeps the type
        other = _CAST if given == _OWN else _OWN
        if asked is not None and asked != (given if of_device else other):
            casts.otherwise = True
        if (given, asked) == (_CAST, _OWN):
            casts.up.add(index)
    return casts


def differs(
    one: Mapping[str, Any], other: Mapping[str, Any], casts: Casts, targets: Sequence[str], parents: Sequence[int]
) -> bool:
    """Whether a program of the cast module (`other`, with its `casts`) is another one than `ops.whole_model_cast` makes
    of the float32 program (`one`).

    Both are rows of `recording.rows`; `parents` has the call around each module call.
    """
    if casts.otherwise:
        return True
    wide = {index for index, (_, _, args, *rest) in enumerate(other["ops"]) if _OWN in str([args, *rest[3:4]])}
    of_float32, of_cast = _Told(targets, parents, wide), _Told(targets, parents)
    if of_float32.of(one["ops"]) != of_cast.of(other["ops"]):
        return True
    return any(of_float32.taken_ends(index) != of_cast.ends_of(index) for index in casts.up)


class _Told:
    """What is compared of each op: its target, module call, flags and arguments, but no dtypes of casts; and of casts
    to float32 when their input and their result end.

    In float32 a cast to float32 returns its input, whose name is then that of the result. `ops.whole_model_cast` takes
    that name for the result within the module of the cast, and for the input outside of it: so does this for the
    casts with an index in `wide`.
    """

    def __init__(self, targets: Sequence[str], parents: Sequence[int], wide: Set[int] = frozenset()) -> None:
        self.targets, self.parents, self.wide = targets, parents, wide
        self.next = 0  # values that ops have made
        self.last = {written.PARAMETER: 0, written.BUFFER: 0}
        self.inputs: dict[str, tuple[int, str]] = {}  # results of such casts: the module call, and the input
        self.stack = -1
        self.calls: list[int] = []  # the module call of each op
        self.casts: dict[int, tuple[str, str]] = {}  # by the index of the op: the input and the result
        self.ends: dict[str, int] = {}  # the op after which Python lets go of a value
        self.reads: dict[str, list[int]] = {}  # the ops that read it

    def of(self, ops: Sequence[Sequence[Any]]) -> list[Any]:
        return [self.row(index, op) for index, op in enumerate(ops)]

    def row(self, index: int, op: Sequence[Any]) -> list[Any]:
        target, step, args, *rest = op
        released, outputs, flags, kwargs, *_ = [*rest, *written.USUAL_OP[len(rest) :]]
        self.stack += step
        self.calls.append(self.stack)
        for name, (call, given) in self.inputs.items():
            if call >= 0 and not self.inside(call):
                self.inputs[name] = (-1, given)
        own_args = self.numbered(args)
        told_args, told_kwargs = self.told(own_args), {k: self.told(self.numbered(v)) for k, v in kwargs.items()}
        cast = "cast" in kinds_of(self.targets[target].partition(".")[0])
        for name in _values([own_args, list(kwargs.values())]):
            self.reads.setdefault(name, []).append(index)
        if cast:
            if isinstance(own_args[0], str):
                self.casts[index] = own_args[0], f"{written.REF}{self.next}"
            if index in self.wide:
                self.inputs[f"{written.REF}{self.next}"] = (self.stack, told_args[0])
            told_args, told_kwargs = _without_dtype(told_args), _without_dtype(told_kwargs)
        self.next += outputs if isinstance(outputs, int) else sum(outputs)
        self.ends.update({f"{written.REF}{self.next - step}": index for step in released})
        return [target, step, told_args, flags, told_kwargs, outputs]

    def inside(self, call: int) -> bool:
        """Whether the op runs within a module call."""
        return self.inside_of(call, self.stack)

    def inside_of(self, call: int, stack: int) -> bool:
        while stack > call:
            stack = self.parents[stack]
        return stack == call

    def numbered(self, arg: Any) -> Any:
        """An argument, with values by their number in place of steps to them."""
        if isinstance(arg, list):
            return [self.numbered(item) for item in arg]
        if not isinstance(arg, str) or arg[:1] not in (written.REF, *self.last):
            return arg
        kind, step = arg[0], int(arg[1:])
        if kind == written.REF:
            return f"{kind}{self.next - step}"
        self.last[kind] += step
        return f"{kind}{self.last[kind]}"

    def told(self, arg: Any) -> Any:
        """A numbered argument, with the input of a cast for its result outside of the module of the cast."""
        if isinstance(arg, list):
            return [self.told(item) for item in arg]
        call, given = self.inputs.get(arg, (0, arg)) if isinstance(arg, str) else (0, arg)
        return given if call < 0 else arg

    def ends_of(self, index: int) -> tuple[int, int]:
        """When the input and the result of a cast end."""
        given, result = self.casts[index]
        return self.end(given), self.end(result)

    def taken_ends(self, index: int) -> tuple[int, int]:
        """The same of a cast that returned its input, as `ops.whole_model_cast` takes it: the result ends with the last
        op of its module that reads it, and then the name is that of the input."""
        given, result = self.casts[index]
        last = index
        for read in self.reads.get(result, ()):
            if all(self.inside_of(self.calls[index], call) for call in self.calls[index : read + 1]):
                last = read
        end = self.end(result)
        return end if end > last else self.end(given), last

    def end(self, name: str) -> int:
        return self.ends.get(name, len(self.calls))


def _values(arg: Any) -> Iterator[str]:
    if isinstance(arg, list):
        for item in arg:
            yield from _values(item)
    elif isinstance(arg, str) and arg.startswith(written.REF):
        yield arg


def _without_dtype(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_dtype(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_dtype(item) for key, item in value.items()}
    return _OWN if value == _CAST else value
