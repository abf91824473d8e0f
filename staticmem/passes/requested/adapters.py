"""Low-rank adapters beside the layers of a frozen model, as PEFT inserts them.

Around each layer that is named stands a module whose forward runs the layer, casts its input to the type of A, and adds
B(A(dropout(x))) times a factor. All other parameters are frozen: nothing is saved for their gradients, and optimizer
state exists for A and B alone.

Sources: peft/tuners/lora/layer.py (`Linear.forward`, `Embedding.forward`, `LoraLayer.update_layer`),
peft/tuners/lora/variants.py (`DoraLinearVariant.forward`), peft/tuners/lora/dora.py (`DoraLinearLayer`),
peft/tuners/lora/bnb.py (`Linear4bit.forward`, `Linear8bitLt.forward`), peft/tuners/tuners_utils.py
(`check_target_module_exists`, `_maybe_include_all_linear_layers`, `cast_adapter_dtype`), peft/utils/other.py
(`ModulesToSaveWrapper`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from staticmem.errors import UsageError, did_you_mean
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.graph import REQUIRES_GRAD, Arg, Frame, Graph, Note, Op, Parameter, Ref, Value
from staticmem.ir.module_spans import calls_of
from staticmem.passes.edit import names_of, unused_name, with_ops
from staticmem.passes.requested.layers import (
    CONV1D,
    EMBEDDING,
    LINEAR,
    PACKED,
    QUANTIZED_4,
    QUANTIZED_8,
    WRITTEN_OUT,
    Layer,
    layers_of,
    output_head,
    without_modules,
)
from staticmem.scenario.adapters import ALL_LINEAR, Lora

# adapters, the types of autocast and of the whole model where they are given, and whether dropout is on
AskedLora = tuple[Lora, DType | None, DType | None, bool]
_ATTENTION_CLASS = "torch.nn.modules.activation.MultiheadAttention"
_LINEAR_CLASS, _DROPOUT_CLASS = "torch.nn.modules.linear.Linear", "torch.nn.modules.dropout.Dropout"
_DORA_CLASS = "peft.tuners.lora.dora.DoraLinearLayer"
_CLASSES = {
    EMBEDDING: "peft.tuners.lora.layer.Embedding",
    QUANTIZED_4: "peft.tuners.lora.bnb.Linear4bit",
    QUANTIZED_8: "peft.tuners.lora.bnb.Linear8bitLt",
}
_NAME = "default"  # of the adapter, where the code gives none


def insert(graph: Graph, asked: AskedLora) -> tuple[Graph, Sequence[Note]]:
    """The graph with adapters, everything else frozen.

    Raises:
        UsageError: no layer is named, or the file has no modules.
    """
    lora = asked[0]
    layers = [layer for layer in layers_of(graph) if layer.path.startswith(_trained(graph))]
    if not any(op.modules for op in graph.ops):
        raise without_modules("--lora")
    chosen = _targets(graph, layers, lora)
    if lora.dora:
        _check_dora(chosen)
    adapters = _Adapters(graph, asked)
    stretches: list[list[Op]] = [[op] for op in graph.ops]
    for layer in chosen:
        adapters.beside(layer, stretches)
    for path, weight in _never_run(graph, lora):
        adapters.beside_unused(path, weight)
    if lora.input_grads or (graph.recorded is not None and graph.recorded.requires_input_grads):
        adapters.require_input_gradients(layers, stretches)
    changed = with_ops(graph, stretches, adapters.variables, ends=adapters.ends)
    parameters = _freeze_all_but(graph.parameters, adapters.added)
    changed = replace(changed, parameters=parameters)
    if lora.save:
        changed = _copy_modules(changed, lora.save, adapters.names)
    return changed, _notes(lora, chosen, adapters, changed)


def _notes(lora: Lora, chosen: Sequence[Layer], adapters: _Adapters, graph: Graph) -> list[Note]:
    paths = list(dict.fromkeys(layer.path for layer in chosen))
    trained = sum(p.value.numel for p in graph.parameters if p.trainable and p.alias_of is None)
    dtype = lora.fixed_dtype
    kind = "DoRA" if lora.dora else "LoRA"
    text = (
        f"{kind} of rank {lora.r} beside {len(paths)} layers ({_listed(paths)}): {trained:,} parameters are trained, "
        f"in {dtype.name if dtype is not None else 'the type of their layers'}; all others are frozen"
    )
    leaves = list(dict.fromkeys(op.modules[-1].path for op in graph.ops if op.target == REQUIRES_GRAD and op.kwargs))
    if leaves:
        text += f"; the result of {' and '.join(leaves)} requires a gradient"
    return [Note("assumption", "SM275", text, len(paths))]


def _listed(paths: Sequence[str]) -> str:
    names = list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


# -- which layers --------------------------------------------------------------------------------------------------


def _targets(graph: Graph, layers: Sequence[Layer], lora: Lora) -> list[Layer]:
    """The layers that PEFT would match.

    Raises:
        UsageError: it would match none, or a module that is no linear layer and no embedding.
    """
    if lora.all_linear:
        head = output_head(graph, layers) if _is_of_transformers(graph) and not _trained(graph) else None
        chosen = [layer for layer in layers if layer.kind != EMBEDDING and layer.path != head]
    else:
        part = _trained(graph)
        own = {frame.path: frame.cls for op in graph.ops for frame in op.modules if frame.path.startswith(part)}
        matches = _matcher(lora, {path.removeprefix(part) for path in own if path})
        chosen = [layer for layer in layers if matches(layer.path.removeprefix(part))]
        paths = {layer.path for layer in chosen}
        for path, cls in own.items():
            if path and path not in paths and matches(path.removeprefix(part)):
                raise _not_covered(path, cls)
    saved = [layer for layer in chosen if not _within(layer.path, lora.save)]
    if not saved:
        raise _no_match(layers, lora)
    return saved


def _never_run(graph: Graph, lora: Lora) -> Iterator[tuple[str, Parameter]]:
    """The last layers of nn.MultiheadAttention that PEFT would match. They are an nn.Linear, whose weight alone is read
    (torch/nn/modules/activation.py, `MultiheadAttention.forward`): an adapter beside one is there and never runs."""
    weights = {p.fqn: p for p in graph.parameters}
    paths = dict.fromkeys(f.path for op in graph.ops for f in op.modules if f.cls == _ATTENTION_CLASS)
    layers = [f"{path}.out_proj" for path in paths if f"{path}.out_proj.weight" in weights]
    matches = (lambda path: True) if lora.all_linear else _matcher(lora, layers)
    for path in layers:
        if matches(path) and not _within(path, lora.save):
            yield path, weights[f"{path}.weight"]


def _trained(graph: Graph) -> str:
    """Before the paths of the one part that gets adapters: the others of a pipeline are frozen whole."""
    return f"{graph.recorded.trained}." if graph.recorded is not None and graph.recorded.trained else ""


def _is_of_transformers(graph: Graph) -> bool:
    """`all-linear` leaves the output head out where the model is a `PreTrainedModel`; files without classes are taken
    to have one."""
    classes = [cls for cls in graph.classes if cls]
    return not classes or any(cls.startswith("transformers.") for cls in classes)


def _matcher(lora: Lora, paths: Iterable[str]) -> Callable[[str], object]:
    if not lora.pattern:
        return lambda path: any(path == target or path.endswith(f".{target}") for target in lora.targets)
    from staticmem.scenario.backtracking import searcher  # has numpy, which is not needed without

    return searcher(rf"\A(?:{lora.pattern})\Z", paths, "--lora")


def _within(path: str, modules: Iterable[str]) -> bool:
    """Whether a path is that of one of the modules, named by their ends, or inside of one."""
    parts = f".{path}."
    return any(f".{name}." in parts for name in modules)


def _not_covered(path: str, cls: str) -> UsageError:
    kind = cls.rpartition(".")[2] or "a module that is no layer"
    return UsageError(
        f"--lora names '{path}', which is {kind}",
        "Adapters are predicted beside linear layers, Conv1D of transformers, and embeddings that run by themselves.",
        "Name the layers below it, as in targets=q_proj+v_proj, or use targets=all-linear.",
        code="SM187",
    )


def _no_match(layers: Sequence[Layer], lora: Lora) -> UsageError:
    names = sorted({layer.path.rpartition(".")[2] for layer in layers})
    asked = lora.pattern or "+".join(lora.targets)
    if not names:
        why, hint = "The graph has no linear layer that runs as its own module.", "Leave --lora out."
    elif lora.targets == (ALL_LINEAR,):
        why, hint = "The graph has no linear layer besides its output head.", "Leave --lora out."
    else:
        close = [did_you_mean(target, names) for target in lora.targets]
        why = "PEFT matches the last names of a module's path, or a regular expression with all of it."
        hint = next((text for text in close if text.startswith("Did")), f"Known: {', '.join(names[:20])}")
    return UsageError(f"--lora targets={asked[:200]} matches no layer", why, hint, code="SM187")


def _check_dora(chosen: Sequence[Layer]) -> None:
    """Raises:
    UsageError: DoRA beside an embedding or a packed weight, which are computed in other ways.
    """
    other = next((layer for layer in chosen if layer.kind not in (LINEAR, CONV1D)), None)
    if other is not None:
        kind = "an embedding" if other.kind == EMBEDDING else "a layer with a packed weight"
        raise UsageError(
            f"--lora dora=true names '{other.path}', which is {kind}",
            "DoRA is predicted beside linear layers, and Conv1D of transformers, whose weights are not packed.",
            "Name other layers, or leave dora out.",
            code="SM187",
        )


# -- the ops -------------------------------------------------------------------------------------------------------


class _Adapters:
    """Adapters of a graph. `added` has the parameters to place behind that of each layer."""

    def __init__(self, graph: Graph, asked: AskedLora) -> None:
        self.graph, self.names = graph, names_of(graph)
        self.lora, self.amp, self.dtype, self.training = asked
        self.added: dict[str, list[Parameter]] = {}
        self.variables: dict[str, str] = {}
        self.ends: dict[str, str] = {}  # views and their bases within layers: the sum has a storage of its own
        self.owned: dict[str, tuple[str, str]] = {}  # the names of A and B by path: a module may be called again
        self.magnitudes: dict[str, str] = {}  # the same of DoRA's vectors

    def beside(self, layer: Layer, stretches: list[list[Op]]) -> None:
        """Puts the module of the adapter around the ops of a layer, and its own ops behind them."""
        stack = stretches[layer.product][-1].modules
        around = (*stack[:-1], replace(stack[-1], cls=_CLASSES.get(layer.kind, "peft.tuners.lora.layer.Linear")))
        base = (*around, replace(stack[-1], path=f"{layer.path}.base_layer"))
        result = unused_name(f"{layer.output}::base", self.names)
        for index in range(layer.start, layer.end):
            stretches[index] = [_renamed(op, layer.output, result, base) for op in stretches[index]]
        within = [name for op in stretches[layer.start : layer.end] for name in op[-1].outputs]
        last, written_out = stretches[layer.end - 1][-1], stretches[layer.product][-1].base in WRITTEN_OUT
        if layer.kind == EMBEDDING:
            stretches[layer.end - 1] += self._beside_embedding(layer, stretches[layer.product][-1], around, result)
        else:
            stretches[layer.end - 1] += self._beside_linear(layer, stretches[layer.product][-1], around, result)
        if not written_out:  # else a product without its bias ends with the layer
            last = next(op for op in reversed(stretches[layer.end - 1]) if op.base == "aten::add")
        self.ends.update((name, last.name) for name in within if name != result)

    def _beside_linear(self, layer: Layer, product: Op, around: tuple[Frame, ...], result: str) -> list[Op]:
        features = layer.features
        a, b = self._parameters(layer, "lora_A", "lora_B", (self.lora.r, features[0]), (features[1], self.lora.r))
        new = _Code(product, layer, self.names)
        quantized, autocast = (layer.kind in (QUANTIZED_4, QUANTIZED_8), self.amp is not None and product.amp is True)
        if layer.kind == QUANTIZED_4:  # "we need to defensively clone here"
            result = new.call("aten::clone", "clone", around, Ref(result))
        x = layer.input
        if not (quantized and autocast):
            x = new.call("aten::type_as", "x", around, Ref(x), Ref(a))
        within = x
        if self.lora.dropout:
            frame = Frame(f"{layer.path}.lora_dropout.{_NAME}", _DROPOUT_CLASS, around[-1].call)
            within = new.call("aten::dropout", "dropout", (*around, frame), Ref(x), self.lora.dropout, True)
        named = {x} - {layer.input}  # until the forward of the adapter returns
        if self.lora.dora:
            scaled = self._scale_rows(layer, new, around, within, result, (a, b))
            named |= {within} - {layer.input}
        else:
            update = new.product(around, within, a, b)
            scaled = new.call("aten::mul.Tensor", "scaled", around, Ref(update), self.lora.scaling)
        if quantized:  # the part of the adapter has a name, and is cast where there is no autocast
            named.add(scaled)
            if not autocast:
                scaled = new.call("aten::type_as", "output", around, Ref(scaled), Ref(result))
                named.add(scaled)
        total = new.call("aten::add.Tensor", "sum", around, Ref(result), Ref(scaled))
        if self.lora.dora and autocast:  # magnitudes are in their own type: so is the sum
            total = new.call("aten::to.dtype", "result", around, Ref(total), self.amp)
        elif not quantized and not autocast:  # in the type of the result, which is that of the weight
            of = result if layer.kind == PACKED else layer.weight.value.name
            total = new.call("aten::type_as", "result", around, Ref(total), Ref(of))
        new.finish(total, layer.output)
        self.variables.update(dict.fromkeys(named, new.ops[-1].name))
        return new.ops

    def _scale_rows(
        self, layer: Layer, new: _Code, around: tuple[Frame, ...], x: str, result: str, pair: tuple[str, str]
    ) -> str:
        """What `DoraLinearLayer.forward` gives: the rows of weight + B A have their norms computed, from an identity
        matrix that runs through A and B, and the base's result is divided by them."""
        magnitude, (rows, _), scaling = self.magnitudes[layer.path], layer.features, self.lora.scaling
        within = (*around, Frame(f"{layer.path}.lora_magnitude_vector.{_NAME}", _DORA_CLASS, around[-1].call))

        def call(target: str, what: str, *args: Arg) -> str:
            return new.call(f"aten::{target}", f"dora.{what}", within, *args)

        def turned(weight: str) -> str:
            return call("t", "weight.T", Ref(weight)) if layer.kind == CONV1D else weight

        eye = call("new_zeros", "eye", Ref(pair[0]), (rows, rows))  # of the type of A
        turned_product = call("t", "lora_weight", Ref(new.product(within, eye, *pair)))
        lora_weight = call("type_as", "lora_weight", Ref(turned_product), Ref(x))
        weight = call("type_as", "weight", Ref(layer.weight.value.name), Ref(x))
        scaled = call("mul.Tensor", "scaled_weight", Ref(call("detach", "detached", Ref(lora_weight))), scaling)
        total = call("add.Tensor", "total_weight", Ref(turned(weight)), Ref(scaled))
        norm = call("type_as", "norm", Ref(call("linalg_vector_norm", "norm", Ref(total), 2, (1,))), Ref(total))
        self.variables.update({eye: turned_product, total: norm})
        norm = call("detach", "norm", Ref(norm))
        factor = call("view", "factor", Ref(call("div.Tensor", "factor", Ref(magnitude), Ref(norm))), (1, -1))
        product, base = new.product(within, x, *pair), result
        if self.lora.dropout and self.training:  # the base's product once more, of what dropout has left
            of_base = turned(weight)
            if layer.kind == CONV1D and self._is_parameter(layer.weight):
                # peft/utils/other.py, `transpose`: a parameter's transpose is a parameter again, which is trained
                of_base = call("detach", "weight.T", Ref(of_base))
                new.ops.append(_leaf(new.like, of_base, new.names))
            base = call("linear", "base", Ref(x), Ref(of_base))
        elif layer.bias is not None:
            base = call("sub.Tensor", "base", Ref(result), Ref(layer.bias.value.name))
        left = call("mul.Tensor", "left", Ref(call("sub.Tensor", "less", Ref(factor), 1)), Ref(base))
        right = call("mul.Tensor", "right", Ref(call("mul.Tensor", "right", Ref(factor), Ref(product))), scaling)
        both = call("add.Tensor", "result", Ref(left), Ref(right))
        named = {lora_weight, weight, norm, factor, product, base} - {result}
        self.variables.update(dict.fromkeys(named, both))
        return both

    def _is_parameter(self, weight: Parameter) -> bool:
        """Whether `weight.to(x.dtype)` is the weight itself: the input has been cast to the type of A."""
        dtype = self.lora.fixed_dtype
        return dtype in (None, self.dtype or weight.value.dtype)

    def _beside_embedding(self, layer: Layer, lookup: Op, around: tuple[Frame, ...], result: str) -> list[Op]:
        rows, length = layer.features
        first, second = "lora_embedding_A", "lora_embedding_B"
        a, b = self._parameters(layer, first, second, (self.lora.r, rows), (length, self.lora.r), weights=False)
        new = _Code(lookup, layer, self.names)
        turned = [new.call("aten::t", f"{which}.T", around, Ref(name)) for which, name in ((first, a), (second, b))]
        after = new.call("aten::embedding", "after_A", around, Ref(turned[0]), *lookup.args[1:])
        product = new.call("aten::matmul", "product", around, Ref(after), Ref(turned[1]))
        scaled = new.call("aten::mul.Tensor", "scaled", around, Ref(product), self.lora.scaling)
        total = new.call("aten::add.Tensor", "sum", around, Ref(result), Ref(scaled))
        new.finish(new.call("aten::type_as", "result", around, Ref(total), Ref(layer.weight.value.name)), layer.output)
        for name in (*turned, after, scaled):
            self.variables[name] = new.ops[-1].name
        return new.ops

    def beside_unused(self, path: str, weight: Parameter) -> None:
        """Adds the parameters of an adapter that never runs."""
        rows, columns = weight.value.shape or (0, 0)
        r = self.lora.r
        layer = Layer(path, "", LINEAR, 0, 0, 0, "", "", weight, None, (columns, rows))
        self._parameters(layer, "lora_A", "lora_B", (r, columns), (rows, r))

    def _parameters(
        self, layer: Layer, first: str, second: str, a: tuple[int, int], b: tuple[int, int], weights: bool = True
    ) -> tuple[str, str]:
        names = self.owned.get(layer.path)
        if names is not None:
            return names
        dtype = self.lora.fixed_dtype
        ending = ".weight" if weights else ""
        pair = []
        for which, shape in ((first, a), (second, b)):
            fqn = f"{layer.path}.{which}.{_NAME}{ending}"
            base = layer.weight.value.dtype
            packed = not base.is_floating_point or base.bits < 16  # then adapters are made in float32
            value = Value(unused_name(fqn, self.names), dtype or (dtypes.float32 if packed else base), shape)
            pair.append(Parameter(value, fqn, cast=dtype is None))
        self.added.setdefault(layer.weight.value.name, []).extend(pair)
        if self.lora.dora:
            fqn = f"{layer.path}.lora_magnitude_vector.{_NAME}.weight"
            vector = Value(unused_name(fqn, self.names), pair[0].value.dtype, (layer.features[1],))
            self.added[layer.weight.value.name].append(Parameter(vector, fqn, cast=dtype is None))
            self.magnitudes[layer.path] = vector.name
        self.owned[layer.path] = (pair[0].value.name, pair[1].value.name)
        return self.owned[layer.path]

    def require_input_gradients(self, layers: Sequence[Layer], stretches: list[list[Op]]) -> None:
        """`enable_input_require_grads()`: a hook of the input embeddings. A recording has their modules; else it is the
        first embedding that the model looks up in."""
        recorded = self.graph.recorded
        if recorded is not None and recorded.input_embeddings:
            for call in calls_of(self.graph):
                if call.path in recorded.input_embeddings:
                    self._make_leaf(stretches[call.end - 1])
            return
        layer = next((layer for layer in layers if layer.kind == EMBEDDING), None)
        if layer is None:
            raise UsageError(
                "--lora input_grads=true needs an embedding",
                "It stands for enable_input_require_grads(), a hook of the model's input embeddings.",
                "Leave it out: a model whose inputs are floating-point numbers has --input-grad.",
                code="SM187",
            )
        self._make_leaf(stretches[layer.end - 1])

    def _make_leaf(self, stretch: list[Op]) -> None:
        """Makes the result of the last op of a module a leaf."""
        like = next(op for op in reversed(stretch) if op.outputs and op.base != "aten::sym_size")
        stretch.append(_leaf(like, like.outputs[0], self.names))


