"""Removes what an exporter writes down and eager PyTorch does not run, where that is provable; each removal is a note.

- Attention masks that are true everywhere, or plainly causal: transformers builds them while exporting, and passes no
  mask (or `is_causal`) when it runs without padding (transformers/masking_utils.py, `_ignore_causal_mask_sdpa`).
- The batch dimension of a mask that does not depend on the batch.
- One causal mask for all layers with a bias by position: without a mask each makes its own
  (transformers/integrations/sdpa_attention.py, `create_position_bias_mask`).
- Parameters under two names: tied weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from staticmem.ir.graph import Arg, Graph, Note, Op, Parameter, Ref
from staticmem.ops import in_place
from staticmem.passes.affine import Knowledge, Mask

_SDPA = "aten::scaled_dot_product_attention"


_APPLY = re.compile(r"\b[A-Za-z_]\w*\.apply\(")


def name_custom_functions(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """Warns of ops under `SomeFunction.apply(...)`: an autograd.Function saves what its own backward wants, and an
    export shows only the ops of its forward, each of which is taken to save what PyTorch's autograd would."""
    found: dict[str, int] = {}
    for op in graph.ops:
        for line in op.stack:
            match = _APPLY.search(line.text) if ".apply(" in line.text else None
            if match:
                found[match[0][:-1]] = found.get(match[0][:-1], 0) + 1
                break
    text = "is a custom autograd function: what it saves for backward is not in the file"
    return graph, [Note("warning", "SM325", f"{call} {text}", count) for call, count in sorted(found.items())]


