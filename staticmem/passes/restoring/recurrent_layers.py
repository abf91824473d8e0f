"""Recurrent layers of ONNX files, and single steps of them, as the calls that they were.

ONNX has an operator for each layer, so exporters write one after the other, each with its part of the first states and
of the weights, whose gates ONNX has in another order (torch/onnx/_internal/torchscript_exporter/symbolic_opset9.py,
`_generic_rnn`; onnxscript/function_libs/torch_lib/ops/core.py, `aten_lstm`). On CUDA one call runs all of them:
`nn.LSTM(num_layers=2)` is one `_cudnn_rnn` (aten/src/ATen/native/cudnn/RNN.cpp), and what is between layers is in
cuDNN's reserve.

A step (`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`) is taken apart. On CUDA the two products are followed by one fused
kernel, whose memory is another than that of its parts. A cell that is written by hand may have the same formula: the
class of the module tells them apart, and where the file has no classes (TorchScript) the names of its parameters.

A first state that the file has as constants (TorchScript) was made in the step: `torch.zeros(...)`, by the code or by
the cell itself; a learned or registered one is a tensor of the file. The exporter writes a Constant for each read, so
that the state of a GRU, which is read twice, is two of them.

Source of cells: aten/src/ATen/native/RNN.cpp (`LSTMCell`, `GRUCell`, `SimpleCell`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from staticmem.ir.graph import Arg, Graph, Note, Op, Ref, Value
from staticmem.ir.onnx_graph import Net
from staticmem.ops.registry import kinds_of
from staticmem.passes.edit import Ops
from staticmem.passes.restoring.templates import Finder, Match, Named, Piece, Template, regrouped

if TYPE_CHECKING:
    from staticmem.ir.onnx_graph import Net
    from staticmem.passes.restoring.onnx_tensors import FromOnnx


_WEIGHT = re.compile(r"(.*)\.(?:weight|bias)_[ih]h_l(\d{1,4})(?:_reverse)?$")
_MADE = re.compile(r"val_\d+$|.*Constant\w*$|\d+$|onnx::\w+$")  # tensors that the exporter made, not the module's


def whole_calls(graph: Graph, source: FromOnnx) -> tuple[Graph, Sequence[Note]]:
    """The graph with one call for the layers of a module, on the weights that the module has."""
    work = _Layers(graph, source.net)
    ops = _without_parts(list(work.done()), graph, source.net)
    if len(ops) == len(graph.ops) and not work.instead:
        return graph, ()
    for name in work.constants.difference(*(op.refs() for op in ops)):
        source.decoded.tensors.buffers.pop(name, None)  # a first state: no tensor of the module
    return replace(graph, ops=tuple(ops)), ()


def _without_parts(ops: Sequence[Op], graph: Graph, net: Net) -> list[Op]:
    """The ops without those that rearrange tensors of the file for nobody."""
    results = {name for op in ops for name in op.outputs}
    weights = {name for op in ops for name in op.refs() if name not in results} - set(net.inputs)
    rearranged: set[int] = set()
    for index, op in enumerate(ops):
        if ("view" in kinds_of(op.base) or op.base == "aten::cat") and weights.issuperset(op.refs()):
            rearranged.add(index)
            weights.update(op.outputs)
    needed, kept = set(graph.outputs), []
    for index in range(len(ops) - 1, -1, -1):
        if index not in rearranged or not needed.isdisjoint(ops[index].outputs):
            kept.append(ops[index])
            needed.update(ops[index].refs())
    return kept[::-1]


@dataclass
class _Chain:
    """Layers of one module, each of which reads the result of the one before through ops that only rearrange it."""

    layers: list[Op]
    between: list[Op]
    dropout: float = 0.0


class _Layers:
    def __init__(self, graph: Graph, net: Net) -> None:
        self.graph, self.net = graph, net
        self.maker = {name: op for op in graph.ops for name in op.outputs}
        self.readers: dict[str, list[Op]] = {}
        for op in graph.ops:
            for name in op.refs():
                self.readers.setdefault(name, []).append(op)
        self.reads = Counter(graph.outputs) + Counter({name: len(ops) for name, ops in self.readers.items()})
        self.instead: dict[int, tuple[Op, ...]] = {}  # by the id of an op of the graph
        self.constants: set[str] = set()  # of the file, in place of which states are made
        chains: dict[str, _Chain] = {}
        for op in graph.ops:
            if "recurrent" in kinds_of(op.base):
                chain = self._continued(op, chains) or _Chain([op], [])
                chains[op.outputs[0]] = chain
        for chain in {id(chain): chain for chain in chains.values()}.values():
            if not self._joined(chain):
                for op in chain.layers:
                    self._joined(_Chain([op], []))

    def done(self) -> Iterator[Op]:
        for op in self.graph.ops:
            yield from self.instead.get(id(op), (op,))

    def _continued(self, op: Op, chains: dict[str, _Chain]) -> _Chain | None:
        """The chain that a layer is the next one of."""
        between: list[Op] = []
        name, dropout = _name(op.args[0]), 0.0
        while name in self.maker and self.reads[name] == 1:
            if kinds_of(self.maker[name].base).isdisjoint(("dropout", "permuted", "reshaped")):
                break
            between.append(self.maker[name])
            if between[-1].base == "aten::dropout" and isinstance(p := between[-1].args[1], float):
                dropout = p
            name = _name(between[-1].args[0])
        chain, shape = chains.get(name or ""), self.net.shape(name or "")
        if chain is None or shape is None or self.reads[name or ""] != 1 or not _follows(chain.layers[-1], op):
            return None
        if self.net.shape(_name(op.args[0]) or "") != shape:
            return None
        chain.layers.append(op)
        chain.between += between
        chain.dropout = dropout
        return chain

    def _joined(self, chain: _Chain) -> bool:
        """Puts one call in place of the layers; False where their states are not those of one call."""
        first, last, count = chain.layers[0], chain.layers[-1], len(chain.layers)
        states = self._states(chain.layers)
        finals = [self._final(names) for names in zip(*(op.outputs[1:] for op in chain.layers), strict=True)]
        if states is None or not all(finals):
            return False
        if count == 1 and not states[0]:
            return True  # as it is
        params = tuple(weight for op in chain.layers for weight in _listed(op.args[2]))
        args: tuple[Arg, ...] = (first.args[0], states[1], params, first.args[3], count, chain.dropout, *first.args[6:])
        call = replace(last, args=args, outputs=(last.outputs[0], *(result for result, _ in filter(None, finals))))
        for gone in (*chain.layers, *chain.between, *(cat for _, cat in filter(None, finals) if cat is not None)):
            self.instead[id(gone)] = ()
        self.instead[id(last)] = (*states[0], call)
        return True

    def _final(self, names: tuple[str, ...]) -> tuple[str, Op | None] | None:
        """The name of the last states of all layers, and the op that joins them; None where they are read apart."""
        if len(names) == 1 or not any(self.reads[name] for name in names):
            return names[-1], None
        readers = [self.readers.get(name, []) for name in names]
        if all(len(ops) == self.reads[name] == 1 for ops, name in zip(readers, names, strict=True)):
            cat = readers[0][0]
            if cat.base == "aten::cat" and cat.args[:2] == (tuple(map(Ref, names)), 0):
                return cat.outputs[0], cat
        return None

    def _states(self, layers: Sequence[Op]) -> tuple[tuple[Op, ...], Arg] | None:
        """The first states of all layers: the tensor that each has a part of, or zeros in place of constants of the
        file, which the code makes in the step."""
        last = layers[-1]
        zeros: list[Op] = []
        states: list[Arg] = []
        for parts in zip(*(_listed(op.args[1]) for op in layers), strict=True):
            name = _name(parts[-1]) or ""
            sizes, value = self.net.shape(name), self.net.values.get(name)
            roots = {self._root(part) for part in parts}
            if sizes is None or len(sizes) != 3 or None in roots:
                return None
            wanted = (sizes[0] * len(layers), *sizes[1:])
            if len(layers) == 1 and not all(self._constant(part) for part in parts):
                states.append(parts[0])
            elif all(self._constant(part) for part in parts):
                name, dtype = f"{last.outputs[0]}::state{len(zeros)}", value.dtype if value is not None else None
                op = replace(last, target="aten::zeros", args=(wanted,), kwargs={"dtype": dtype}, outputs=(name,))
                zeros.append(op)
                if dtype is not None:
                    self.net.values[name] = Value(name, dtype, wanted)
                self.constants |= {root for root in roots if root is not None and root not in self.maker}
                states.append(Ref(name))
            elif len(roots) == 1 and self.net.shape(root := next(iter(roots)) or "") == wanted:
                states.append(Ref(root))
            else:
                return None
        return tuple(zeros), tuple(states) if isinstance(last.args[1], tuple) else states[0]

    def _root(self, state: Arg) -> str | None:
        """The tensor that a state is a part of, or was broadcast from."""
        name = _name(state)
        while name in self.maker and "view" in kinds_of(self.maker[name].base):
            name = _name(self.maker[name].args[0])
        return name

    def _constant(self, state: Arg) -> bool:
        root = self._root(state) or ""
        op = self.maker.get(root)
        if op is not None:
            return op.base == "aten::zeros"
        return root not in self.net.inputs and _MADE.match(root) is not None


def _follows(first: Op, second: Op) -> bool:
    """Whether a layer is the next one of the module that the first is of, with the same settings: by the names of
    their weights, or by the module's call, where the exporter has folded the weights of one."""
    if first.base != second.base or first.args[3] != second.args[3] or first.args[6:] != second.args[6:]:
        return False
    one, other = _module(first), _module(second)
    if one is not None and other is not None:
        return one[0] == other[0] and other[1] == {number + 1 for number in one[1]}
    frames = first.modules
    return bool(frames) and frames == second.modules and frames[-1].cls.startswith("torch.nn.modules.rnn.")