def _leaf(like: Op, value: str, names: set[str]) -> Op:
    """The op that makes a value a leaf of the graph that the loss holds, behind the op `like`."""
    kwargs: dict[str, Arg] = {"leaf": True}
    name = unused_name(f"{value}::requires_grad", names)
    return Op(name, REQUIRES_GRAD, (Ref(value),), kwargs, (), like.modules, stack=like.stack)


class _Code:
    """Ops that are made one after the other, in the place of the op `like`."""

    def __init__(self, like: Op, layer: Layer, names: set[str]) -> None:
        self.like, self.layer, self.names = like, layer, names
        self.ops: list[Op] = []

    def call(self, target: str, what: str, modules: tuple[Frame, ...], *args: Arg) -> str:
        """Adds a call; gives the name of its result."""
        like, name = self.like, unused_name(f"{self.layer.output}::{what}", self.names)
        self.ops.append(Op(name, target, args, {}, (name,), modules, stack=like.stack, grad=like.grad, amp=like.amp))
        return name

    def product(self, around: tuple[Frame, ...], x: str, a: str, b: str) -> str:
        """B(A(x))."""
        for which, weight in (("lora_A", a), ("lora_B", b)):
            frame = Frame(f"{self.layer.path}.{which}.{_NAME}", _LINEAR_CLASS, around[-1].call)
            x = self.call("aten::linear", which, (*around, frame), Ref(x), Ref(weight))
        return x

    def finish(self, result: str, output: str) -> None:
        """The last call makes the value that the layer made."""
        assert self.ops[-1].outputs == (result,)
        self.ops[-1] = self.ops[-1].changed(outputs=(output,))


