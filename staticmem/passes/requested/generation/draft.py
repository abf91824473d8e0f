"""Ops in the order in which Python runs them, each value with the op after which Python lets go of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from staticmem.ir.graph import NO_KWARGS, Arg, Frame, Op, Ref


class GrowingOps:
    """A list of ops that grows. `ends` has for values the name of the op after which they are let go of."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.ends: dict[str, str] = {}

    @property
    def last(self) -> str:
        """The name of the op that was added last."""
        return self.ops[-1].name

    def call(
        self,
        target: str,
        *args: Arg | str,
        to: str,
        modules: tuple[Frame, ...] = (),
        kwargs: Mapping[str, Arg] = NO_KWARGS,
    ) -> str:
        """Adds a call that makes the value `to`, whose name is returned."""
        self.ops.append(Op(f"{to}_", target, tuple(args), kwargs, (to,), modules))
        return to

    def let_go(self, names: Iterable[str], after: str | None = None) -> None:
        """Python lets go of values after an op; None: after the last one."""
        self.ends.update(dict.fromkeys(names, after or self.last))

    def last_held(self) -> dict[str, int]:
        """The values that are let go of, each with the index of the op: no earlier than they are read."""
        at = {op.name: index for index, op in enumerate(self.ops)}
        read = {name: index for index, op in enumerate(self.ops) for name in op.refs()}
        return {name: max(at[end], read.get(name, 0)) for name, end in self.ends.items()}


def renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The op with other names for what it reads."""
    if names.keys().isdisjoint(op.refs()):
        return op
    args = tuple([_renamed(arg, names) for arg in op.args])
    return op.changed(args=args, kwargs={key: _renamed(arg, names) for key, arg in op.kwargs.items()})


def _renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names[arg.name]) if arg.name in names else arg
    return tuple([_renamed(a, names) for a in arg]) if isinstance(arg, tuple) else arg


def readers(ops: Sequence[Op]) -> dict[str, list[int]]:
    """Indices of the ops that read each value."""
    positions: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        for name in op.refs():
            positions.setdefault(name, []).append(index)
    return positions
