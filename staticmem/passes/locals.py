"""Local variables of `forward` functions: an export does not have them, so this is a stated policy, not a fact.

Python keeps a value until its variable is assigned again or the function returns. An export shows only uses. The
`expected` policy frees a value at its last use, except where code almost always gives it a name of its own; then the
frame that owns it (the common part of the producer's and the last reader's module stacks) holds it until it returns:

1. the operands of a matrix product or of attention (query, key, value, weights);
2. the result of a matrix product, made in the frame itself, that a child module reads, and that of a `cat` that a batch
   norm reads (pre-activation blocks name it; others write `x = conv(cat(...))` or assign the name again);
3. the parts of a `cat` of three or more (a list that the frame keeps);
4. two results of child modules that are added or multiplied, each used once; a branch that 0 is added to; the operand
   of a product that is read before too;
5. the results of a split, chunk or unbind: they are unpacked into names;
6. a value that enters a child module as a later argument than the first, but for what that module made itself when it
   ran last (the state of a recurrent cell: `h = self.cell(x, h)` assigns the name again);
7. a tensor of zeros or without contents that is assigned to in parts (`canvas[a:b] = y` needs the name);
8. the result of a transformers model, encoder or decoder (its ModelOutput stays with the caller).

What a child module reads last is held until a product of its result is made (`x = self.gamma * self.mlp(x)` assigns
when the line is done).

`last-use` frees everything as early as any code could. `named` holds, besides the above, every value that is read more
than once or beside another one: it must have had a name. The two are the band of an inference peak; docs/accuracy.md
says how far `expected` is off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from staticmem.ir.graph import Frame, Graph, Op, Ref, bases_of

POLICIES = ("expected", "last-use", "named")
_PRODUCTS = frozenset(
    ("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::scaled_dot_product_attention", "aten::einsum")
)
_JOINS = frozenset(("aten::cat", "aten::concat", "aten::matmul"))
_UNPACKED = frozenset(("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind"))
_LISTS = frozenset(("aten::cat", "aten::concat", "aten::stack"))
_PAIRS = frozenset(("aten::add", "aten::mul"))
_TOLD = _PRODUCTS | _JOINS | _UNPACKED | _LISTS | _PAIRS | {"aten::embedding"}  # ops that say something
_BLANK = frozenset(f"aten::{name}" for name in ("zeros", "new_zeros", "zeros_like", "empty", "new_empty", "empty_like"))
_PARTS = frozenset(("aten::slice", "aten::select"))
_VIEWS = 16  # of views, at most: a damaged file may have them in a circle
_WRITES = frozenset(("aten::copy_", "aten::index_put_", "aten::fill_"))
_MODEL_PATH = re.compile(r"(^|\.)(model|encoder|decoder|transformer|bert|distilbert|electra|roberta|albert|gpt_neox)$")
_MODEL = re.compile(r"transformers\..*(Model|Stack|Encoder|Decoder)$")

Stack = tuple[Frame, ...]


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


@dataclass(frozen=True)
class Held:
    """Values that outlive their last use: `frames` has the depth of the frame that holds one until it returns (0 is the
    root module), `until` the index of the op during which one is still held."""

    frames: Mapping[str, int] = field(default_factory=dict)
    until: Mapping[str, int] = field(default_factory=dict)


def held_locals(graph: Graph, policy: str = "expected") -> Held:
    """What the policy holds."""
    if policy == "last-use":
        return Held()
    found = _Locals(graph)
    return Held(found.decide(policy), found.statements())


def _starts_sum(op: Op) -> bool:
    """`branch + 0`: a sum over branches whose first ones are absent (RepVGG, MobileOne), so branches have names."""
    return op.base == "aten::add" and len(op.args) > 1 and type(op.args[1]) in (int, float) and op.args[1] == 0


def _is_model(frame: Frame) -> bool:
    """A transformers model within a model; a TorchScript export has only paths, such as `bert` or `m.encoder`."""
    return bool(_MODEL.search(frame.cls) if frame.cls else _MODEL_PATH.search(frame.path))


def _assigned_again(maker: Stack, reader: Stack, depth: int) -> bool:
    """`h = self.cell(x, h)`: a module reads what it made in its last call, and the name takes what it makes now."""
    return depth < len(maker) and maker[depth].path == reader[depth].path


class _Locals:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[str, Op] = {}
        self.reader: dict[str, Op] = {}  # of what ops make, the last one
        self.again: set[str] = set()  # what more than one op reads
        self.later: set[str] = set()  # what enters a module call after its first value from outside
        self.told: dict[str, None] = {}  # what an op that says something makes or reads, or crosses modules
        made, reader, again, told = self.made, self.reader, self.again, self.told
        first: dict[Stack, str] = {}
        says = {target for target in {op.target for op in graph.ops} if target.split(".", 1)[0] in _TOLD}
        for op in graph.ops:
            inner, saying = op.modules, op.target in says
            for name in op.refs():
                maker = made.get(name)
                if maker is None:  # the model's, or an input
                    continue
                known = reader.get(name)
                if known is None:
                    reader[name] = op
                elif known is not op:
                    again.add(name)
                    reader[name] = op
                if maker.modules is inner:
                    if saying or maker.target in says:
                        told[name] = None
                else:
                    told[name] = None
                    depth = common_depth(maker.modules, inner)
                    entered = depth < len(inner) and first.setdefault(inner[: depth + 1], name) != name
                    if entered and not _assigned_again(maker.modules, inner, depth):
                        self.later.add(name)
            for name in op.outputs:
                made[name] = op

    def _filled(self) -> dict[str, int]:
        """Tensors that a module makes to assign to their parts, and the depth of its frame."""
        found: dict[str, int] = {}
        if _BLANK.isdisjoint(bases_of(self.graph.ops)):
            return found
        for op in self.graph.ops:
            target = op.args[0] if op.base in _WRITES else None
            made = self.made.get(target.name) if isinstance(target, Ref) else None
            for _ in range(_VIEWS):
                if made is None or made.base not in _PARTS:
                    break
                target = made.args[0] if made.args else None
                made = self.made.get(target.name) if isinstance(target, Ref) else None
            if made is not None and made.base in _BLANK and made.outputs[0] in self.reader:
                found[made.outputs[0]] = common_depth(made.modules, op.modules) - 1
        return {name: depth for name, depth in found.items() if depth >= 0}

    def decide(self, policy: str) -> dict[str, int]:
        held = self._filled()
        reader, again, later_arguments = self.reader, self.again, self.later
        named = policy == "named"
        for name in self.made if named else self.told:
            maker, last = self.made[name], reader.get(name)
            if last is None:
                continue
            outer, inner = maker.modules, last.modules
            depth = (len(outer) if outer is inner else common_depth(outer, inner)) - 1
            if depth < 0:
                continue
            if maker.base not in _TOLD and last.base not in _TOLD:  # only the model within a model may tell
                if (
                    name in later_arguments
                    or (named and (name in again or self._beside(last)))
                    or (len(outer) > depth + 1 and _is_model(outer[depth + 1]))
                ):
                    held[name] = depth
                continue
            if maker.base in _UNPACKED and len(maker.outputs) > 1:
                held[name] = len(outer) - 1
                continue
            read_as_name = named and (name in again or self._beside(last))
            if read_as_name or name in later_arguments or self._named(name, maker, last, depth):
                held[name] = depth
            elif last.base in _LISTS and len(last.refs()) > 2:
                held[name] = len(last.modules) - 1  # the list lives where it is joined
            if named and name in held and self._may_be_the_callers(last):
                held[name] = min(held[name], len(last.modules) - 2)
        return held

    def _may_be_the_callers(self, join: Op) -> bool:
        """A joined list that has something from outside of the module: its caller may have made it and keep it."""
        outside = len(join.modules)
        return (
            join.base in _LISTS
            and outside > 1
            and len(join.refs()) > 2
            and any(n in self.made and common_depth(self.made[n].modules, join.modules) < outside for n in join.refs())
        )

    def statements(self) -> dict[str, int]:
        """Values that a module call reads last, whose result goes straight into a product of the caller's."""
        until: dict[str, int] = {}
        result_of = self._call_results()
        if not result_of:
            return until
        for name, maker in self.made.items():
            last = self.reader.get(name)
            if last is None:
                continue
            depth = common_depth(maker.modules, last.modules)
            product = result_of.get(last.modules[: depth + 1]) if 0 < depth < len(last.modules) else None
            if product is not None and name not in self.graph.ops[product].refs():
                until[name] = product
        return until

    def _call_results(self) -> dict[Stack, int]:
        """Module calls whose result only a product of the calling module reads: index of that product."""
        found: dict[Stack, int] = {}
        if "aten::mul" not in bases_of(self.graph.ops):
            return found
        index = {id(op): i for i, op in enumerate(self.graph.ops)}
        for name, maker in self.made.items():
            reader = self.reader.get(name)
            if reader is not None and name not in self.again and reader.base == "aten::mul":
                depth = len(reader.modules)
                if len(maker.modules) > depth and maker.modules[:depth] == reader.modules:
                    found[maker.modules[: depth + 1]] = index[id(reader)]
        return found

    def _named(self, name: str, maker: Op, last: Op, depth: int) -> bool:
        read_by = last.base
        if read_by in _PRODUCTS:
            return True
        made_here = len(maker.modules) == depth + 1
        if made_here and len(last.modules) > depth + 1 and maker.base in _JOINS:
            return maker.base == "aten::matmul" or read_by == "aten::batch_norm"
        if read_by in _PAIRS and (self._pair(name, last) or _starts_sum(last)):
            return True
        if read_by == "aten::mul" and name in self.again and len(last.modules) == depth + 1:
            return True
        if maker.base == "aten::embedding":
            # not what a model returns: the TorchScript exporter merges equal lookups (encoder and decoder with tied
            # embeddings and the same ids), so that one of them is read in both
            return False
        return len(maker.modules) > depth + 1 and _is_model(maker.modules[depth + 1])

    def _beside(self, op: Op) -> bool:
        """The op reads several computed values."""
        return len({name for name in op.refs() if name in self.made}) > 1

    def _pair(self, name: str, op: Op) -> bool:
        """Both operands are results of child modules, used once; or this is the second one and the first is local."""
        first, second = (*op.args[:2], None, None)[:2]
        if not isinstance(first, Ref) or not isinstance(second, Ref) or not self._single_child_result(second.name, op):
            return False
        if self._single_child_result(first.name, op):
            return True
        first_local = first.name in self.reader and first.name not in self.again
        return name == second.name and first_local

    def _single_child_result(self, name: str, op: Op) -> bool:
        maker = self.made.get(name)
        if maker is None or name not in self.reader or name in self.again:
            return False
        return len(maker.modules) > len(op.modules) and maker.modules[: len(op.modules)] == op.modules