def _module(op: Op) -> tuple[str, set[int]] | None:
    """The path of a layer's module and the numbers of its layers, by the names of weights."""
    matches = [match for arg in _listed(op.args[2]) if (match := _WEIGHT.match(_name(arg) or ""))]
    paths = {match[1] for match in matches}
    return (paths.pop(), {int(match[2]) for match in matches}) if len(paths) == 1 else None


def _name(arg: Arg) -> str | None:
    return arg.name if isinstance(arg, Ref) else None


def _listed(arg: Arg) -> tuple[Arg, ...]:
    return arg if isinstance(arg, tuple) else (arg,)


Traced: TypeAlias = "Callable[[str], Value | None]"

_CLASS = "torch.nn.modules.rnn."
_NAMES = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}


def _linear(x: str, weight: str, bias: str) -> tuple[Template, ...]:
    """A product with a bias and without."""
    return ("linear", x, weight, bias), ("linear", x, weight)


def _lstm(of_state: Template, of_input: Template) -> Template:
    gates = Named("gates", ("add", of_state, of_input))

    def gate(index: int) -> Template:
        return Piece(index, 4, gates)

    cell = ("add", ("mul", ("sigmoid", gate(1)), "cx"), ("mul", ("sigmoid", gate(0)), ("tanh", gate(2))))
    return ("mul", ("sigmoid", gate(3)), ("tanh", Named("cy", cell)))


