"""Which parameters are one storage, which are trained, and which the loss depends on.

Backward then computes only what leads to a parameter that still trains: a layer before the first of them saves nothing,
a frozen layer after it still passes gradients on, but makes none for its own weights (LoRA's base model).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.errors import UsageError
from staticmem.ir.graph import REQUIRES_GRAD, REQUIRES_NO_GRAD, Graph, Note, Parameter, Ref
from staticmem.ops.registry import in_place, kinds_of
from staticmem.passes.requested.layers import LINEAR, layers_of
from staticmem.scenario.adapters import ALL_LINEAR
from staticmem.scenario.edits import NONE_FROZEN
from staticmem.scenario.optimizers import LowRank

if TYPE_CHECKING:
    pass


def tie_parameters(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """A parameter that no op reads is another name of the one that its module's op reads.

    A module `a.b` that reads a parameter of another module must have it under its own name too: that name is an alias.
    An unread table with the shape of the embedding tables that are read is an alias of them all (T5's `shared`) where
    its module contains theirs; one beside them is a layer that does not run.
    """
    used = graph.last_read
    by_name = {p.value.name: p for p in graph.parameters}
    unread = [p for p in graph.parameters if p.value.name not in used and p.alias_of is None]
    if not unread:
        return graph, ()
    alias: dict[str, str] = {}
    foreign = _foreign_reads(graph, by_name)
    for p in unread:
        module = p.fqn.rpartition(".")[0]
        for candidate in (*foreign.get(module, ()), *_share_with_child(graph, p, used)):
            if candidate.value.shape == p.value.shape and candidate.value.dtype is p.value.dtype:
                alias[p.value.name] = candidate.value.name
                break
    tables = {a.name for op in graph.ops if op.base == "aten::embedding" for a in op.args[:1] if isinstance(a, Ref)}
    for p in unread:
        if p.value.name in alias or p.value.shape is None or len(p.value.shape) < 2:
            continue
        same = [q for q in graph.parameters if q.value.shape == p.value.shape and q.value.name in used]
        read = [q for q in same if q.value.name in tables]
        if read and all(_is_above(p, q) for q in read):
            for q in same[1:]:
                alias[q.value.name] = same[0].value.name
            alias[p.value.name] = same[0].value.name
    if not alias:
        return graph, ()
    names = ", ".join(by_name[n].fqn for n in alias)
    note = Note("assumption", "SM321", f"tied parameters (one storage under several names): {names}", len(alias))
    parameters = tuple(
        replace(p, alias_of=_root(alias, p.value.name)) if p.value.name in alias else p for p in graph.parameters
    )
    # an alias can only be placed after what it aliases
    ordered = sorted(parameters, key=lambda p: p.alias_of is not None)
    return replace(graph, parameters=tuple(ordered)), [note]


def _is_above(p: Parameter, q: Parameter) -> bool:
    """Whether the module that has the layer of `p` contains the one that has the layer of `q`: `shared.weight` is above
    `encoder.embed_tokens.weight`."""
    outer, inner = (name.rpartition(".")[0].rpartition(".")[0] for name in (p.fqn, q.fqn))
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _root(alias: Mapping[str, str], name: str) -> str:
    seen = {name}
    while name in alias and alias[name] not in seen:
        name = alias[name]
        seen.add(name)
    return name


def _foreign_reads(graph: Graph, by_name: Mapping[str, Parameter]) -> dict[str, list[Parameter]]:
    """Parameters that each module's ops read although they belong to another module."""
    reads: dict[str, list[Parameter]] = {}
    for op in graph.ops:
        if not op.modules:
            continue
        path = op.modules[-1].path
        for name in op.refs():
            p = by_name.get(name)
            if p is not None and p.fqn.rpartition(".")[0] != path and not p.fqn.startswith(path + "."):
                reads.setdefault(path, []).append(p)
    return reads


def _share_with_child(graph: Graph, p: Parameter, used: Collection[str]) -> list[Parameter]:
    """A parent that registers its child's parameter too (BERT: `predictions.bias` is `predictions.decoder.bias`)."""
    module, _, name = p.fqn.rpartition(".")
    return [
        q
        for q in graph.parameters
        if q.value.name in used and q.fqn.startswith(f"{module}.") and q.fqn.endswith(f".{name}") and q is not p
    ]


def thaw(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """A file in which no parameter requires a gradient was exported for inference: a training step trains them all."""
    if not graph.parameters or any(p.trainable for p in graph.parameters):
        return graph, ()
    parameters = tuple(replace(p, trainable=p.value.dtype.is_differentiable) for p in graph.parameters)
    text = "no parameter requires a gradient in the file: all are trained (--freeze says which are not, or none)"
    return replace(graph, parameters=parameters), [Note("assumption", "SM315", text)]


def freeze(graph: Graph, pattern: str, parameters_of_model: Sequence[Parameter]) -> tuple[Graph, Sequence[Note]]:
    """The graph with `trainable` False where the pattern is found in a name of `Module.named_parameters()`.

    A parameter with several names (tied weights) has the first of them there: `parameters_of_model` has their order.
    `NONE_FROZEN` settles that all are trained where a file does not say so.
    """
    if pattern == NONE_FROZEN:
        return graph, ()
    storages = {p.value.name: p.alias_of or p.value.name for p in graph.parameters}
    names = _tied(graph) if graph.format == "onnx" else {}
    for p in parameters_of_model:
        names.setdefault(storages.get(p.value.name, p.value.name), p.fqn)
    from staticmem.scenario.backtracking import searcher  # has numpy, which is not needed without

    search = searcher(pattern, names.values())
    frozen = {storage for storage, name in names.items() if search(name)}
    if not frozen:
        text = f"--freeze '{pattern}' matches no parameter: everything is trained"
        return graph, [Note("warning", "SM310", text)]
    parameters = tuple(
        replace(p, trainable=False) if (p.alias_of or p.value.name) in frozen else p for p in graph.parameters
    )
    return replace(graph, parameters=parameters), ()


def _tied(graph: Graph) -> dict[str, str]:
    """Names of weights that two modules read, by the module that reads first: an ONNX file keeps one name of them."""
    leaves = {p.value.name: p.fqn.rpartition(".") for p in graph.parameters}
    readers: dict[str, dict[str, None]] = {}
    for op in graph.ops:
        for name in op.refs():
            if name in leaves and op.modules and op.modules[-1].path:
                readers.setdefault(name, {})[op.modules[-1].path] = None
    return {
        name: f"{next(iter(paths))}.{leaves[name][2]}"
        for name, paths in readers.items()
        if len(paths) > 1 and leaves[name][0] in paths
    }


def values_of_loss(graph: Graph, outputs: Iterable[str]) -> Set[str]:
    """The values that the outputs of which the loss is depend on through ops that autograd records.

    An op that writes in place is taken to change what the loss reads, whatever its result is used for: a view of it may
    be. So a parameter that is not among these gets no gradient. One that is among them may get none either: not all
    ops are differentiable.
    """
    values = set(outputs)
    writing = {target for target in {op.target for op in graph.ops} if in_place(target.split(".", 1)[0])}
    for op in reversed(graph.ops):
        if op.grad and (not values.isdisjoint(op.outputs) or op.target in writing):
            values.update(op.refs())
    return values


def left_frozen(graph: Graph) -> Set[str]:
    """The values of parameters that the code of a recording leaves switched off (`requires_grad_(False)`)."""
    frozen: set[str] = set()
    for op in graph.ops:
        if op.target == REQUIRES_NO_GRAD:
            frozen.update(op.refs())
        elif op.target == REQUIRES_GRAD:
            frozen.difference_update(op.refs())
    return frozen


def outer_matrices(graph: Graph) -> Set[str]:
    """The values of the embeddings' weights and of the last layer's: matrices that are not of hidden layers."""
    owned = {p.value.name for p in graph.parameters if len(p.value.shape or ()) == 2}
    matrices = {ref for op in graph.ops if op.base == "aten::embedding" for ref in op.refs()[:1]}
    for op in reversed(graph.ops):
        of_layer = owned.intersection(op.refs())
        if of_layer:
            return matrices | of_layer
    return matrices


def weights_of_linear(graph: Graph) -> dict[str, str]:
    """The values that are weights of nn.Linear modules, each with the path of its module.

    A weight that an embedding reads too has the embedding's name in `named_parameters()`, which has each tensor once.
    transformers' Conv1D is none (`aten::addmm`); the output of nn.MultiheadAttention is one, though its module is never
    called.
    """
    owned = {p.value.name: p for p in graph.parameters if len(p.value.shape or ()) == 2 and p.fqn.endswith(".weight")}
    tables = {ref for op in graph.ops if op.base == "aten::embedding" for ref in op.refs()[:1]}
    paths: dict[str, str] = {}
    for op in graph.ops:
        if op.base != "aten::linear" and "head_loss" not in kinds_of(op.base):
            continue
        for name in op.refs()[1:2]:
            if name not in owned or name in tables:
                continue
            path = owned[name].fqn.removesuffix(".weight")
            frame = op.modules[-1] if op.modules else None
            if frame is not None and frame.path == path and frame.cls and not frame.cls.endswith("Linear"):
                continue  # a module of its own that calls the function
            paths[name] = path
    for layer in layers_of(graph):
        name = layer.weight.value.name
        of_linear = layer.kind == LINEAR and (not layer.cls or layer.cls.endswith("Linear"))
        if of_linear and name in owned and name not in tables:
            paths.setdefault(name, owned[name].fqn.removesuffix(".weight"))
    return paths


def projected_weights(graph: Graph, low_rank: LowRank) -> set[str]:
    """The weights that `optim_target_modules` names (transformers/trainer_utils.py, `check_target_module_exists`).

    Raises:
        UsageError: there is none.
    """
    paths = weights_of_linear(graph)
    if ALL_LINEAR in [target.replace("_", "-").lower() for target in low_rank.targets]:
        chosen = set(paths)
    else:
        from staticmem.scenario.backtracking import searcher  # has numpy, which is not needed without

        chosen = {name for name, path in paths.items() if any(target in path for target in low_rank.targets)}
        for target in low_rank.targets:
            left = {name: path for name, path in paths.items() if name not in chosen}
            if left and _is_pattern(target):
                search = searcher(rf"\A(?:{target})\Z", left.values(), "--optim-target-modules")
                chosen |= {name for name, path in left.items() if search(path)}
    if not chosen:
        listed = ", ".join([*paths.values()][:4]) + (", ..." if len(paths) > 4 else "")
        raise UsageError(
            f"--optim-target-modules {','.join(low_rank.targets)} names no linear layer",
            f"Linear layers are {listed}." if paths else "The file has none.",
            f"Use {ALL_LINEAR}, or a part of these paths.",
            code="SM161",
        )
    return chosen


def _is_pattern(text: str) -> bool:
    if re.search(r"[\\*?\[(|^$+]", text) is None:
        return False
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        what = f"--optim-target-modules '{text[:60]}' is not a regular expression"
        raise UsageError(what, f"Python says: {error}.", "Name a part of the paths: attn.", code="SM162") from error
    return True
