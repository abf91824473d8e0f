"""What modules keep as attributes from one call of the model to the next."""

from __future__ import annotations

from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine.interpreter import Interpreter


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