def _gru(of_state: Template, of_input: Template) -> Template:
    by_input, by_state = Named("igates", of_input), Named("hgates", of_state)

    def both(index: int) -> Template:
        return ("sigmoid", ("add", Piece(index, 3, by_state), Piece(index, 3, by_input)))

    new = Named("new", ("tanh", ("add", Piece(2, 3, by_input), ("mul", Piece(2, 3, by_state), both(0)))))
    return ("add", ("mul", ("sub", "again", new), both(1)), new)  # the state, read again


def _simple(activation: str, of_state: Template, of_input: Template) -> Template:
    return (activation, ("add", of_state, of_input))


_STATE, _INPUT = _linear("hx", "w_hh", "b_hh"), _linear("x", "w_ih", "b_ih")
_BOTH = tuple(zip(_STATE, _INPUT, strict=True))  # with biases, without


class _Cell(NamedTuple):
    """A class of cells: its call, and what that becomes; `top` is the base of the last op."""

    cls: str
    target: str
    top: str
    templates: tuple[Template, ...]


_CELLS = (
    _Cell("LSTMCell", "aten::lstm_cell", "aten::mul", tuple(_lstm(h, i) for h, i in _BOTH)),
    _Cell("GRUCell", "aten::gru_cell", "aten::add", tuple(_gru(h, i) for h, i in _BOTH)),
    _Cell("RNNCell", "aten::rnn_tanh_cell", "aten::tanh", tuple(_simple("tanh", h, i) for h, i in _BOTH)),
    _Cell("RNNCell", "aten::rnn_relu_cell", "aten::relu", tuple(_simple("relu", h, i) for h, i in _BOTH)),
)