def train_batch_norm(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """An export in eval mode that is analysed for training: `model.train()` puts every batch norm in training form.

    Where some are in training form already, the others are frozen on purpose and stay.
    """
    norms = [op for op in graph.ops if op.base == "aten::batch_norm" and len(op.args) > 5]
    if not norms or any(op.args[5] is True for op in norms):
        return graph, ()
    changed = {id(op): replace(op, args=(*op.args[:5], True, *op.args[6:])) for op in norms}
    text = "batch norms were exported in eval mode; training runs them in training form"
    trained = replace(graph, ops=tuple(changed.get(id(op), op) for op in graph.ops))
    return trained, [Note("assumption", "SM323", text, len(norms))]


def tie_parameters(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """A parameter that no op reads is another name of the one that its module's op reads.

    A module `a.b` that reads a parameter of another module must have it under its own name too: that name is an alias.
    An unread table with the shape of the embedding tables that are read is an alias of them all (T5's `shared`).
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
        for candidate in (*foreign.get(module, ()), *_of_child(graph, p, used)):
            if candidate.value.shape == p.value.shape and candidate.value.dtype is p.value.dtype:
                alias[p.value.name] = candidate.value.name
                break
    tables = {a.name for op in graph.ops if op.base == "aten::embedding" for a in op.args[:1] if isinstance(a, Ref)}
    for p in unread:
        if p.value.name in alias or p.value.shape is None or len(p.value.shape) < 2:
            continue
        same = [q for q in graph.parameters if q.value.shape == p.value.shape and q.value.name in used]
        if any(q.value.name in tables for q in same):
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


def _root(alias: Mapping[str, str], name: str) -> str:
    seen = {name}
    while name in alias and alias[name] not in seen:
        name = alias[name]
        seen.add(name)
    return name


def _foreign_reads(graph: Graph, by_name: Mapping[str, Parameter]) -> dict[str, list[Parameter]]:
    """Parameters that each module's ops read although they belong to another module."""
    found: dict[str, list[Parameter]] = {}
    for op in graph.ops:
        if not op.modules:
            continue
        path = op.modules[-1].path
        for name in op.refs():
            p = by_name.get(name)
            if p is not None and p.fqn.rpartition(".")[0] != path and not p.fqn.startswith(path + "."):
                found.setdefault(path, []).append(p)
    return found


def _of_child(graph: Graph, p: Parameter, used: Collection[str]) -> list[Parameter]:
    """A parent that registers its child's parameter too (BERT: `predictions.bias` is `predictions.decoder.bias`)."""
    module, _, name = p.fqn.rpartition(".")
    return [
        q
        for q in graph.parameters
        if q.value.name in used and q.fqn.startswith(f"{module}.") and q.fqn.endswith(f".{name}") and q is not p
    ]


def drop_masks(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """Drops masks that eager does not pass, and the ops that only made them."""
    knowledge = Knowledge()
    rename: dict[str, Ref] = {}
    ops: list[Op] = []
    dropped = {"true": 0, "causal": 0, "batch": 0, "gqa": 0, "own": 0}
    biases = _position_biases(graph)
    touched: set[str] = set()
    for op in graph.ops:
        op = _renamed(op, rename)
        changed = op
        if not _maybe_of_transformers(op):
            pass
        elif op.base == _SDPA:
            changed = _without_mask(op, knowledge, dropped)
            if changed is not op and op.modules and op.modules[-1].cls.startswith("transformers."):
                changed = _grouped_query(changed, ops, dropped)
        elif op.base == "aten::where" and len(op.args) == 3:
            mask = knowledge.of(op.args[0])
            if isinstance(mask, Mask) and mask.always and _is_operand(graph, op):
                assert isinstance(op.args[1], Ref)
                dropped["true"] += 1
                rename[op.outputs[0]] = op.args[1]
                touched.update(op.refs())
                continue
            if isinstance(mask, Mask) and mask.causal and op.outputs[0] in biases and _is_of_transformers(op):
                changed = _own_mask(op, mask, ops, knowledge)
                dropped["own"] += 1
            else:
                changed = _without_batch(op, mask, ops, dropped)
        if changed is not op:
            touched.update(op.refs())
        ops.append(changed)
        knowledge.visit(changed)
    if not any(dropped.values()):
        return graph, ()
    ops = _without_dead(ops, graph.outputs, touched | set(knowledge.known))
    texts = {
        "true": "attention masks that are true everywhere were dropped: eager passes none without padding",
        "causal": "causal attention masks became is_causal: eager passes none without padding",
        "gqa": "repeated keys and values became enable_gqa: transformers passes them once where there is no mask",
        "batch": "attention masks that do not depend on the batch keep batch size 1",
        "own": "each attention with a bias by position makes its causal mask: eager passes none without padding",
    }
    notes = [Note("dropped", "SM322", texts[key], count) for key, count in dropped.items() if count]
    outputs = tuple(rename[n].name if n in rename else n for n in graph.outputs)
    return replace(graph, ops=tuple(ops), outputs=outputs), notes


def _maybe_of_transformers(op: Op) -> bool:
    """Whether the op may be code of transformers. Other code runs the masks that it builds; where the file has no class
    names nobody can tell, and exported masks are those of transformers in all that was seen."""
    classes = [frame.cls for frame in op.modules if "." in frame.cls]
    return not classes or any(cls.startswith("transformers.") for cls in classes)


def _is_of_transformers(op: Op) -> bool:
    """Traces with real tensors (TorchScript) have no classes, and what eager runs."""
    return any(frame.cls.startswith("transformers.") for frame in op.modules)


def _is_operand(graph: Graph, op: Op) -> bool:
    """Whether `where(true, a, b)` is `a` itself, but for a batch that only the mask brought in."""
    if not isinstance(op.args[1], Ref):
        return False
    source, result = graph.values.get(op.args[1].name), graph.values.get(op.outputs[0])
    if source is None or result is None or source.shape is None or result.shape is None:
        return True
    return len(source.shape) == len(result.shape) and source.shape[1:] == result.shape[1:]


def _without_mask(op: Op, knowledge: Knowledge, dropped: dict[str, int]) -> Op:
    args = list(op.args)
    kwargs = dict(op.kwargs)
    mask_arg = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    mask = knowledge.of(mask_arg) if isinstance(mask_arg, Ref) else None
    if not isinstance(mask, Mask) or not (mask.always or mask.causal):
        return op
    if len(args) > 3:
        args[3] = None
    else:
        kwargs["attn_mask"] = None
    if mask.causal:
        dropped["causal"] += 1
        if len(args) > 5:
            args[5] = True
        else:
            kwargs["is_causal"] = True
    else:
        dropped["true"] += 1
    return replace(op, args=tuple(args), kwargs=kwargs)


def _grouped_query(op: Op, ops: list[Op], dropped: dict[str, int]) -> Op:
    """Key and value that `repeat_kv` made (unsqueeze, expand, reshape) are passed once, with enable_gqa.

    Source: transformers/integrations/sdpa_attention.py, `use_gqa_in_sdpa`: true where there is no mask.
    """
    sources = [_before_repeat(a, ops) for a in op.args[1:3]]
    if len(sources) < 2 or None in sources:
        return op
    dropped["gqa"] += 1
    args = (op.args[0], *sources, *op.args[3:])
    return replace(op, args=args, kwargs={**op.kwargs, "enable_gqa": True})


def _before_repeat(arg: Arg, ops: list[Op]) -> Ref | None:
    for base in ("aten::reshape", "aten::expand", "aten::unsqueeze"):
        if not isinstance(arg, Ref):
            return None
        name = arg.name
        maker = next((o for o in reversed(ops[-400:]) if name in o.outputs), None)
        if maker is None or not (maker.base == base or (base == "aten::reshape" and maker.base == "aten::view")):
            return None
        if base == "aten::expand" and len(maker.args[1] if isinstance(maker.args[1], tuple) else ()) != 5:
            return None
        arg = maker.args[0]
    return arg if isinstance(arg, Ref) else None


def _without_batch(op: Op, mask: Any, ops: list[Op], dropped: dict[str, int]) -> Op:
    """`where(expand(mask, (B, ...)), bias, -inf)` with a mask that is the same for every row: batch 1."""
    if not isinstance(mask, Mask) or len(mask.shape) != 4 or mask.shape[0] == 1 or not mask.independent_of(0):
        return op
    name = op.args[0].name if isinstance(op.args[0], Ref) else ""
    for index in range(len(ops) - 1, -1, -1):
        maker = ops[index]
        if name in maker.outputs:
            if maker.base != "aten::expand" or not isinstance(maker.args[1], tuple):
                return op
            narrow = f"{name}.batch1"
            size = (1, *maker.args[1][1:])
            if not any(narrow in o.outputs for o in ops):
                ops.append(replace(maker, name=narrow, args=(maker.args[0], size), outputs=(narrow,)))
            dropped["batch"] += 1
            return replace(op, args=(Ref(narrow), *op.args[1:]))
    return op


def _position_biases(graph: Graph) -> set[str]:
    """What is made contiguous to be the mask of an attention."""
    copies: dict[Arg, str] = {}
    for op in graph.ops:
        if op.base == "aten::contiguous" and isinstance(op.args[0], Ref):
            copies[Ref(op.outputs[0])] = op.args[0].name
    masks = [op.args[3] for op in graph.ops if op.base == _SDPA and len(op.args) > 3] if copies else []
    return {copies[mask] for mask in masks if mask in copies}


def _own_mask(op: Op, mask: Mask, ops: list[Op], knowledge: Knowledge) -> Op:
    """`where(arange(L)[:, None] >= arange(L)[None, :], bias, min)`, the ops before `where` added to `ops`."""
    length, name = mask.shape[-1], op.outputs[0]
    made: list[tuple[str, tuple[Arg, ...], str]] = [
        ("aten::arange", (length,), "rows"), ("aten::unsqueeze", (Ref(f"{name}.rows"), 1), "queries"),
        ("aten::arange", (length,), "columns"), ("aten::unsqueeze", (Ref(f"{name}.columns"), 0), "keys"),
        ("aten::ge.Tensor", (Ref(f"{name}.queries"), Ref(f"{name}.keys")), "causal"),
        ("aten::view", (Ref(f"{name}.causal"), (1, 1, length, length)), "mask"),
    ]  # fmt: skip
    for target, args, part in made:
        output = f"{name}.{part}"
        new = replace(op, name=output, target=target, args=args, kwargs={}, outputs=(output,), stack=())
        ops.append(new)
        knowledge.visit(new)
    return replace(op, args=(Ref(f"{name}.mask"), *op.args[1:]))


def _renamed(op: Op, rename: Mapping[str, Ref]) -> Op:
    if not rename or not any(n in rename for n in op.refs()):
        return op

    def change(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return rename.get(arg.name, arg)
        return tuple(change(a) for a in arg) if isinstance(arg, tuple) else arg

    return replace(op, args=tuple(change(a) for a in op.args), kwargs={k: change(v) for k, v in op.kwargs.items()})


def _without_dead(ops: list[Op], outputs: tuple[str, ...], touched: set[str]) -> list[Op]:
    """Removes the makers of `touched` values that nothing reads any more, and what only they read."""
    readers: dict[str, int] = {}
    for op in ops:
        if op.outputs:  # a check without result is no reader
            for name in op.refs():
                readers[name] = readers.get(name, 0) + 1
    maker = {name: op for op in ops for name in op.outputs}
    dead: set[int] = set()
    stack = list(touched)
    while stack:
        made_by = maker.get(stack.pop())
        if made_by is None or id(made_by) in dead or any(readers.get(o, 0) or o in outputs for o in made_by.outputs):
            continue
        if in_place(made_by.base):
            continue  # in place: its effect is seen through another name
        dead.add(id(made_by))
        for name in made_by.refs():
            readers[name] -= 1
            stack.append(name)
    # checks on removed tensors go with them
    removed = {name for op in ops if id(op) in dead for name in op.outputs}
    return [op for op in ops if id(op) not in dead and not (not op.outputs and removed.intersection(op.refs()))]
