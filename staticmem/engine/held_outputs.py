"""The model's outputs where the loop around it holds them: `outputs = model(x); loss = criterion(outputs, y)`, or of an
inference `outputs = model(x)` alone.

The name has the outputs through backward and the optimizer's step, until the next forward has returned and the name is
assigned anew: for the length of a forward those of two steps exist. Outputs hold their history too: what leads to an
output that is no part of the loss keeps what it saved, because no backward runs through it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from staticmem.eager.context import Eager
from staticmem.eager.tensor import Owner, Tensor
from staticmem.eager.trace import OPEN
from staticmem.engine.kept_history import fill_place
from staticmem.errors import ModelFileError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import HALVES
from staticmem.ops.casts import to_copy

if TYPE_CHECKING:
    from staticmem.engine.interpreter import Interpreter

OUTPUTS = "outputs"  # the kind of their holds
PREVIOUS = "outputs of the previous step"
BEFORE = "outputs of the call before"  # of an inference
HISTORY = f"history of {PREVIOUS}"


def in_float32(e: Eager, interpreter: Interpreter) -> list[Tensor]:
    """The outputs of a forward, those of half precision in float32: the caller gets the copies when all are made, and
    the model's own end.

    Source: accelerate 1.15, `convert_outputs_to_fp32` (utils/operations.py), around the forward and its autocast.
    """
    env, owners = interpreter.env, interpreter.owners
    names = [name for name in interpreter.graph.outputs if isinstance(env.get(name), Tensor)]
    e.open_scope()
    copies = {name: to_copy(e, env[name], dtypes.float32) for name in dict.fromkeys(names) if env[name].dtype in HALVES}
    for name, copy in copies.items():
        own = owners.pop(name, None)
        owners[name] = copy, e.take(copy, "value", name)
        env[name] = copy
        if own is not None:
            e.end(*own)
    e.close_scope()
    return [env[name] for name in names]


class HeldOutputs:
    """The variable that has the outputs.

    A step begins with the outputs of the step before. Their sizes are known when the forward has run: until then
    buffers without bytes stand for them, one for each output and one for what their history has saved.
    """

    def __init__(self, e: Eager, count: int, name: str = PREVIOUS) -> None:
        """`count` is the number of the model's outputs, `name` what those of before are called."""
        self.e, self.variable = e, Owner(OUTPUTS, name)
        for what in (*[name] * count, HISTORY):
            place = e.empty((0,), dtypes.uint8, kernel=what)
            e.categorise(place, "activation", what)
            e.hold(place, self.variable)
        self.places = self.storages = [tensor.storage.id for tensor, _ in self.variable.held]
        self.first = len(e.trace.buffers)

    def assign(self, outputs: Sequence[Tensor]) -> None:
        """`outputs = model(x)`: the new ones exist when those of before are released.

        Raises:
            ModelFileError: by the file, an output does not live until the model returns.
        """
        before, self.variable = self.variable, Owner(OUTPUTS, "outputs")
        for tensor in outputs:
            if self.e.trace.buffers.died[tensor.storage.id] != OPEN:  # a damaged recording may say so
                raise ModelFileError(
                    f"the model's output {list(tensor.shape)} is released before the model returns it",
                    "The file says of each value how long the code holds it, and an output is held until the end.",
                    "Export the model again.",
                    code="SM119",
                )
            self.e.hold(tensor, self.variable)
        # an output may be an input of the model, or a view of another output
        storages = dict.fromkeys(t.storage.id for t in outputs if t.storage.id >= self.first)
        old, self.storages = self.storages, list(storages)
        trace = self.e.trace
        for id, new in zip(old, storages, strict=False):
            trace.replaced_by[id] = (new,)
            # the next CUDA graph takes the memory of what one has returned
            if old is self.places and not trace.in_cuda_graph(trace.buffers.kernels[new]):
                self._fill(id, new, trace.buffers.nbytes[new])
        self.e.release(before)

    def end(self) -> None:
        """The function whose variable it is returns: the next step begins without outputs."""
        self.e.release(self.variable)
        self.storages = []
        for place in self.places:
            self.e.trace.buffers.nbytes[place] = 0

    def leave(self, others: Collection[int]) -> None:
        """The step is over; `others` are buffers that the loop and modules hold besides."""
        trace = self.e.trace
        buffers = trace.buffers
        first, excluded = bisect_left(buffers.born, dict(trace.phases)["forward"]), {*others, *self.storages}
        saved = [
            id
            for id, died in enumerate(buffers.died[first:], first)
            if died == OPEN and buffers.categories[id] != "gradient" and id not in excluded
        ]
        fill_place(trace, self.places[-1], saved)

    def _fill(self, place: int, like: int, nbytes: int) -> None:
        """Gives a place its bytes, and the layout of buffer `like`."""
        buffers = self.e.trace.buffers
        buffers.forms[place], buffers.nbytes[place] = buffers.forms[like], nbytes
