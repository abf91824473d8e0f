"""ATen calls of a dynamo export: every ONNX node carries the text of the FX node that it was made from.

All nodes that one ATen call was decomposed into share its text, so an op is a group of nodes with one text. Symbolic
integers (`sym_size`, arithmetic on it) are evaluated here, because every size is known once dimensions are bound.
Groups whose text is missing or refers to something that an optimiser removed are translated node by node instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from staticmem.ir.dtypes import DType
from staticmem.ir.graph import NO_KWARGS, Arg, Frame, Note, Op, Ref, Value, collect_refs
from staticmem.ir.onnx_graph import Net, Node, Translated, frames
from staticmem.ir.stacks import common_depth, source_lines
from staticmem.ops.registry import kinds_of, parameters
from staticmem.passes.restoring import fx_text

if TYPE_CHECKING:
    from staticmem.passes.restoring.from_nodes import Translator

_UPDATING = ("aten::_native_batch_norm_legit_functional", "aten::_batch_norm_with_update_functional")
_ONE_AXIS = ("aten::unsqueeze", "aten::squeeze.dim")
_ASSIGNED = re.compile(r"aten\.(?:slice|select)_scatter\.default\]\(args = \(%(\w+),")  # `x` of `x[a:b] = y`
# names of calls that make no tensor of weight, or that are put back: views, numbers, factories, placeholders
_FREE = re.compile(
    r"(?:getitem|scalar_tensor|clone|copy|contiguous|alias|detach|lift|fill|new_|full|zeros|ones|empty|arange|sym_|select"
    r"|slice|view|_unsafe_view|reshape|expand|permute|transpose|t$|t_\d|unsqueeze|squeeze|split|unsafe_split|chunk|unbind|_to_copy"
    r"|[pbc]_)"
)
_COPIED = re.compile(r"\.(contiguous|clone)\([^()]*\)\s*(?:#.*)?$")  # what a line does last
# a number on the host, whose nodes are views: what is computed with it are nodes that read them, as its value is data
_NUMBERS_OF_DATA = ("aten::_local_scalar_dense", "aten::item")
MAX_WITHIN = 64  # nodes within one call


class _UnresolvedError(Exception):
    """The text names something that the graph no longer has."""


def translate(net: Net, without: Collection[str] = ()) -> Translated:
    """The ATen ops of a graph whose nodes have FX texts. `without`: names of groups that are not looked for."""
    groups = _groups(net.nodes)
    builder = _Builder(net)
    for nodes in groups:
        builder.add(nodes)
    if builder.failed:  # once more, with the failed groups' nodes regrouped by patterns
        from staticmem.passes.restoring.patterns import find

        net.filled()
        failed = builder.failed
        builder = _Builder(net)
        builder.matches = find(builder.translator.ctx, net.nodes, frames, failed, without)[0]
        for nodes in groups:
            builder.add(nodes)
    outputs = tuple(builder.lives_as(name) for name in net.outputs)
    return Translated(
        with_lines(builder.ops), outputs, (), builder.notes(), builder.transposed, builder.restored, builder.added
    )


def _groups(nodes: Iterable[Node]) -> list[list[Node]]:
    """Nodes by text, in the order of the last node of each: all that it needs exists then."""
    groups: dict[str, list[Node]] = {}
    last: dict[str, int] = {}
    for index, node in enumerate(nodes):
        key = node.fx or f"#{index}"
        groups.setdefault(key, []).append(node)
        last[key] = index
    return [groups[key] for key in sorted(groups, key=last.__getitem__)]


class _Builder:
    def __init__(self, net: Net) -> None:
        self.net = net
        self.transposed: set[str] = set()  # 2-D weights that the file stores as [in, out]
        self.ops: list[Op] = []
        self.env: dict[str, Arg] = {}  # FX names: a Ref, an integer, or a tuple for list results
        self.defined: set[str] = {*net.inputs, *net.weights, *net.consts, *net.values} - {
            name for node in net.nodes for name in node.outputs
        }
        self.modules = {name for name in net.aliases.values() if name in self.defined}
        self.tensors = self.defined - set(net.inputs)
        self.restored: dict[str, str] = {}
        self.lists: dict[str, int] = {}  # FX name of a list result -> index of its op
        self.fallbacks = 0
        self.unfolded = 0
        self.failed: set[int] = set()
        self.matches: dict[int, list[Op]] = {}
        self.index = {id(node): i for i, node in enumerate(net.nodes)}
        self.added: dict[str, Value] = {}  # parameters that an optimiser merged with equal ones
        self.lost: set[str] = set()  # names in texts that nothing makes
        self.copied: dict[str, str] = {}  # clones and equal tensors that an optimiser left out, and of what
        self.assigned = {match[1] for node in net.nodes if (match := _ASSIGNED.search(node.fx))}
        self.numbers = fx_text.numbers(net.consts)
        self.inner = {name: node for node in net.nodes for name in node.outputs if name}
        self.users: dict[str, set[str]] = {}
        for node in net.nodes:
            for name in node.inputs:
                self.users.setdefault(name, set()).add(node.fx)
        for name in net.outputs:
            self.users.setdefault(name, set()).add("\n")

    @cached_property
    def translator(self) -> Translator:
        """Translates single nodes, which most graphs with texts have no need of."""
        from staticmem.passes.restoring.from_nodes import Translator

        translator = Translator(self.net)
        translator.ctx.transposed = self.transposed
        return translator

    def notes(self) -> list[Note]:
        """What a reader should know of the translation."""
        notes = []
        if self.unfolded:
            text = "BatchNorms that the export folded into convolutions were put back from its metadata"
            notes.append(Note("assumption", "SM260", text, self.unfolded))
        if self.fallbacks:
            text = "nodes that the exporter changed after tracing were translated from their ONNX operators"
            notes.append(Note("regrouped", "SM251", text, self.fallbacks))
        lost = sum(not _FREE.match(name) for name in self.lost)
        if lost:
            text = (
                "calls that the exporter's optimiser merged with equal ones or left out, and PyTorch runs: "
                "the peak may be too low, or too high where parts of a loss could not be put together for it"
            )
            notes.append(Note("warning", "SM271", text, lost))
        return notes

    def lives_as(self, name: str) -> str:
        arg = self.env.get(name)
        return arg.name if isinstance(arg, Ref) else name

    def add(self, nodes: list[Node]) -> None:
        text = nodes[-1].fx
        if not text:
            self._fall_back(nodes)
            return
        try:
            self._add(fx_text.parse(text), nodes)
        except (fx_text.FxTextError, _UnresolvedError):
            self._fall_back(nodes)

    def _add(self, fx: fx_text.FxNode, nodes: list[Node]) -> None:
        if fx.target.split(".", 1)[0] in _NUMBERS_OF_DATA:
            raise _UnresolvedError
        if fx.target == "operator::getitem":
            self._getitem(fx, nodes)
            return
        if fx_text.is_folded_norm(fx, nodes[-1]):
            self._unfold(fx, nodes[-1])
            return
        self._restore_norm_arguments(fx, nodes)
        self._restore(fx, nodes)
        self._restore_in_another_form(fx, nodes)
        self._merged(fx, nodes)
        if self.normed:
            self._weight_norm(fx, nodes[-1])
        args = tuple(self._resolve(a) for a in fx.args)
        if fx.target.removesuffix(".default") in _ONE_AXIS and fx_text.joins_axes(args, nodes[-1], self.net):
            raise _UnresolvedError
        kwargs = {k: self._resolve(v) for k, v in fx.kwargs.items()} if fx.kwargs else NO_KWARGS
        if fx_text.is_symbolic(fx.target):
            number = fx_text.evaluate(fx.target, args, self.net)
            if number is None:
                raise _UnresolvedError
            self.env[fx.name] = number
            for name in nodes[-1].outputs:
                self.env[name] = number
            return
        if all(n.op == "Constant" for n in nodes) and not _makes_constant(fx.target):
            return  # a dead op, such as num_batches_tracked + 1: its constants stay because others share them
        base = fx.target.split(".", 1)[0]
        if base in _UPDATING:
            nodes = self._without_updates(nodes)
        outputs = self._name_recurrent_results(args, nodes) if "recurrent" in kinds_of(base) else ()
        outputs = outputs or self._results(nodes, base)
        last = nodes[-1]
        stack = source_lines(last.stack)
        op = Op(fx.name, fx.target, args, kwargs, outputs, frames(last), last.op, stack)
        op = fx_text.as_called(op, nodes, self.net)
        if self.numbers:
            op = fx_text.with_numbers(op, self.numbers)
        if self.net.rebound:
            op = fx_text.resized(op, self.net)
        if "split" in kinds_of(op.base):
            self.lists[fx.name] = len(self.ops)
            op = replace(op, outputs=self._list_names(op, nodes))
            self.env[fx.name] = tuple(Ref(n) for n in op.outputs)
        elif len(outputs) == 1:
            self.env[fx.name] = Ref(outputs[0])
        self.defined.update(op.outputs)
        self.ops.append(op)

    def _without_updates(self, nodes: list[Node]) -> list[Node]:
        """The nodes of a batch norm without those that stand for its new statistics, which the next call of the module
        reads: eager writes them where the old ones are."""
        copies = [
            n for n in nodes if n.op == "Identity" and n.outputs and n.inputs[:1] and n.inputs[0] in self.net.weights
        ]
        kept = [node for node in nodes if not any(node is copy for copy in copies)]
        for node in copies if kept else ():
            self.env[node.outputs[0]] = Ref(node.inputs[0])
        return kept or nodes

    def _positions(self, base: str, nodes: list[Node]) -> tuple[str, ...]:
        """Results of a call that gives several tensors, with names in the place of those that nobody reads."""
        last = nodes[-1]
        text = nodes[-1].fx
        if "recurrent" not in kinds_of(base):
            used = [any(u != text for u in self.users.get(n, ())) for n in last.outputs]
            count = max((i + 1 for i, u in enumerate(used) if u), default=0)
            return tuple(n or f"{last.name}::{i}" for i, n in enumerate(last.outputs[:count]))
        names = sorted(self._group_results(nodes), key=fx_text.number_of)
        names = [n for n in names if n.startswith("getitem")]
        single = f"{last.name or last.outputs[0]}::output"
        if names and len(names) < (3 if base == "aten::lstm" else 2):  # of the output and the states, some are not read
            output = len(self.net.shape(names[0]) or ())
            state = self.net.shape(names[0])
            hidden = last.attrs.get("hidden_size")
            layers = state is not None and output == 3 and last.op in ("LSTM", "GRU", "RNN") and last.outputs[0] == ""
            if layers and hidden:
                return (single, *names)
        return tuple(names)

    def _name_recurrent_results(self, args: tuple[Arg, ...], nodes: list[Node]) -> tuple[str, ...]:
        """Output and states of a recurrent layer by their shapes; () where those do not tell them apart.

        Of the tuple only what is read has a name in the file: often the states alone.
        """
        if len(args) < 9 or not isinstance(args[0], Ref) or type(args[4]) is not int:
            return ()
        given = self.net.shape(args[0].name) or ()
        count = args[4] * (2 if args[7] else 1)
        names = sorted((n for n in self._group_results(nodes) if n.startswith("getitem")), key=fx_text.number_of)
        if len(given) != 3 or not names:
            return ()
        batch = given[0 if args[8] else 1]
        states = [n for n in names if (self.net.shape(n) or ())[:2] == (count, batch)]
        outputs = [n for n in names if (self.net.shape(n) or ())[:2] == tuple(given[:2])]
        if len(outputs) > 1 or set(outputs) & set(states) or len(outputs) + len(states) != len(names):
            return ()
        return (*(outputs or [f"{nodes[-1].name or names[0]}::output"]), *states)

    def _results(self, nodes: list[Node], base: str) -> tuple[str, ...]:
        """Results of the last node that other groups (or the caller) read; all of them where nobody does."""
        last = next((n for n in reversed(nodes) if n.op != "Constant"), nodes[-1])  # constants are shared by groups
        if "recurrent" in kinds_of(base) or len([n for n in last.outputs if n]) > 1:
            positions = self._positions(base, nodes)
            if positions:
                return positions
        used = tuple(n for n in last.outputs if n and any(u != last.fx for u in self.users.get(n, ())))
        return used or tuple(n for n in last.outputs if n)

    def _list_names(self, op: Op, nodes: list[Node]) -> tuple[str, ...]:
        """Names of the tensors of a list: those that the nodes of the group give it, else new ones."""
        count = fx_text.list_length(op, self.net)
        names = [f"{op.name}.{i}" for i in range(count)]
        if len(nodes[-1].outputs) == count and count > 1:
            return tuple(given or name for given, name in zip(nodes[-1].outputs, names, strict=True))
        given = [n for n in self._group_results(nodes) if n.startswith("getitem")]
        return (*given, *names[len(given) :]) if len(given) <= count else tuple(names)

    def _group_results(self, nodes: list[Node]) -> list[str]:
        """Results of all nodes of a group that other groups read, in order."""
        text = nodes[-1].fx
        return [n for node in nodes for n in node.outputs if n and any(u != text for u in self.users.get(n, ()))]

    def _getitem(self, fx: fx_text.FxNode, nodes: list[Node]) -> None:
        source = fx.args[0]
        index = fx.args[1]
        if not isinstance(source, Ref) or not isinstance(index, int):
            raise _UnresolvedError
        items = self.env.get(source.name)
        if not isinstance(items, tuple) or not -len(items) <= index < len(items):
            raise _UnresolvedError
        item = items[index]
        outputs = nodes[-1].outputs
        position = self.lists.get(source.name)
        if position is not None and outputs and isinstance(item, Ref):
            op = self.ops[position]
            names = tuple(outputs[0] if n == item.name else n for n in op.outputs)
            self.ops[position] = replace(op, outputs=names)
            item = Ref(outputs[0])
            self.env[source.name] = tuple(Ref(n) for n in names)
            self.defined.add(outputs[0])
        self.env[fx.name] = item

    def _resolve(self, arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(self._resolve(a) for a in arg)
        if not isinstance(arg, Ref):
            return arg
        if not self._names(arg.name):
            raise _UnresolvedError
        return self._argument(arg.name)

    def _names(self, name: str) -> bool:
        """Whether a name of a text still means something."""
        return self.env.get(name) is not None or self.net.aliases.get(name) in self.defined or name in self.defined

    def _argument(self, name: str) -> Arg:
        arg = self.env.get(name)
        if arg is not None:
            return arg
        alias = self.net.aliases.get(name)
        return Ref(alias if alias is not None and alias in self.defined else name)

    def _unfold(self, fx: fx_text.FxNode, node: Node) -> None:
        from staticmem.passes.restoring.batch_norms import unfold

        unfolded = unfold(self.net, self.translator.ctx, fx, node)
        if unfolded is None:
            raise _UnresolvedError
        ops, added = unfolded
        for name, value in added.items():
            if name not in self.defined:
                self.added[name] = value
        self.ops.extend(ops)
        self.unfolded += 1
        self.env[fx.name] = Ref(node.outputs[0])
        self.defined.update(node.outputs)

    def _restore_norm_arguments(self, fx: fx_text.FxNode, nodes: list[Node]) -> None:
        """Arguments of a batch norm that an optimiser took for equal ones: a module's tensors that are merged with
        others exist in eager, and new statistics are the old ones (`_without_updates`)."""
        node = next((node for node in nodes if node.op == "BatchNormalization"), None)
        if node is None or len(node.inputs) < 5:
            return
        for arg, tensor in zip(fx.args[1:5], node.inputs[1:5], strict=False):
            if not isinstance(arg, Ref) or self._names(arg.name) or tensor not in self.defined:
                continue
            name = self.net.aliases.get(arg.name)
            value = self.net.values.get(tensor)
            if name is None:
                self.env[arg.name] = Ref(tensor)
            elif value is not None and tensor in self.modules:
                self.added[name] = Value(name, value.dtype, value.shape)
                self.env[arg.name] = Ref(name)

    def _restore(self, fx: fx_text.FxNode, nodes: list[Node]) -> None:
        """Parameters that an optimiser replaced by a transposed or reshaped copy under a new name.

        Their place tells: the group reads as many other tensors of the file as its text has names that are gone.
        """
        lost: list[str] = []
        for arg in (*fx.args, *fx.kwargs.values()):
            name = self.net.aliases.get(arg.name) if isinstance(arg, Ref) and arg.name not in self.env else None
            if isinstance(arg, Ref) and name is not None and name not in self.defined:
                lost.append(arg.name)
        if not lost or fx.target == "aten::bilinear":
            return
        args = [arg.name for arg in fx.args if isinstance(arg, Ref)]
        named = {*args, *map(self.net.aliases.get, args)}  # a result that the exporter stored has the name of its call
        own = [
            node for node in nodes if node.op != "InstanceNormalization"
        ]  # it stands for a group norm: ones and zeros
        tensors = [n for node in own for n in node.inputs if n in self.tensors and n not in named]
        tensors = [n for n in dict.fromkeys(tensors) if self._may_be_weight(n)]
        if len(tensors) < len(lost) and not self._bias(fx, nodes, lost[len(tensors) :]):
            raise _UnresolvedError
        for placeholder, tensor in zip(lost, tensors, strict=False):
            name = self.net.aliases[placeholder]
            if tensor in self.modules or self.restored.get(tensor, name) != name:
                value = self.net.values[tensor]  # merged with an equal one: eager has both
                self.added[name] = Value(name, value.dtype, value.shape)
                self.copied[name] = tensor
                self.env[placeholder] = Ref(name)
                continue
            self.env[placeholder] = Ref(tensor)
            self.restored[tensor] = name
            reader = next(node for node in nodes if tensor in node.inputs)
            plain = reader.op == "MatMul" or (reader.op == "Gemm" and not reader.attrs.get("transB", 0))
            if fx.target == "aten::linear" and plain and len(self.net.shape(tensor) or ()) == 2:
                self.transposed.add(tensor)

    def _restore_in_another_form(self, fx: fx_text.FxNode, nodes: list[Node]) -> None:
        """Tensors of the module that the file has with other axes: indices are stacked, a weight is permuted."""
        refs: list[str] = []
        collect_refs((*fx.args, *fx.kwargs.values()), refs)
        lost = [name for name in dict.fromkeys(refs) if name in self.net.aliases and not self._names(name)]
        values = fx_text.in_another_form(fx, lost, nodes, self.net) if lost else ()
        for placeholder, value in zip(lost, values, strict=False):
            name = self.net.aliases[placeholder]
            self.added[name] = Value(name, value.dtype, value.shape)
            self.env[placeholder] = Ref(name)

    def _merged(self, fx: fx_text.FxNode, nodes: list[Node]) -> None:
        """An argument whose maker an optimiser merged with an equal one, or left out: the group reads one tensor
        besides those that its text names."""
        refs: list[str] = []
        collect_refs((*fx.args, *fx.kwargs.values()), refs)
        lost = [name for name in dict.fromkeys(refs) if not self._names(name)]
        self.lost.update(lost)
        for name, tensor in fx_text.in_order(fx, lost, nodes):
            if tensor in self.defined:
                self.env[name] = Ref(self._twin(name, tensor, nodes[0]))
        if len(lost) != 1 or fx_text.is_symbolic(fx.target) or not nodes[-1].outputs:
            return
        if lost[0].startswith(("pad", "constant_pad_nd")) and self._padded(lost[0], fx, nodes):
            return
        clone = lost[0].startswith("clone")
        copies = clone and self._copies(nodes)
        if clone and lost[0] not in self.assigned and not copies:
            return  # what a clone is depends on who asks for it: `contiguous`, `reshape`, a dropout of nothing
        named = {arg.name for name in refs if isinstance(arg := self._argument(name), Ref)}
        named |= {self.copied[name] for name in named if name in self.copied}
        results = {name for node in nodes for name in node.outputs}
        read = [self._seen(name) for node in nodes for name in node.inputs if name and name not in results]
        read = [name for name in read if name not in named]
        tensors = [n for n in dict.fromkeys(read) if n in self.defined and self._may_be_operand(n)]
        dtype = self._dtype(nodes[-1].outputs[0])
        if len(tensors) > 1:  # indices among them
            tensors = [n for n in tensors if self._dtype(n) == dtype]
        if len(tensors) != 1:
            return
        self.env[lost[0]] = Ref(self._twin(lost[0], tensors[0], nodes[-1]))
        if clone:  # `x = y.clone()`, so that parts of it may be assigned
            last = nodes[-1]
            name = f"{lost[0]}::copy"
            keeps = {"memory_format": "torch.contiguous_format" if copies == "contiguous" else "torch.preserve_format"}
            op = Op(name, "aten::clone", (Ref(tensors[0]),), keeps, (name,), frames(last), "", source_lines(last.stack))
            self._put_clone(op, tensors[0], same_line=bool(copies))
            self.defined.add(name)
            self.copied[name] = tensors[0]
            self.env[lost[0]] = Ref(name)

    def _twin(self, name: str, tensor: str, reader: Node) -> str:
        """The result of a call that an optimiser left out or merged with an equal one, whose result the reader has now:
        eager runs it. It was merged if its name is that of the same op (`layer_norm_3` of `layer_norm_1`)."""
        op = next((op for op in reversed(self.ops) if tensor in op.outputs), None)
        base = fx_text.base_of(name)
        around = frames(reader)
        stack = source_lines(reader.stack)
        if around and around[-1].cls.startswith("torch.nn.modules."):  # its caller makes what it reads
            around = around[:-1]
            stack = stack[:-1]
        if op is not None and base == fx_text.base_of(tensor) and "view" not in kinds_of(op.base):
            outputs = tuple(f"{name}::{n}" if n != tensor else name for n in op.outputs)
            call = replace(op, name=name, outputs=outputs, modules=around, stack=stack)
        elif op is not None and op.base == "aten::expand" and base in ("view", "_unsafe_view"):
            # axes that are merged with a repeated one are copied (`einops.repeat`); the next view has taken this one in
            keeps = {"memory_format": "torch.contiguous_format"}
            call = Op(name, "aten::clone", (Ref(tensor),), keeps, (name,), op.modules, "", op.stack)
        elif base == "detach":  # no kernel, but no gradient passes it
            call = Op(name, "aten::detach", (Ref(tensor),), {}, (name,), around, "", stack)
        elif base == "cat":  # of a list that has one tensor
            call = Op(name, "aten::cat", ((Ref(tensor),),), {}, (name,), around, "", stack)
        else:
            return tensor
        self.ops.append(call)
        self.defined.add(name)
        return name

    @cached_property
    def normed(self) -> dict[str, tuple[str, str]]:
        """Modules whose small weights weight_norm made and an optimiser computed: direction and length of each."""
        return fx_text.computed_weights(set(self.net.aliases.values()), self.defined)

    def _weight_norm(self, fx: fx_text.FxNode, node: Node) -> None:
        """Puts the call of weight_norm before the op of its module, which reads its stored result."""
        around = frames(node)
        direction, length = self.normed.get(around[-1].path if around else "", ("", ""))
        for arg in fx.args[1:2] if direction else ():
            value = self.net.values.get(arg.name) if isinstance(arg, Ref) else None
            shape = value.shape if value is not None else None
            if value is None or not shape or value.name not in self.tensors or value.name in self.modules:
                continue
            self.added[direction] = Value(direction, value.dtype, shape)
            self.added[length] = Value(length, value.dtype, (shape[0], *(1 for _ in shape[1:])))
            parametrized = direction.endswith(fx_text.PARAMETRIZED[0])
            inner = (Frame(direction.removesuffix(".original1") + ".0"),) if parametrized else ()
            result = f"{direction}::normed"
            call = (Ref(direction), Ref(length))
            op = Op(
                result, "aten::_weight_norm", call, {}, (result,), (*around, *inner), "", source_lines(node.stack)[:-1]
            )
            self.ops.append(op)
            self.defined.update((direction, length, result))
            self.env[value.name] = Ref(result)

    def _padded(self, name: str, fx: fx_text.FxNode, nodes: list[Node]) -> bool:
        """Puts a padding of zeros back that an optimiser made part of a convolution."""
        node = next((node for node in nodes if node.op == "Conv"), None)
        padding = fx_text.padding_within(fx.args, node, self.net) if node is not None else None
        if node is None or padding is None:
            return False
        result = f"{name}::pad"
        if result not in self.defined:
            around = frames(node)
            if around and around[-1].cls.startswith("torch.nn.modules."):
                around = around[:-1]
            index = fx_text.before(self.ops, node.inputs[1])  # a parametrization runs after it
            call = (Ref(node.inputs[0]), padding, 0.0)
            self.ops.insert(index, Op(name, "aten::constant_pad_nd", call, {}, (result,), around))
            self.lists = {key: at + (at >= index) for key, at in self.lists.items()}
            self.defined.add(result)
        self.env[name] = Ref(result)
        return True

    def _copies(self, nodes: list[Node]) -> str:
        """`contiguous` or `clone` where the line that makes the one operand of these nodes ends by calling it."""
        results = {name for node in nodes for name in node.outputs}
        read = {name for node in nodes for name in node.inputs if name and name not in results}
        maker = next((op for op in reversed(self.ops) if not read.isdisjoint(op.outputs)), None)
        if maker is None or not maker.stack or "view" not in kinds_of(maker.base):
            return ""
        match = _COPIED.search(maker.stack[-1].text)
        return match[1] if match is not None else ""

    def _put_clone(self, clone: Op, source: str, same_line: bool = False) -> None:
        """`h = f(x).clone()`: where the line that made a value copies it, that line's name is the copy's, and the value
        is gone when the line is done. Else the copy has the line of its reader, before which it is made."""
        index = next((i for i in range(len(self.ops) - 1, -1, -1) if source in self.ops[i].outputs), -1)
        maker = self.ops[index]
        around = enumerate(zip(maker.modules, clone.modules, strict=False))
        depth = next((i for i, (x, y) in around if x != y), min(len(maker.modules), len(clone.modules)))
        stack = maker.stack[: max(len(maker.stack) - len(maker.modules) + depth, 0)]
        if same_line:
            depth = len(maker.modules)
            stack = maker.stack
        elif index < 0 or not stack or ".clone(" not in stack[-1].text:
            self.ops.append(clone)
            return
        self.ops.insert(index + 1, replace(clone, modules=maker.modules[:depth], stack=stack))
        self.lists = {name: at + (at > index) for name, at in self.lists.items()}

    def _seen(self, name: str) -> str:
        """The value of a call that another one's node only rearranges: two calls on one tensor share such nodes."""
        node = self.inner.get(name)
        while name not in self.defined and node is not None and node.op in ("Transpose", "Unsqueeze", "Squeeze"):
            name = node.inputs[0]
            node = self.inner.get(name)
        return name

    def _dtype(self, name: str) -> DType | None:
        value = self.net.values.get(name)
        return value.dtype if value is not None else None

    def _may_be_operand(self, name: str) -> bool:
        """Whether a value may be an argument of an ATen call: sizes, axes and indices are integers of the file."""
        value = self.net.values.get(name)
        return value is not None and (value.dtype.is_floating_point or name not in self.net.consts)

    def _bias(self, fx: fx_text.FxNode, nodes: list[Node], lost: list[str]) -> bool:
        """A bias of zeros was dropped. Its size is that of the channels, or of a linear layer's features."""
        if len(lost) != 1 or not self.net.aliases[lost[0]].endswith("bias"):
            return False
        shape = self.net.shape(nodes[-1].outputs[0])
        value = self.net.values.get(nodes[-1].outputs[0])
        if shape is None or value is None or len(shape) < 2:
            return False
        name = self.net.aliases[lost[0]]
        size = shape[1] if fx.target.startswith("aten::conv") else shape[-1]
        self.added[name] = Value(name, value.dtype, (size,))
        self.env[lost[0]] = Ref(name)
        return True

    def _may_be_weight(self, name: str) -> bool:
        value = self.net.values.get(name)
        return value is not None and value.dtype.is_floating_point and value.numel > 1

    def _within(self, name: str) -> None:
        """Makes a value that only exists within another call, but which a node reads: an optimiser merged a call with a
        part of that one, and eager runs both."""
        pending = [name]
        while pending:
            node = self.inner.get(pending[-1])
            missing = [n for n in node.inputs if n and n not in self.defined and n in self.inner] if node else []
            if missing and len(pending) < MAX_WITHIN:
                pending += missing
                continue
            waiting = pending.pop()
            if node is not None and waiting not in self.defined:
                ops = self.translator.node(node, frames(node))
                self.ops += ops
                self.defined.update(n for op in ops for n in op.outputs)
                self.defined.add(waiting)

    def _fall_back(self, nodes: list[Node]) -> None:
        self.net.filled()
        own = {name for node in nodes for name in node.outputs}
        for node in nodes:
            index = self.index[id(node)]
            for name in node.inputs:
                if name and name not in self.defined and name not in own and name not in self.net.consts:
                    self._within(name)
            self.failed.add(index)
            ops = self.matches.get(index)
            ops = ops if ops is not None else self.translator.node(node, frames(node))
            stack = source_lines(node.stack)
            ops = [replace(op, stack=stack) if stack and not op.stack else op for op in ops]
            ops = [fx_text.as_written(op, node.fx) for op in ops]
            self.fallbacks += bool(ops)
            self.ops.extend(ops)
            for op in ops:
                self.defined.update(op.outputs)
            for name in node.outputs:
                self.defined.add(name)
                number = self.net.ints(name)
                if number is not None and len(number) == 1 and not self.net.consts[name].shape:
                    self.env[name] = number[0]


