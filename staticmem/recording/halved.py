"""Whether a module runs other ops once it is cast to 16 bits, as `model.to(torch.bfloat16)` does.

Code takes dtypes from tensors: `torch.softmax(scores, -1, dtype=scores.dtype)` names float32 in a float32 model, and
the recording of it does not tell that from a float32 that the code names itself. Casts are told apart all the same
(`ops.whole_model_cast`), as those of norms and rotary embeddings. Inference is recorded of the cast module in any case,
because variables hold what casts make; where anything but casts differs, all modes are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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


def casts_otherwise(program: Program, targets: Sequence[str]) -> bool:
    """Whether a cast of a program of the cast module is not that which `ops.whole_model_cast` takes it for: from the
    type of the module to float32, from float32 back, or from integers to float32."""
    for target, _, _, args, kwargs, *_ in program.ops:
        if "cast" not in kinds_of(targets[target].partition(".")[0]) or not args or not isinstance(args[0], str):
            continue
        given = f"{written.DTYPE}{program.dtypes.get(int(args[0][1:]), '')}"
        asked = next((a for a in (*args[1:], *kwargs.values()) if a in (_OWN, _CAST)), None)
        of_device = targets[target] == "aten::to.dtype_layout"  # `x.to(device)`, which keeps the type
        if asked is not None and asked != (given if of_device else _CAST if given == _OWN else _OWN):
            return True
    return False


def differs(one: Mapping[str, Any], other: Mapping[str, Any], targets: Sequence[str], parents: Sequence[int]) -> bool:
    """Whether a program of the cast module (`other`) has ops that a cast of the float32 program (`one`) does not give.

    Both are rows of `recording.rows`; `parents` has the call around each module call.
    """
    wide = {index for index, (_, _, args, *rest) in enumerate(other["ops"]) if _OWN in str([args, *rest[3:4]])}
    return _Told(targets, parents, wide).of(one["ops"]) != _Told(targets, parents).of(other["ops"])


class _Told:
    """What is compared of each op: its target, module call, flags and arguments, but no dtypes of casts and no ends of
    values.

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

    def of(self, ops: Sequence[Sequence[Any]]) -> list[Any]:
        return [self.row(index, op) for index, op in enumerate(ops)]

    def row(self, index: int, op: Sequence[Any]) -> list[Any]:
        target, step, args, *rest = op
        _, outputs, flags, kwargs, *_ = [*rest, *written.USUAL_OP[len(rest) :]]
        self.stack += step
        for name, (call, given) in self.inputs.items():
            if call >= 0 and not self.inside(call):
                self.inputs[name] = (-1, given)
        told_args, told_kwargs = self.told(args), {key: self.told(value) for key, value in kwargs.items()}
        cast = "cast" in kinds_of(self.targets[target].partition(".")[0])
        if cast:
            if index in self.wide:
                self.inputs[f"{written.REF}{self.next}"] = (self.stack, told_args[0])
            told_args, told_kwargs = _without_dtype(told_args), _without_dtype(told_kwargs)
        self.next += outputs if isinstance(outputs, int) else sum(outputs)
        return [target, step, told_args, flags, told_kwargs, outputs]

    def inside(self, call: int) -> bool:
        """Whether the op runs within a module call."""
        stack = self.stack
        while stack > call:
            stack = self.parents[stack]
        return stack == call

    def told(self, arg: Any) -> Any:
        """An argument, with values by their number in place of steps to them."""
        if isinstance(arg, list):
            return [self.told(item) for item in arg]
        if not isinstance(arg, str) or arg[:1] not in (written.REF, *self.last):
            return arg
        kind, step = arg[0], int(arg[1:])
        if kind == written.REF:
            name = f"{kind}{self.next - step}"
        else:
            self.last[kind] += step
            name = f"{kind}{self.last[kind]}"
        call, given = self.inputs.get(name, (0, name))
        return given if call < 0 else name


def _without_dtype(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_dtype(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_dtype(item) for key, item in value.items()}
    return _OWN if value == _CAST else value
