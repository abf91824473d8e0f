"""Local variables of `forward` functions: an export does not have them, so this is a stated policy, not a fact.

Python keeps a value until its variable is assigned again or the function returns. An export shows only uses. The
`expected` policy frees a value at its last use, except where code almost always gives it a name of its own; then the
frame that owns it (the common part of the producer's and the last reader's module stacks) holds it until it returns:

1. the operands of a matrix product or of attention (query, key, value, weights);
2. the result of a matrix product, made in the frame itself, that a child module reads, and that of a `cat` that a batch
   norm reads (pre-activation blocks name it; others write `x = conv(cat(...))` or assign the name again);
3. the parts of a `cat` of three or more (a list that the frame keeps), other than one or two that an op each makes for
   it (`cat([h[src], h[dst], e])`);
4. two results of child modules that are added or multiplied, each used once, other than what modules of one list return
   (a loop adds it to a total); a branch that 0 is added to; the operand of a product that is read before too;
5. the results of a split, chunk or unbind: they are unpacked into names;
6. a value that enters a child module as a later argument than the first, except what that module itself returned from
   its previous call (the state of a recurrent cell: `h = self.cell(x, h)` assigns the name again);
7. a tensor of zeros or without contents that is assigned to in parts (`canvas[a:b] = y` needs the name);
8. the result of a transformers model, encoder or decoder (its ModelOutput stays with the caller).

What a child module reads last is held until a product of its result is made (`x = self.gamma * self.mlp(x)` assigns
when the line is done).

Where no line tells, `unseen_bounds` has more habits: of skips, of what several statements read, and of loops.

`last-use` frees everything as early as any code could, and `most` holds what any code could hold (`unseen_bounds`).
The two are the band of a peak; docs/accuracy.md says how far `expected` is off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from staticmem.ir.graph import Frame, Graph, Op, Ref, bases_of
from staticmem.ir.stacks import Stack, common_depth
from staticmem.ops.registry import FREE_PRODUCTS, JOINS, RING_ATTENTION, kinds_of

POLICIES = ("expected", "last-use", "most")
_PRODUCTS = FREE_PRODUCTS | {"aten::scaled_dot_product_attention", RING_ATTENTION}
_NAMED_FOR_CHILDREN = ("aten::cat", "aten::matmul")  # rule 2
_MOST_WRITTEN_WITHIN = 2  # parts: more are likelier to be a list that a loop has filled
_PAIRS = frozenset(("aten::add", "aten::mul"))
_TOTALS = frozenset(("aten::add", "aten::add_"))
# ops that a rule speaks of: others matter only where values cross modules
_IN_RULES = _PRODUCTS | JOINS | _PAIRS | {"aten::embedding"}
_MOST_VIEWS = 16  # of views that are followed: a damaged file may have them in a circle
_MODEL_PATH = re.compile(r"(^|\.)(model|encoder|decoder|transformer|bert|distilbert|electra|roberta|albert|gpt_neox)$")
_MODEL = re.compile(r"transformers\..*(Model|Stack|Encoder|Decoder)$")


@dataclass(frozen=True)
class Held:
    """Values that outlive their last use: `frames` has the depth of the frame that holds one until it returns (0 is the
    root module), `until` the index of the op during which one is still held."""

    frames: Mapping[str, int] = field(default_factory=dict)
    until: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Attribute:
    """A result that a module keeps as an attribute, until its next forward assigns it again: the path of the attribute,
    and the op after which it is assigned."""

    path: str
    after: int


def held_by_policy(graph: Graph, policy: str = "expected") -> Held:
    """What the policy holds."""
    if policy == "last-use":
        return Held()
    variables = _Variables(graph)
    return Held(variables.frames(), variables.until())


def _is_model(frame: Frame) -> bool:
    """A transformers model within a model; a TorchScript export has only paths, such as `bert` or `m.encoder`."""
    return bool(_MODEL.search(frame.cls) if frame.cls else _MODEL_PATH.search(frame.path))


class _Variables:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers: dict[str, Op] = {}
        self.last_readers: dict[str, Op] = {}  # of what ops make
        self.shared: set[str] = set()  # what more than one op reads
        self.later_arguments: set[str] = set()  # what enters a module call after its first value from outside
        self.results: dict[Stack, set[str]] = {}  # of module calls: what their callers read
        self.candidates: dict[str, None] = {}  # what an op of the rules makes or reads, or crosses modules
        producers, readers, shared, candidates = self.producers, self.last_readers, self.shared, self.candidates
        first: dict[Stack, str] = {}
        in_rules = {target for target in {op.target for op in graph.ops} if target.split(".", 1)[0] in _IN_RULES}
        for op in graph.ops:
            inner, ruled = op.modules, op.target in in_rules
            for name in op.refs():
                producer = producers.get(name)
                if producer is None:  # the model's, or an input
                    continue
                reader = readers.get(name)
                if reader is None:
                    readers[name] = op
                elif reader is not op:
                    shared.add(name)
                    readers[name] = op
                outer = producer.modules
                if outer is inner:
                    if ruled or producer.target in in_rules:
                        candidates[name] = None
                    continue
                candidates[name] = None
                depth = common_depth(outer, inner)
                if depth < len(outer):
                    self.results.setdefault(outer[: depth + 1], set()).add(name)
                later = depth < len(inner) and first.setdefault(inner[: depth + 1], name) != name
                # a module that reads what it returned from its previous call: the name takes the new result
                if later and (depth >= len(outer) or outer[depth].path != inner[depth].path):
                    self.later_arguments.add(name)
            for name in op.outputs:
                producers[name] = op

    def frames(self) -> dict[str, int]:
        """The values that a frame holds until it returns, with its depth."""
        held = self._filled_in_parts()
        readers, later_arguments = self.last_readers, self.later_arguments
        for name in self.candidates:
            producer, last = self.producers[name], readers.get(name)
            if last is None:
                continue
            outer, inner = producer.modules, last.modules
            depth = (len(outer) if outer is inner else common_depth(outer, inner)) - 1
            if depth < 0:
                continue
            has_name = name in later_arguments
            kinds = kinds_of(producer.base) | kinds_of(last.base)
            if "split" not in kinds and producer.base not in _IN_RULES and last.base not in _IN_RULES:
                # rule 8 alone may apply
                if has_name or (len(outer) > depth + 1 and _is_model(outer[depth + 1])):
                    held[name] = depth
                continue
            if "split" in kinds_of(producer.base) and len(producer.outputs) > 1:
                held[name] = len(outer) - 1
                continue
            if has_name or self._has_name(name, producer, last, depth):
                held[name] = depth
            elif last.base in JOINS and len(last.refs()) > 2 and not self._are_written_within(last):
                held[name] = len(last.modules) - 1  # the list lives where it is joined
        return held

    def _are_written_within(self, join: Op) -> bool:
        """Whether the parts of a join are few that its frame made by an op each, of nothing that another made
        (`cat([h[src], h[dst], e])`): they are no list."""
        parts = [self.producers[name] for name in join.refs() if name in self.producers]
        own = [op for op in parts if op.modules is join.modules or op.modules == join.modules]
        results = {name for op in own for name in op.outputs}
        apart = all(results.isdisjoint(op.refs()) for op in own)
        return len(own) == len(parts) <= _MOST_WRITTEN_WITHIN and apart

    def _filled_in_parts(self) -> dict[str, int]:
        """Tensors that a module makes to assign to their parts, and the depth of its frame."""
        held: dict[str, int] = {}
        for op in self.graph.ops:
            target = op.args[0] if "assignment" in kinds_of(op.base) else None
            source = self.producers.get(target.name) if isinstance(target, Ref) else None
            for _ in range(_MOST_VIEWS):
                if source is None or "part" not in kinds_of(source.base):
                    break
                target = source.args[0] if source.args else None
                source = self.producers.get(target.name) if isinstance(target, Ref) else None
            if source is not None and "factory" in kinds_of(source.base) and source.outputs[0] in self.last_readers:
                depth = common_depth(source.modules, op.modules) - 1
                if depth >= 0:
                    held[source.outputs[0]] = depth
                else:
                    held.pop(source.outputs[0], None)
        return held

    def until(self) -> dict[str, int]:
        """Values that a module call reads last, whose result goes straight into a product of the caller's: the index of
        that product."""
        products = self._products_of_calls()
        until: dict[str, int] = {}
        for name, producer in self.producers.items() if products else ():
            last = self.last_readers.get(name)
            if last is None:
                continue
            depth = common_depth(producer.modules, last.modules)
            product = products.get(last.modules[: depth + 1]) if 0 < depth < len(last.modules) else None
            if product is not None and name not in self.graph.ops[product].refs():
                until[name] = product
        return until

    def _products_of_calls(self) -> dict[Stack, int]:
        """Module calls whose result only a product of the calling module reads: index of that product."""
        products: dict[Stack, int] = {}
        if "aten::mul" not in bases_of(self.graph.ops):
            return products
        index = {id(op): i for i, op in enumerate(self.graph.ops)}
        for name, producer in self.producers.items():
            reader = self.last_readers.get(name)
            if reader is not None and name not in self.shared and reader.base == "aten::mul":
                depth = len(reader.modules)
                if len(producer.modules) > depth and producer.modules[:depth] == reader.modules:
                    products[producer.modules[: depth + 1]] = index[id(reader)]
        return products

    def _has_name(self, name: str, producer: Op, last: Op, depth: int) -> bool:
        """Rules 1, 2, 4 and 8."""
        read_by = last.base
        if read_by in _PRODUCTS:
            return True
        made_here = len(producer.modules) == depth + 1
        if made_here and len(last.modules) > depth + 1 and producer.base in _NAMED_FOR_CHILDREN:
            return producer.base == "aten::matmul" or read_by == "aten::batch_norm"
        if read_by in _PAIRS and (self._is_pair(name, last) or _starts_sum(last)):
            return True
        if read_by == "aten::mul" and name in self.shared and len(last.modules) == depth + 1:
            return True
        if producer.base == "aten::embedding":
            # not what a model returns: the TorchScript exporter merges equal lookups (encoder and decoder with tied
            # embeddings and the same ids), so that one of them is read in both
            return False
        return len(producer.modules) > depth + 1 and _is_model(producer.modules[depth + 1])

    def _is_pair(self, name: str, op: Op) -> bool:
        """Both operands are results of child modules, used once; or this is the second one and the first is local."""
        first, second = (*op.args[:2], None, None)[:2]
        if not isinstance(first, Ref) or not isinstance(second, Ref) or not self._is_childs(second.name, op):
            return False
        call = self._call_of_list(second.name, op)
        if self._is_childs(first.name, op):
            return not call or call != self._call_of_list(first.name, op)
        first_is_local = first.name in self.last_readers and first.name not in self.shared
        return name == second.name and first_is_local and not (call and self.producers[first.name].base in _TOTALS)

    def _call_of_list(self, name: str, op: Op) -> str:
        """The list of modules one of which returned only this value to the module of a sum; "" where none did.

        `total = total + self.blocks[i](x)` names the total alone. Of several results each has a name:
        `x, skip = block(x); total = total + skip`.
        """
        call = self.producers[name].modules[: len(op.modules) + 1]
        path, _, number = call[-1].path.rpartition(".")
        return path if number.isdigit() and op.base == "aten::add" and len(self.results[call]) == 1 else ""

    def _is_childs(self, name: str, op: Op) -> bool:
        """A result of a module that the op's module calls, which nothing else reads."""
        producer = self.producers.get(name)
        if producer is None or name not in self.last_readers or name in self.shared:
            return False
        return len(producer.modules) > len(op.modules) and producer.modules[: len(op.modules)] == op.modules


def _starts_sum(op: Op) -> bool:
    """`branch + 0`: a sum over branches whose first ones are absent (RepVGG, MobileOne), so branches have names."""
    return op.base == "aten::add" and len(op.args) > 1 and type(op.args[1]) in (int, float) and op.args[1] == 0


def changes_weights(base: str) -> bool:
    """Whether an op makes weights of weights: by another number, or where a mask says so."""
    return base == "aten::mul" or not kinds_of(base).isdisjoint(("dropout", "masking"))


def attention_weights(graph: Graph) -> set[str]:
    """Results of softmax, and what dropout makes of them, that a matrix product reads."""
    source_of: dict[str, str] = {}  # what becomes of the results of softmax -> what it was made from
    weights: set[str] = set()
    for op in graph.ops:
        if "softmax" in kinds_of(op.base):
            source_of[op.outputs[0]] = ""
        elif changes_weights(op.base):
            source = next((name for name in op.refs() if name in source_of), None)
            if source is not None:
                source_of[op.outputs[0]] = source
        elif op.base in FREE_PRODUCTS:
            for name in op.refs():
                while name in source_of:
                    weights.add(name)
                    name = source_of[name]
    return weights