def _renamed(op: Op, old: str, new: str, modules: tuple[Frame, ...]) -> Op:
    """The op of a layer within the layer's new place, with its result under another name."""
    outputs = tuple(new if name == old else name for name in op.outputs)
    return op.changed(outputs=outputs, modules=modules if op.modules else None)


# -- parameters ----------------------------------------------------------------------------------------------------


def _freeze_all_but(parameters: Sequence[Parameter], added: dict[str, list[Parameter]]) -> tuple[Parameter, ...]:
    """All parameters frozen, and those of adapters behind the weights of their layers."""
    result: list[Parameter] = []
    aliases: list[Parameter] = []
    for p in parameters:
        (aliases if p.alias_of is not None else result).append(replace(p, trainable=False))
        result += added.get(p.value.name, ())
    return (*result, *aliases)


def _copy_modules(graph: Graph, modules: Sequence[str], names: set[str]) -> Graph:
    """`modules_to_save`: these modules run with copies of their parameters, which are trained."""
    parameters = {p.value.name: p for p in graph.parameters}
    copies: dict[tuple[str, str], Parameter] = {}
    ops = list(graph.ops)
    for index, op in enumerate(ops):
        if not op.modules or not _within(op.modules[-1].path, modules):
            continue
        path = op.modules[-1].path
        swapped: dict[str, str] = {}
        for name in op.refs():
            p = parameters.get(name)
            if p is None:
                continue
            if (path, name) not in copies:
                leaf = p.fqn.rpartition(".")[2]
                fqn = f"{path}.modules_to_save.{_NAME}.{leaf}"
                value = Value(unused_name(fqn, names), p.value.dtype, p.value.shape)
                copies[path, name] = Parameter(value, fqn, cast=p.cast)
            swapped[name] = copies[path, name].value.name
        if swapped:
            args = tuple(Ref(swapped.get(a.name, a.name)) if isinstance(a, Ref) else a for a in op.args)
            kwargs = {k: Ref(swapped.get(a.name, a.name)) if isinstance(a, Ref) else a for k, a in op.kwargs.items()}
            ops[index] = op.changed(args=args, kwargs=kwargs)
    if not copies:
        leaves = sorted({op.modules[-1].path.rpartition(".")[2] for op in ops if op.modules} - {""})
        hint = did_you_mean(modules[0], leaves)
        why = "No module of that name runs with its own parameters."
        raise UsageError(f"--lora save={'+'.join(modules)} names no module", why, hint, code="SM187")
    return replace(graph, ops=tuple(ops), parameters=(*graph.parameters, *copies.values()))
