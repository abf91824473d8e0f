"""What transformers runs otherwise than it exports: attention masks, where that is provable, and routed experts.

An exporter writes masks down that eager PyTorch does not run:

- Masks that are true everywhere, or plainly causal: transformers builds them while exporting, and passes no
  mask (or `is_causal`) when it runs without padding (transformers/masking_utils.py, `_ignore_causal_mask_sdpa`).
- The batch dimension of a mask that does not depend on the batch.
- One causal mask for all layers with a bias by position: without a mask each makes its own
  (transformers/integrations/sdpa_attention.py, `create_position_bias_mask`).

Of experts, an export has the op that transformers multiplies with while Dynamo traces it, `grouped_mm_fallback`; on a
GPU of sm_80 or newer eager code calls `torch.nn.functional.grouped_mm`, which is `aten::_grouped_mm`. Its casts are to
the type of the weights and of the tokens, which the export has resolved: in another type they are other casts.

Source: transformers 5.24, integrations/moe.py: `_can_use_grouped_mm`, `_grouped_mm`, `grouped_mm_experts_forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from staticmem.ir.graph import NO_KWARGS, Arg, Graph, Note, Op, Ref
from staticmem.ops.registry import in_place
from staticmem.passes.affine import Knowledge, Mask

_SDPA = "aten::scaled_dot_product_attention"
_END = 2**63 - 1  # of a slice without an end


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
    ops = without_dead(ops, graph.outputs, touched | set(knowledge.contents))
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
        maker = _maker(name, ops)
        while maker is not None and _takes_all(maker):  # `x[:, :, None, :, :]` is recorded with its slices
            maker = _maker(maker.args[0].name, ops) if isinstance(maker.args[0], Ref) else None
        if maker is None or not (maker.base == base or (base == "aten::reshape" and maker.base == "aten::view")):
            return None
        if base == "aten::expand" and len(maker.args[1] if isinstance(maker.args[1], tuple) else ()) != 5:
            return None
        arg = maker.args[0]
    return arg if isinstance(arg, Ref) else None


def _maker(name: str, ops: list[Op]) -> Op | None:
    return next((op for op in reversed(ops[-400:]) if name in op.outputs), None)


def _takes_all(op: Op) -> bool:
    """Whether a slice is the whole tensor: `x[:]`."""
    return op.base == "aten::slice" and len(op.args) == 4 and op.args[2] in (None, 0) and op.args[3] in (None, _END)


def _without_batch(op: Op, mask: Any, ops: list[Op], dropped: dict[str, int]) -> Op:
    """`where(expand(mask, (B, ...)), bias, -inf)` with a mask that is the same for every row: batch 1."""
    if not isinstance(mask, Mask) or len(mask.shape) != 4 or mask.shape[0] == 1 or not mask.independent_of(0):
        return op
    if _is_scalar(op.args[1], ops):
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


def _is_scalar(arg: Arg, ops: list[Op]) -> bool:
    """Whether code chooses between 0 and the least number: the mask of attention that is written out, which has the
    rows of the batch in eager too (transformers 5.24, masking_utils.py, `eager_mask`)."""
    maker = _maker(arg.name, ops) if isinstance(arg, Ref) else None
    return maker is not None and maker.base == "aten::zeros" and maker.args[:1] == ((),)


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
    calls: list[tuple[str, tuple[Arg, ...], str]] = [
        ("aten::arange", (length,), "rows"),
        ("aten::unsqueeze", (Ref(f"{name}.rows"), 1), "queries"),
        ("aten::arange", (length,), "columns"),
        ("aten::unsqueeze", (Ref(f"{name}.columns"), 0), "keys"),
        ("aten::ge.Tensor", (Ref(f"{name}.queries"), Ref(f"{name}.keys")), "causal"),
        ("aten::view", (Ref(f"{name}.causal"), (1, 1, length, length)), "mask"),
    ]
    for target, args, part in calls:
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


def without_dead(ops: list[Op], outputs: tuple[str, ...], touched: set[str]) -> list[Op]:
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


GROUPED, FALLBACK = "aten::_grouped_mm", "transformers::grouped_mm_fallback"
_TO = ("aten::to", "aten::_to_copy")


def run_grouped(graph: Graph, asked: object = None) -> tuple[Graph, Sequence[Note]]:
    """The graph with `_grouped_mm` and casts that follow the tensors that the code takes their types from."""
    maker = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    ops = list(graph.ops)
    replaced = 0
    calls: dict[tuple[object, ...], list[Op]] = {}
    for index, op in enumerate(graph.ops):
        if op.base not in (GROUPED, FALLBACK) or not (op.modules and op.modules[-1].cls.startswith("transformers.")):
            continue
        calls.setdefault(op.modules, []).append(op)
        rows, weight = op.args[:2]
        assert isinstance(rows, Ref)
        assert isinstance(weight, Ref)
        if op.base == FALLBACK:
            ops[index] = replace(op, target=GROUPED)
            replaced += 1
        cast = maker.get(rows.name)
        if cast is not None and ops[cast].base in _TO and weight.name in maker and maker[weight.name] < cast:
            ops[cast] = _cast_to_other(ops[cast], weight)
    for modules in calls:
        own = [index for index, op in enumerate(graph.ops) if op.modules == modules]
        tokens = next((ops[i].args[0] for i in own if ops[i].base == "aten::index"), None)
        if ops[own[-1]].base in _TO and isinstance(tokens, Ref):
            ops[own[-1]] = _cast_to_other(ops[own[-1]], tokens)  # `.to(hidden_states.dtype)`
    if all(one is other for one, other in zip(ops, graph.ops, strict=True)):
        return graph, ()
    text = "experts are multiplied by _grouped_mm, as transformers does on GPUs of sm_80 and newer"
    return replace(graph, ops=tuple(ops)), [Note("regrouped", "SM240", text, replaced)] if replaced else []


def _cast_to_other(cast: Op, other: Ref) -> Op:
    """The cast to the type of another tensor."""
    return replace(cast, target="aten::to.other", args=(cast.args[0], other), kwargs=NO_KWARGS)
