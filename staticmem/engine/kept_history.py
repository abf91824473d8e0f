"""What tensors that modules keep as attributes hold beside their own bytes: the history that autograd gave them.

`self.aux = self.head(x)`, where no loss is made of it: no backward runs through its history, so what the ops saved is
there until the next forward assigns the attribute again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.strides import form_of
from staticmem.eager.tensor import Owner, Tensor
from staticmem.eager.trace import OPEN, Trace, round_up
from staticmem.engine.interpreter import Interpreter
from staticmem.ir import dtypes


class KeptHistories:
    """The histories of the attributes that modules have from the step before.

    Their sizes are known when the step has run: until then a buffer without bytes stands for each.
    """

    def __init__(self, e: Eager) -> None:
        self.e = e
        self.places: dict[str, tuple[int, int]] = {}  # of an attribute: its buffer, and the one for its history
        self.unsized: set[int] = set()  # buffers of attributes that are as large as what the step assigns
        self.left: set[int] = set()  # buffers that histories hold, once backward is over

    def add(self, name: str, tensor: Tensor) -> None:
        """An attribute of the step before, which nobody holds yet."""
        what = f"history of {name} of the previous step"
        place = self.e.empty((0,), dtypes.uint8, kernel=what)
        self.e.categorise(place, "activation", what)
        self.e.give_history(tensor, what, place)
        self.places[name] = tensor.storage.id, place.storage.id

    def add_unsized(self, name: str, path: str) -> Tensor:
        """An attribute of the step before, of which no file says the size: that of this step's."""
        what = f"{path} of the previous step"
        tensor = self.e.empty((0,), dtypes.uint8, kernel="model")
        self.e.categorise(tensor, "activation", what)
        self.add(name, tensor)
        self.unsized.add(tensor.storage.id)
        return tensor

    def fill(self, attributes: Iterable[tuple[str, Tensor]], outputs: Sequence[Tensor]) -> None:
        """Backward is over. `attributes` are the name of each from the step before and the tensor that it is now;
        `outputs` are those that the loop holds, which it does for longer."""
        trace = self.e.trace
        buffers = trace.buffers
        ends = []
        for name, tensor in attributes:
            if name in self.places:
                value, place = self.places[name]
                ends += [(-buffers.died[value], value, tensor, True), (-buffers.died[place], place, tensor, False)]
        taken = set().union(*map(saved_by_history, outputs))
        # a buffer may be an attribute and in the histories of others: it is counted where it lives longest
        for _, before, tensor, is_value in sorted(ends, key=lambda row: (row[0], not row[3])):
            if is_value:
                if before in self.unsized and tensor.storage.id not in taken and _is_of_step(trace, tensor.storage.id):
                    fill_place(trace, before, [tensor.storage.id])
                if tensor.storage.id in self.left:
                    buffers.nbytes[before] = 0
                taken.add(tensor.storage.id)
                continue
            own = [id for id in sorted(saved_by_history(tensor) - taken) if _is_of_step(trace, id)]
            taken.update(own)
            self.left.update(own)
            fill_place(trace, before, own)


def saved_by_history(tensor: Tensor) -> set[int]:
    """The buffers that the ops which lead to a tensor have saved, and that no backward has released."""
    saved: set[int] = set()
    stack = [tensor.grad_fn] if tensor.grad_fn is not None else []
    visited = set(stack)
    while stack:
        node = stack.pop()
        saved.update(storage.id for storage in node.saved)
        for edge in node.edges:
            if edge is not None and edge[0] not in visited:
                visited.add(edge[0])
                stack.append(edge[0])
    return saved


def fill_place(trace: Trace, place: int, saved: Collection[int]) -> None:
    """Gives a buffer that stands for others of the step before their bytes: of one the form, of several only bytes."""
    buffers = trace.buffers
    if saved:
        nbytes = buffers.nbytes[place] = sum(round_up(buffers.nbytes[id]) for id in saved)
        of_one = buffers.forms[next(iter(saved))]
        buffers.forms[place] = of_one if len(saved) == 1 else form_of((nbytes,), (1,), dtypes.uint8)
        trace.replaced_by[place] = tuple(saved)


def _is_of_step(trace: Trace, buffer: int) -> bool:
    """Whether the step has made a buffer that is alive."""
    first = dict(trace.phases)["forward"]
    return trace.buffers.born[buffer] >= first and trace.buffers.died[buffer] == OPEN


def keep_after(interpreter: Interpreter, name: str, index: int) -> Owner:
    """Who has a result as an attribute of a module from the end of op `index` on, and until then what the call before
    assigned."""
    owner = interpreter.attributes[name] = Owner(Reason.MODULE, name)
    interpreter.assigned_after.setdefault(index, []).append(name)
    return owner


def kept_now(interpreter: Interpreter) -> list[tuple[str, Tensor]]:
    """Names of what the module has from the call before, and the tensors that take their places in the next."""
    recorded, attributes = interpreter.recorded, interpreter.attributes
    if recorded is None:
        return [(name, owner.held[0][0]) for name, owner in attributes.items() if owner.held]
    if len(recorded.kept) != len(recorded.lasting):
        return []
    pairs = zip(recorded.kept, recorded.lasting, strict=True)
    return [
        (value.name, attributes[name].held[0][0])
        for (value, _), name in pairs
        if attributes[name].held and value.name not in attributes
    ]


def call_again(interpreter: Interpreter) -> None:
    """What the module kept from the forward that has run is what it has from the call before, in the next one."""
    if interpreter.recorded is None:  # attributes are assigned again by name
        return
    before = kept_now(interpreter)
    lasting = {id(owner.held[0][0]): owner for owner in interpreter.attributes.values() if owner.held}
    for name, tensor in before:
        interpreter.keep(name, tensor)
        interpreter.e.release(lasting[id(tensor)])