def cells(ops: Ops, net: Net) -> Sequence[Note]:
    """Puts cells together again."""
    return _cells(ops, net, lambda name: None)


def traced_cells(ops: Ops, net: Net) -> Sequence[Note]:
    """The same in a file of the TorchScript exporter, with the states that Constant nodes of its trace make."""
    traced = {
        node.outputs[0]: net.values[node.outputs[0]]
        for node in (net.nodes if net.producer.startswith("pytorch") else ())
        if node.op == "Constant" and not node.domain and not node.fx and node.outputs and node.outputs[0] in net.values
    }
    return _cells(ops, net, traced.get)


def _cells(ops: Ops, net: Net, traced: Traced) -> Sequence[Note]:
    finder, count = Finder(ops, net.consts), 0
    possible = [cell._replace(templates=finder.possible(cell.templates)) for cell in _CELLS]
    by_top = {cell.top: cell for cell in possible if cell.templates}
    for op in ops.of(*by_top):
        cell = by_top[op.base]
        if op.modules and op.modules[-1].cls in (_CLASS + cell.cls, ""):
            count += _put_together(finder, op, cell, traced)
    return regrouped(count)


def _named(match: Match, op: Op) -> bool:
    """Whether the parameters have the names that the cells of torch.nn give them, in a module of this path."""
    path, cls = op.modules[-1].path, op.modules[-1].cls
    names = {key: value.name for key, value in match.values.items() if key in _NAMES and isinstance(value, Ref)}
    return bool(cls) or all(name == f"{path}.{_NAMES[key]}" for key, name in names.items())


def _put_together(finder: Finder, op: Op, cell: _Cell, traced: Traced) -> bool:
    match = finder.find(op, cell.templates, kept=("cy",))
    if match is None or not _named(match, op):
        return False
    values, outputs = match.values, op.outputs
    state, new = values["hx"], values.get("cy")
    again = values.get("again", state)
    if again != state and not _same_constant(again, state, traced):
        return False
    first = _add_state(finder.ops, op, match, state, traced)
    if first and again != state:
        _add_state(finder.ops, op, match, again, traced, state)
    if "cx" in values:
        _add_state(finder.ops, op, match, values["cx"], traced)
    if isinstance(new, Ref):  # an LSTM's, which returns its state as well
        state, outputs = (state, values["cx"]), (*outputs, new.name)
    args = (values["x"], state, values["w_ih"], values["w_hh"], values.get("b_ih"), values.get("b_hh"))
    finder.replaced(op, match, replace(op, target=cell.target, args=args, kwargs={}, outputs=outputs))
    return True


def _same_constant(one: Arg, other: Arg, traced: Traced) -> bool:
    """Whether two constants of a trace may be one tensor that is read twice."""
    a, b = (traced(arg.name) if isinstance(arg, Ref) else None for arg in (one, other))
    return a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)


def _add_state(ops: Ops, op: Op, match: Match, state: Arg, traced: Traced, same: Arg = None) -> bool:
    """Makes a constant state in front of the cell that this op ends, or gives its second name to the first one's
    tensor: what the step makes under a name is not the model's. False where others read it too."""
    value = traced(state.name) if isinstance(state, Ref) else None
    if value is None or value.shape is None or not match.ops.keys() >= set(ops.readers[value.name]):
        return False
    zeros = Op(value.name, "aten::zeros", (value.shape,), {"dtype": value.dtype}, (value.name,), op.modules)
    if same is not None:
        zeros = zeros.changed(target="aten::alias", args=(same,), kwargs={})
    ops.insert(ops.producer[op.outputs[0]], zeros)
    return True