def _makes_constant(target: str) -> bool:
    """Whether an op makes a tensor of numbers alone, which an optimiser folds into one constant."""
    base = target.split(".", 1)[0]
    is_factory = "factory" in kinds_of(base) and "self" not in parameters(base)
    return is_factory or base in ("aten::arange", "aten::tensor")


_SPLITS = re.compile(r"\b(?:chunk|split|unbind|tensor_split|hsplit|vsplit)\(")


def with_lines(ops: Sequence[Op]) -> list[Op]:
    """The ops, in which a split without modules has those of its first reader, and the line that says so: the reader's,
    or the one in the same module that made what it splits. A `SequenceAt` of a `SplitToSequence` becomes an output of
    a `Split` without metadata (onnxscript/optimizer/_constant_folding.py, `sequence_at`)."""
    if all(op.modules or op.stack or "split" not in kinds_of(op.base) for op in ops):
        return list(ops)
    makers = {name: op for op in ops for name in op.outputs}
    readers: dict[str, Op] = {}
    for op in ops:
        for name in op.refs():
            readers.setdefault(name, op)
    return [_take_lines_of_reader(op, makers, readers) for op in ops]


def _take_lines_of_reader(op: Op, makers: dict[str, Op], readers: dict[str, Op]) -> Op:
    if op.modules or op.stack or "split" not in kinds_of(op.base):
        return op
    reader = next((readers[name] for name in op.outputs if name in readers), None)
    if reader is None or not reader.modules:
        return op
    modules = reader.modules
    stack = reader.stack
    maker = next((makers[name] for name in op.refs() if name in makers), None)
    if maker is not None and maker.stack:
        depth = common_depth(maker.modules, modules)
        before = maker.stack[: len(maker.stack) - len(maker.modules) + depth]
        says = before and _SPLITS.search(before[-1].text) and not (stack and _SPLITS.search(stack[-1].text))
        if says or depth < len(modules):
            modules = modules[:depth]
            stack = before
    return replace(op, modules=modules, stack=stack) if modules else op
