"""Classes of modules from the names of their parts, for files that have module paths but no classes.

The TorchScript exporter names nodes by paths (`/layer1/layer1.0/conv1/Conv`) and parameters by theirs
(`layer1.0.conv1.weight`). `module_parts.json` has of what parts the classes of torchvision and timm are
made: the attributes of child modules with the classes that they may have, and the tensors that a class owns, with their
ranks. `scripts/classes/class_parts.py` reads it out of the libraries' models; it has no code, only names.

The table is a grammar of trees. Upwards, a module may be of a class if all of its children and tensors are parts of it,
of classes that they may be of, and nothing is missing that every instance has: but parts without parameters may have
made no node, and norms may have been folded away. The calls of its own `forward` have to explain its own nodes
(`EXPLAINED`). Downwards, a child is only what its parent's class has there. A few classes with the same parts
may be left: they are written `A or B` (`ir.classes`), and what is known of all of them holds. Where a parent says
nothing, a module may only be what the libraries hand out as a model: those are wrapped, while blocks of the same names
are often somebody's own, with variables of their own. transformers is not in the table: its models are copies of each
other, and hundreds have the same parts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from staticmem.ir.classes import any_of
from staticmem.ir.record import record

LIBRARIES = ("torchvision.", "timm.")
MOST_PATHS = 200_000  # modules of a file; a longer list is no model
LEAST_NAMES = 4  # different ones, of a model: its own and those inside
MOST_CLASSES = 6  # with the same parts; of more, nothing is said
_NORMS = "BatchNorm"  # in names of classes that exporters fold into convolutions

_POOLS = ("avg_pool2d", "_adaptive_avg_pool2d", "avg_pool1d", "avg_pool3d", "_adaptive_avg_pool3d", "mean")
_NORM_CALLS = (
    "native_layer_norm", "native_group_norm", "native_batch_norm", "rms_norm", "var", "var_mean", "std", "std_mean",
)  # fmt: skip
_MAX_POOLS = (
    "max_pool2d_with_indices", "max_pool1d", "max_pool3d_with_indices", "_adaptive_max_pool2d", "adaptive_max_pool2d",
)  # fmt: skip
_RESIZED = ("nearest1d", "nearest2d", "linear1d", "bilinear2d", "bicubic2d")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "scaled_dot_product_attention", "einsum", "sum", "mul")

# ONNX operator -> ATen calls that the exporter writes it for
# (torch/onnx/_internal/torchscript_exporter/symbolic_opset*.py). Only operators that stand for few calls are here:
# shape arithmetic, transposes and reshapes come from anywhere.
EXPLAINED = {
    "Conv": ("convolution",),
    "ConvTranspose": ("convolution",),
    "BatchNormalization": ("native_batch_norm",),
    "MatMul": _PRODUCTS,
    "Gemm": _PRODUCTS,
    "Softmax": ("_softmax", "scaled_dot_product_attention", "bmm"),  # attention that was taken apart
    "Relu": ("relu",),
    "LeakyRelu": ("leaky_relu",),
    "PRelu": ("_prelu_kernel",),
    "Elu": ("elu",),
    "HardSigmoid": ("hardsigmoid", "hardswish"),
    "HardSwish": ("hardswish",),
    "Sigmoid": ("sigmoid", "silu", "glu"),
    "Erf": ("gelu", "erf"),
    "Tanh": ("tanh", "gelu", "mish"),
    "Softplus": ("softplus", "mish"),
    "MaxPool": _MAX_POOLS,
    "AveragePool": _POOLS,
    "GlobalAveragePool": _POOLS,
    "ReduceMean": (*_POOLS, *_NORM_CALLS),
    "LayerNormalization": ("native_layer_norm",),
    "InstanceNormalization": ("native_group_norm", "native_batch_norm"),
    "Resize": tuple(f"upsample_{kind}" for kind in _RESIZED),
}

# ATen call -> ONNX operators, one of which it leaves behind
LEAVES = {
    "convolution": ("Conv", "ConvTranspose"),
    "relu": ("Relu",),
    "leaky_relu": ("LeakyRelu",),
    "elu": ("Elu",),
    "silu": ("Sigmoid",),
    "sigmoid": ("Sigmoid",),
    "gelu": ("Erf", "Tanh", "Gelu"),
    "tanh": ("Tanh",),
    "hardtanh": ("Clip",),
    "hardswish": ("HardSwish", "HardSigmoid", "Clip"),
    "hardsigmoid": ("HardSigmoid", "Clip"),
    "_softmax": ("Softmax",),
    "native_layer_norm": ("LayerNormalization", "ReduceMean"),
    "native_group_norm": ("InstanceNormalization", "GroupNormalization"),
    "max_pool2d_with_indices": ("MaxPool",),
    "avg_pool2d": ("AveragePool", "GlobalAveragePool"),
    "permute": ("Transpose",),
    "cat": ("Concat",),
}

CALLS = frozenset((*LEAVES, *(call for calls in EXPLAINED.values() for call in calls)))

_SAME = {"_native_batch_norm_legit": "native_batch_norm", "cudnn_batch_norm": "native_batch_norm"}

Operators = Mapping[str, Collection[str]]


@record(frozen=True)
class Grammar:
    """Which classes have which parts; sets of classes are the bits of an integer."""

    names: tuple[str, ...]
    classes: tuple[str, ...]  # of the names: those of containers are `owner/attribute`
    parts: tuple[Mapping[str, int], ...]
    required: tuple[frozenset[str], ...]
    tensors: tuple[Mapping[str, tuple[int, ...]], ...]
    required_tensors: tuple[frozenset[str], ...]
    has_part: Mapping[str, int]
    has_tensor: Mapping[str, int]
    every: int
    simple: int  # classes that need no part
    bare: int  # classes that need no tensor
    models: int  # classes that a library hands out
    contained: int  # containers, which only their owner's class tells
    calls: tuple[tuple[frozenset[str], frozenset[str]] | None, ...]  # ATen calls that a class may make, and does


@dataclass(slots=True)
class _Module:
    parts: dict[str, list[str]] = field(default_factory=dict)  # attribute (`*` for numbers) -> paths
    tensors: dict[str, int] = field(default_factory=dict)  # name -> rank, -1 unknown


@cache
def grammar() -> Grammar:
    """The table of published classes."""
    text = Path(__file__).with_name("module_parts.json").read_text(encoding="utf-8")
    return grammar_of(json.loads(text)["classes"])


def grammar_of(rows: Sequence[Any]) -> Grammar:
    """A grammar of rows `[name, {part: [row numbers]}, {tensor: [ranks]}, [ATen calls]]`; `?`: it may be missing.

    Rows of classes that were never run have no calls.
    """
    has_part: dict[str, int] = {}
    has_tensor: dict[str, int] = {}
    names, classes = [], []
    contained = models = 0
    calls: list[tuple[frozenset[str], frozenset[str]] | None] = []
    for index, (name, parts, tensors, *targets) in enumerate(rows):
        name, _, container = name.partition("=")
        models |= name.endswith("!") << index
        name = name.rstrip("!")
        names.append(name)
        classes.append(f"torch.nn.modules.container.{container}" if container else name)
        contained |= bool(container) << index
        calls.append(
            (frozenset(c.rstrip("?") for c in targets[0]), frozenset(c for c in targets[0] if not c.endswith("?")))
            if targets
            else None
        )
        for part in parts:
            part = part.rstrip("?")
            has_part[part] = has_part.get(part, 0) | 1 << index
        for tensor in tensors:
            tensor = tensor.rstrip("?")
            has_tensor[tensor] = has_tensor.get(tensor, 0) | 1 << index
    folded = {i for i, name in enumerate(names) if _NORMS in name.rpartition(".")[2]}
    required = tuple(
        frozenset(p for p, of in parts.items() if not p.endswith("?") and not folded.issuperset(of))
        for _, parts, *_ in rows
    )
    required_tensors = tuple(frozenset(t for t in tensors if not t.endswith("?")) for _, _, tensors, *_ in rows)
    return Grammar(
        tuple(names),
        tuple(classes),
        tuple({p.rstrip("?"): sum(1 << c for c in of) for p, of in parts.items()} for _, parts, *_ in rows),
        required,
        tuple({t.rstrip("?"): tuple(ranks) for t, ranks in tensors.items()} for _, _, tensors, *_ in rows),
        required_tensors,
        has_part,
        has_tensor,
        (1 << len(rows)) - 1,
        sum(1 << i for i, needed in enumerate(required) if not needed),
        sum(1 << i for i, needed in enumerate(required_tensors) if not needed),
        models,
        contained,
        tuple(calls),
    )


def classes_of(operators: Operators, tensors: Mapping[str, int], grammar: Grammar) -> dict[str, str]:
    """The class of every module path that is told by its parts; `A or B` where some have the same.

    `operators` has those of the nodes that each module makes itself, by its path; `tensors` the ranks of the tensors
    that the file has, by name (-1: not known).
    """
    modules = _tree(operators, tensors)
    if len(modules) > MOST_PATHS:
        return {}
    if not any(_names_of_model(grammar, parts) for parts in {frozenset(m.parts) for m in modules.values() if m.parts}):
        return {}
    anonymous = any("::" in name for name in tensors)
    paths = sorted(modules, key=lambda path: path.count(".") if path else -1)
    possible: dict[str, int] = {}
    names: dict[str, frozenset[str]] = {}
    same: dict[Any, tuple[int, frozenset[str]]] = {}
    for path in reversed(paths):
        module = modules[path]
        parts = {part: frozenset(possible[p] for p in inner) for part, inner in module.parts.items()}
        own = frozenset(operators.get(path, ()))
        key = (frozenset(parts.items()), frozenset(module.tensors.items()), own)
        if key not in same:
            possible_classes = _possible(grammar, parts, module.tensors, anonymous)
            inside = frozenset(module.parts).union(*(names[p] for inner in module.parts.values() for p in inner))
            same[key] = sum(1 << i for i in _bits(possible_classes) if _fits(grammar, i, own)), inside - {"*"}
        possible[path], names[path] = same[key]
    evident = {path for path in paths if len(names[path]) >= LEAST_NAMES and len(modules[path].parts) > 1}
    return _told(grammar, modules, paths, possible, evident)


def _tree(scopes: Iterable[str], tensors: Mapping[str, int]) -> dict[str, _Module]:
    """Every module that a node or a tensor is in, with its parts."""
    modules: dict[str, _Module] = {"": _Module()}

    def module(path: str) -> _Module:
        missing = []
        while path not in modules:
            missing.append(path)
            path = path.rpartition(".")[0]
        for inner in reversed(missing):
            modules[inner] = _Module()
            parent, _, name = inner.rpartition(".")
            modules[parent].parts.setdefault("*" if name.isdigit() else name, []).append(inner)
        return modules[missing[0] if missing else path]

    for path in scopes:
        module(path)
        if len(modules) > MOST_PATHS:
            return modules
    for name, rank in tensors.items():
        if len(modules) > MOST_PATHS:
            return modules
        if "::" not in name and "/" not in name:
            owner, _, tensor = name.rpartition(".")
            module(owner).tensors[tensor] = rank
    return modules


def _names_of_model(grammar: Grammar, parts: Iterable[str]) -> bool:
    """Whether some class that a library hands out has parts of these names: without one nothing is told."""
    models = grammar.models
    for part in parts:
        models &= grammar.has_part.get(part, 0)
    return bool(models)


def _possible(
    grammar: Grammar, parts: Mapping[str, frozenset[int]], tensors: Mapping[str, int], anonymous: bool
) -> int:
    """The classes that a module with these parts may be of."""
    possible = grammar.every if parts else grammar.simple
    if not tensors and not anonymous:
        possible &= grammar.bare
    for part in parts:
        possible &= grammar.has_part.get(part, 0)
    for tensor in tensors:
        possible &= grammar.has_tensor.get(tensor, 0)
    result = 0
    for index in _bits(possible):
        if not grammar.required[index].issubset(parts):
            continue
        if not anonymous and not grammar.required_tensors[index].issubset(tensors):
            continue
        owned, may = grammar.tensors[index], grammar.parts[index]
        if all(rank < 0 or rank in owned[tensor] for tensor, rank in tensors.items()) and all(
            may[part] & of for part, each in parts.items() for of in each
        ):
            result |= 1 << index
    return result


def _fits(grammar: Grammar, index: int, operators: Collection[str]) -> bool:
    calls = grammar.calls[index]
    return calls is None or not operators or fits(operators, *calls)


def call_of(name: str) -> str:
    """An ATen call by the name that is used here: in place or not, and its variants, are one."""
    name = name.removeprefix("aten::").partition(".")[0]
    if name.startswith(("_scaled_dot_product", "scaled_dot_product")):
        return "scaled_dot_product_attention"
    stripped = name[:-1] if name.endswith("_") else name
    return _SAME.get(stripped, stripped)


def fits(operators: Collection[str], may: Collection[str], must: Iterable[str]) -> bool:
    """Whether a class whose `forward` may make some calls, and makes others always, fits the nodes of a module."""
    for operator in operators:
        calls = EXPLAINED.get(operator)
        if calls is not None and not any(call in may for call in calls):
            return False
    return all(call not in LEAVES or any(o in operators for o in LEAVES[call]) for call in must)


def _told(
    grammar: Grammar,
    modules: Mapping[str, _Module],
    paths: Sequence[str],
    possible: Mapping[str, int],
    evident: Collection[str],
) -> dict[str, str]:
    """Downwards: what is left of the possible classes where the parent's are known."""
    left: dict[str, int] = {}
    told: dict[str, str] = {}
    for path in paths:
        module = modules[path]
        own = possible[path] & left[path] if path in left else 0
        if not own and path in evident:
            own = possible[path] & grammar.models
        if not own:
            continue
        for part, inner in module.parts.items():
            may = 0
            for index in _bits(own):
                may |= grammar.parts[index].get(part, 0)
            left.update(dict.fromkeys(inner, may))
        names = sorted({grammar.classes[index] for index in _bits(own)})
        if len(names) <= MOST_CLASSES and len({name.startswith(LIBRARIES) for name in names}) == 1:
            told[path] = any_of(names)
    return told


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


__all__ = ["CALLS", "EXPLAINED", "LEAVES", "Grammar", "call_of", "classes_of", "fits", "grammar", "grammar_of"]
