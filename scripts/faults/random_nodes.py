"""One node at random for an operator's schema: inputs of types that it takes, shapes that go together, attributes.

`random_demands.py` has the operators whose inputs have to fit each other; all others follow from the schema. What comes
out is a proposal: `random_graphs.py` keeps it where onnx.shape_inference accepts it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper
from random_demands import CODES, COMMON, DEMANDS, Drawer, NoSuchInputError, Shape, Value


@dataclass
class Proposal:
    """A node, and the tensors that it needs beside those that there are."""

    op: str
    domain: str
    inputs: list[str]
    attributes: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)  # TensorProto by name
    fresh: dict[str, Value] = field(default_factory=dict)  # may be an input of the graph instead
    outputs: int = 1


LENIENT = (
    "Reshape",
    "Expand",
    "PRelu",
    "RotaryEmbedding",
    "Transpose",
    "Conv",
    "ConvTranspose",
    "Clip",
)  # inference takes all
AXES_AS_INPUT = {"ReduceSum": 13}  # the other reductions: 18
WORDS = {
    "auto_pad": ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    "direction": ("forward", "LEFT", "RIGHT", "left_right"), "approximate": ("none", "tanh"),
    "reduction": ("none", "sum", "mean", "add", "mul"), "padding_mode": ("zeros", "border", "reflection"),
    "mode": ("nearest", "linear", "bilinear", "constant", "DCR", "CRD", "avg", "max", "default"),
    "equation": ("ab->ba", "ii->i", "a->a"), "norm": ("MAX", "L1", "L2"), "round_mode": ("floor", "up"),
    "post_transform": ("NONE", "SOFTMAX"), "cast_to": ("TO_FLOAT", "TO_INT64"),
    "case_change_action": ("NONE", "LOWER", "UPPER"),
}  # fmt: skip


# -- any operator: from its schema -------------------------------------------------------------------------------------


def drawn(schema: Any, rng: random.Random, pool: Sequence[Value], prefix: str) -> Proposal:
    """A node of the schema's operator.

    Raises:
        NoSuchInputError: there is no input of a type that it takes.
    """
    d = Drawer(rng, pool, prefix)
    always = schema.name in LENIENT
    if schema.name in DEMANDS and schema.domain == "" and (always or rng.random() < 0.93):
        version = schema.since_version
        if schema.name.startswith("Reduce"):
            version = int(version >= AXES_AS_INPUT.get(schema.name, 18))
        inputs, attributes = DEMANDS[schema.name](d, rng, _types(schema, schema.inputs[0]), version)
    else:
        inputs, attributes = _by_schema(schema, rng, d)
    least = sum(1 for out in schema.outputs if out.option == out.option.Single)
    outputs = max(least, schema.min_output)
    last = schema.outputs[-1] if schema.outputs else None
    if last is not None and last.option == last.option.Variadic:
        outputs = max(outputs, int(attributes.get("num_outputs", 2)))
    elif last is not None and rng.random() < 0.25:
        outputs = len(schema.outputs)
    return Proposal(schema.name, schema.domain, inputs, attributes, d.constants, d.fresh, max(outputs, 1))


def _types(schema: Any, formal: Any) -> tuple[str, ...]:
    """Types that an input takes, as `Value.type` writes them."""
    allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == formal.type_str), None)
    found = [plain(t) for t in (allowed if allowed is not None else [formal.type_str])]
    return tuple(t for t in found if t)


def plain(text: str) -> str:
    return text[7:-1] if text.startswith("tensor(") else text


def _by_schema(schema: Any, rng: random.Random, d: Drawer) -> tuple[list[str], dict[str, Any]]:
    chosen: dict[str, str] = {}  # the type of each type parameter
    inputs: list[str] = []
    shape: Shape | None = None
    count = len(schema.inputs)
    while count and schema.inputs[count - 1].option == schema.inputs[0].option.Optional and rng.random() < 0.6:
        count -= 1
    for number, formal in enumerate(schema.inputs[:count]):
        variadic = formal.option == formal.option.Variadic
        if formal.option == formal.option.Optional and rng.random() < 0.3:
            inputs.append("")
            continue
        for _ in range(rng.choice((1, 2, 2, 3)) if variadic else 1):
            types = (chosen[formal.type_str],) if formal.type_str in chosen else _types(schema, formal)
            if not types:
                raise NoSuchInputError
            name, type_ = _input(formal.name, types, shape, number, d, rng)
            if not variadic or formal.is_homogeneous:
                chosen.setdefault(formal.type_str, type_)
            inputs.append(name)
            if shape is None:
                shape = next((v.shape for v in (*d.pool, *d.fresh.values()) if v.name == name), None)
    while inputs and not inputs[-1]:
        inputs.pop()
    rank = len(shape) if shape is not None else 2
    attributes: dict[str, Any] = {}
    for attribute in schema.attributes.values():
        if attribute.required or rng.random() < 0.3:
            attributes[attribute.name] = _attribute(attribute, rank, rng)
    return inputs, attributes


def _input(
    formal: str, types: tuple[str, ...], shape: Shape | None, number: int, d: Drawer, rng: random.Random
) -> tuple[str, str]:
    ints = [t for t in types if t in ("int64", "int32")]
    word = formal.lower()
    rank = len(shape) if shape is not None else 2
    if ints and word in ("axis", "position", "size", "k", "depth", "dft_length", "frame_step", "frame_length"):
        return d.constant(
            np.asarray(rng.choice((0, 1, 2, 4) if word in ("axis", "position") else (1, 2, 4))), ints[0]
        ), ints[0]
    if ints and word in (
        "axes",
        "shape",
        "starts",
        "ends",
        "steps",
        "repeats",
        "split",
        "image_shape",
        "block_shape",
        "output_shape",
        "sizes",
        "pads",
    ):
        return d.constant([rng.choice((1, 2, 4)) for _ in range(max(rank, 1))], ints[0]), ints[0]
    if shape is not None and number:
        known = [t for t in types if t in CODES]
        if known:
            type_ = "float" if "float" in known and rng.random() < 0.7 else rng.choice(known)
            if word in ("scale", "scales", "zero_point") or word.endswith(("_scale", "_zero_point", "threshold")):
                return d.tensor((), type_), type_
            return d.like(shape, type_), type_
    there = [v for v in d.pool if v.type in types and v.shape is None]
    if there and rng.random() < 0.8:
        chosen = rng.choice(there)
        return chosen.name, chosen.type
    found = d.pick(tuple(t for t in types if t in COMMON) or types)
    return found.name, found.type


def _attribute(attribute: Any, rank: int, rng: random.Random) -> Any:
    kind, name = int(attribute.type.value), attribute.name
    if kind == AttributeProto.INT:
        if name in ("axis", "batch_axis", "time_axis", "batch_dims"):
            return rng.randrange(-rank, rank) if rank else 0
        if name in ("to", "dtype", "output_dtype", "stash_type", "output_datatype"):
            return rng.choice((1, 1, 10, 11, 7, 6))
        return rng.choice((0, 1, 1, 2, 4))
    if kind == AttributeProto.FLOAT:
        return rng.choice((0.0, 0.5, 1.0, 1e-5))
    if kind == AttributeProto.STRING:
        return rng.choice(WORDS.get(name, ("", "a")))
    if kind == AttributeProto.INTS:
        if name == "axes":
            return rng.sample(range(max(rank, 1)), rng.randint(1, max(rank, 1)))
        length = {"pads": 2 * max(rank - 2, 1), "pooled_shape": 2}.get(name, max(rank - 2, 1))
        return [rng.choice((0, 1) if name in ("pads", "output_padding") else (1, 2)) for _ in range(length)]
    if kind == AttributeProto.FLOATS:
        return [0.5] * rng.choice((1, 2, 4))
    if kind == AttributeProto.STRINGS:
        return ["a", "b"]
    if kind == AttributeProto.TENSOR:
        return helper.make_tensor("value", rng.choice((1, 7, 9)), [1], [1])
    if kind == AttributeProto.TYPE_PROTO:
        return helper.make_tensor_type_proto(TensorProto.FLOAT, [2, 2])
    if kind == AttributeProto.SPARSE_TENSOR:
        values, places = helper.make_tensor("v", 1, [2], [1.0, 2.0]), helper.make_tensor("i", 7, [2], [0, 3])
        return helper.make_sparse_tensor(values, places, [2, 4])
    raise NoSuchInputError  # a graph: `random_graphs.py` makes those


def node_of(proposal: Proposal, outputs: Sequence[str], name: str = "") -> onnx.NodeProto:
    node = helper.make_node(proposal.op, proposal.inputs, outputs, name=name, domain=proposal.domain)
    for key, value in sorted(proposal.attributes.items()):
        if isinstance(value, onnx.SparseTensorProto):
            made = AttributeProto(name=key, type=AttributeProto.SPARSE_TENSOR, sparse_tensor=value)
        else:
            made = helper.make_attribute(key, value)
        node.attribute.append(made)
    return node
