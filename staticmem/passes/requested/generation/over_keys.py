"""Ops that a decoder runs over all tokens that its cache has, where the file has those of the prompt.

The file has one number of tokens. In a decode step there is one query and as many keys as the cache has, and a static
cache has more keys than there are queries in the prefill too. Which numbers of an op are tokens is read from two
bindings of the file.
"""

from __future__ import annotations

from collections.abc import Iterable

from staticmem.ir.graph import Arg, Graph, Op, Ref
from staticmem.ops import parameters
from staticmem.passes.requested.generation.reading import not_recognised


def ops_over_keys(graph: Graph, cached: Iterable[str], ends: Iterable[Op], scores: frozenset[str]) -> tuple[str, ...]:
    """The names of the ops, in order, that make what an attention takes of what the cache has. `ends` are the calls
    that take it.

    Raises:
        ModelFileError: other code reads what they make.
    """
    descended, names = set(cached), list[str]()
    last = {op.name for op in ends}
    left = set(last)
    for op in graph.ops:
        if op.name in left:
            left.discard(op.name)
            if not left:
                break
        elif op.outputs and op.name not in scores and not descended.isdisjoint(op.refs()):
            names.append(op.name)
            descended.update(op.outputs)
    of_attention = last | scores | set(names)
    for op in graph.ops:
        if op.outputs and op.name not in of_attention and not descended.isdisjoint(op.refs()):
            raise not_recognised(
                f"{op.name} ({op.base}) reads keys or values beside the attention",
                "Its result would have the tokens of the cache, and what is done with it then is not known.",
            )
    return tuple(names)


class Lengths:
    """The numbers of each op as functions of tokens: linear, through two bindings of one file."""

    def __init__(self, one: Graph, many: Graph) -> None:
        """`one` is bound at one token, `many` at more."""
        shape = many.inputs[0].shape
        assert shape is not None
        self.tokens = shape[1]
        self.one = {op.name: op for op in one.ops}
        self.many = {op.name: op for op in many.ops}

    def over_keys(self, op: Op, keys: int) -> Op:
        """An op of the file, whatever its tokens, with those of the cache."""
        one, many = self._both(op)
        args = tuple([self._at(a, b, c, keys, op) for a, b, c in zip(op.args, one.args, many.args, strict=True)])
        kwargs = {k: self._at(v, one.kwargs.get(k), many.kwargs.get(k), keys, op) for k, v in op.kwargs.items()}
        return op.changed(args=args, kwargs=kwargs)

    def over_scores(self, op: Op, keys: int) -> Op:
        """An op over scores [.., queries, keys]: its last dimension has the tokens of the cache."""
        one, many = self._both(op)
        if op.base == "aten::slice" and op.args[1:2] in ((-1,), (3,)):
            return self.over_keys(op, keys)
        names = parameters(op.base)
        position = names.index("size") if "size" in names else len(op.args)
        sizes = op.args[position] if position < len(op.args) else ()
        if not isinstance(sizes, tuple) or not sizes:
            return op
        first, second = (_last_of(each.args[position]) for each in (one, many))
        last = self._at(sizes[-1], first, second, keys, op)
        args = (*op.args[:position], (*sizes[:-1], last), *op.args[position + 1 :])
        return op.changed(args=args)

    def _both(self, op: Op) -> tuple[Op, Op]:
        one, many = self.one.get(op.name), self.many.get(op.name)
        if one is None or many is None or not len(one.args) == len(many.args) == len(op.args):
            raise _unlike(op)
        return one, many

    def _at(self, own: Arg, one: Arg, many: Arg, keys: int, op: Op) -> Arg:
        """An argument at a number of keys. Names stay."""
        if isinstance(own, Ref) or own == one == many:
            return own
        if isinstance(own, tuple) and isinstance(one, tuple) and isinstance(many, tuple):
            if not len(own) == len(one) == len(many):
                raise _unlike(op)
            return tuple([self._at(a, b, c, keys, op) for a, b, c in zip(own, one, many, strict=True)])
        if type(one) is not int or type(many) is not int:
            raise _unlike(op)
        slope, rest = divmod(many - one, self.tokens - 1)
        if rest:
            raise _unlike(op)
        return one + slope * (keys - 1)


def _last_of(sizes: Arg) -> Arg:
    return sizes[-1] if isinstance(sizes, tuple) and sizes else None


def _unlike(op: Op) -> Exception:
    return not_recognised(
        f"the sizes of {op.name} ({op.base}) do not grow with the tokens",
        "Looked for ops over keys and values whose sizes are a multiple of the tokens and a constant.",
    )
