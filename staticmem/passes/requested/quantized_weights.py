"""Weights of linear layers in 4 or 8 bits, as transformers loads them with bitsandbytes, or torchao packs them.

bitsandbytes: every nn.Linear and Conv1D is replaced but the output head, layers whose weights are tied, and the layer
with the last parameter. Its weight is packed, with the statistics of its blocks beside it; its bias has the compute
type.

Sources: transformers/integrations/bitsandbytes.py (`replace_with_bnb_linear`), transformers/quantizers/base.py
(`get_keys_to_not_convert`), bitsandbytes/functional.py (`quantize_4bit`, `quantize_blockwise`, `get_4bit_type`),
bitsandbytes/nn/modules.py (`Linear4bit`, `Int8Params`), peft/utils/other.py (`prepare_model_for_kbit_training`).

torchao, for inference: every nn.Linear is replaced, the output head too. A weight that something else reads (a tied
embedding) stays as it is beside the packed one: `quantize_` gives the layer a new parameter.

Sources, torchao 0.18: torchao/quantization/quant_api.py (`_is_linear`, `_int8_weight_only_transform`,
`_int4_weight_only_quantize_tensor`),
torchao/quantization/quantize_/workflows/int8/int8_tensor.py (`Int8Tensor.from_hp`),
torchao/quantization/quantize_/workflows/int4/int4_tile_packed_to_4d_tensor.py (`Int4TilePackedTo4dTensor.from_hp`),
torchao/quantization/utils.py (`pack_tinygemm_scales_and_zeros`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Note, Op, Parameter, Ref, Value
from staticmem.ops.packed_linear import COLUMNS_OF_TILES, GROUP, INNER_TILES, ROWS_OF_TILES
from staticmem.passes.edit import names_of, unused_name, with_ops
from staticmem.passes.requested.layers import (
    EMBEDDING,
    LINEAR,
    WRITTEN_OUT,
    Layer,
    layers_of,
    output_head,
    without_modules,
)
from staticmem.scenario.adapters import Quantized
from staticmem.units import round_up

if TYPE_CHECKING:
    pass


_NOT_REPLACED = "NonDynamicallyQuantizableLinear"  # of nn.MultiheadAttention: `_is_linear`


def pack(graph: Graph, chosen: Quantized) -> tuple[Graph, Sequence[Note]]:
    """The graph with packed weights. `asked` has them, and whether the step trains.

    Raises:
        UsageError: no layer could have one, or int4 weights of another type than bf16.
    """
    linear = [x for x in layers_of(graph) if x.kind == LINEAR and not x.cls.endswith(_NOT_REPLACED)]
    other = next((x for x in linear if graph.ops[x.product].base in WRITTEN_OUT), None)
    if other is not None:
        raise UsageError(
            f"--quantize {chosen.name} packs the weight of '{other.path}', which multiplies by its transpose itself",
            f"{other.cls.rpartition('.')[2]} calls no linear(); its product with a packed weight is not covered.",
            "Leave --quantize out; with --lora, nf4, fp4 and int8 replace the layer.",
            code="SM188",
        )
    layers = [x for x in linear if chosen.bits == 8 or x.features[0] % GROUP == 0]  # "Skipping quantizing weight"
    if not layers:
        raise UsageError(
            "--quantize finds no weight to quantise",
            "It is for nn.Linear modules"
            + (f" whose input has a multiple of {GROUP} features." if chosen.bits == 4 else "."),
            "Leave --quantize out.",
            code="SM188",
        )
    for layer in layers:
        dtype = chosen.cast or layer.weight.value.dtype
        if chosen.bits == 4 and dtype is not dtypes.bfloat16:
            raise UsageError(
                f"--quantize {chosen.name} needs a model in bfloat16",
                f"'{layer.weight.fqn}' is in {dtype.name}, which Int4TilePackedTo4dTensor.from_hp refuses.",
                "Add --dtype bf16.",
                code="SM188",
            )
    owners = _Owners(graph, layers)
    packed = {path: _packed(layer, chosen, owners) for path, layer in owners.first.items()}
    stretches: list[list[Op]] = [[op] for op in graph.ops]
    for layer in layers:
        for index in range(layer.start, layer.end):
            stretches[index] = []
        stretches[layer.product] = [_torchao_call(graph.ops[layer.product], layer, chosen, packed[layer.path])]
    changed = with_ops(graph, stretches, {})
    parameters = [p for p in graph.parameters if not owners.is_replaced(p)]
    parameters += [tensors[0] for tensors in packed.values()]
    buffers = (*graph.buffers, *(buffer for tensors in packed.values() for buffer in tensors[1:]))
    changed = replace(changed, parameters=tuple(parameters), buffers=buffers)
    return changed, _torchao_notes(owners, packed, len({x.path for x in linear}) - len(packed), chosen)


class _Owners:
    """Which modules read which weights.

    Attributes:
        first: the path of each module -> its first call.
        kept: storages that something besides these modules reads.
    """

    def __init__(self, graph: Graph, layers: Sequence[Layer]) -> None:
        self.names = names_of(graph)
        self.storages = {p.value.name: p.alias_of or p.value.name for p in graph.parameters}
        self.first: dict[str, Layer] = {}
        for layer in layers:
            self.first.setdefault(layer.path, layer)
        inside = {index for layer in layers for index in range(layer.start, layer.end)}
        others = (op for index, op in enumerate(graph.ops) if index not in inside)
        read = {name for op in others for name in op.refs()} | set(graph.outputs)
        self.kept = {self.storages[name] for name in read if name in self.storages}
        self.replaced = {self.storage_of(layer) for layer in layers} - self.kept

    def storage_of(self, layer: Layer) -> str:
        return self.storages[layer.weight.value.name]

    def is_replaced(self, parameter: Parameter) -> bool:
        """Whether only packed copies of it are left."""
        return self.storages[parameter.value.name] in self.replaced


def _packed(layer: Layer, chosen: Quantized, owners: _Owners) -> list[Parameter]:
    """The packed weight of a module and what is stored beside it."""
    columns, rows = layer.features
    fqn = layer.weight.fqn if owners.is_replaced(layer.weight) else f"{layer.path}.weight.qdata"

    def tensor(name: str, dtype: dtypes.DType, *shape: int) -> Parameter:
        value = Value(unused_name(f"{fqn}.{name}", owners.names), dtype, shape)
        return Parameter(value, f"{fqn}.{name}", trainable=False, cast=False)

    if chosen.bits == 8:
        weight = replace(tensor("qdata", dtypes.int8, rows, columns), fqn=fqn)
        # `scale_dtype=torch.float32, zero_point_dtype=torch.int8, keepdim=True` of `from_hp`, symmetric or not
        return [weight, tensor("scale", dtypes.float32, rows, 1), tensor("zero_point", dtypes.int8, rows, 1)]
    wide, high = round_up(columns, COLUMNS_OF_TILES), round_up(rows, ROWS_OF_TILES)
    tiles = (high // ROWS_OF_TILES, wide // (INNER_TILES * 16), 32, INNER_TILES // 2)
    weight = replace(tensor("qdata", dtypes.int32, *tiles), fqn=fqn, packed=rows * columns)
    return [weight, tensor("scale_and_zero", dtypes.bfloat16, wide // GROUP, high, 2)]


def _torchao_call(product: Op, layer: Layer, chosen: Quantized, packed: Sequence[Parameter]) -> Op:
    bias = Ref(layer.bias.value.name) if layer.bias is not None else None
    statistics = tuple(Ref(buffer.value.name) for buffer in packed[1:])
    args = (Ref(layer.input), Ref(packed[0].value.name), bias, statistics, layer.features)
    target = f"torchao::linear_int{chosen.bits}"
    return product.changed(target=target, args=args, kwargs={}, outputs=(layer.output,))


def _torchao_notes(owners: _Owners, packed: dict[str, list[Parameter]], skipped: int, chosen: Quantized) -> list[Note]:
    beside = sum(b.value.dtype.nbytes(b.value.numel) for tensors in packed.values() for b in tensors[1:])
    numbers = sum(tensors[0].count for tensors in packed.values())
    config = "Int8WeightOnlyConfig()" if chosen.bits == 8 else "Int4WeightOnlyConfig of tile_packed_to_4d"
    text = (
        f"{len(packed)} of {len(packed) + skipped} linear weights, {numbers:,} numbers, are packed as quantize_ of "
        f"torchao 0.18 does with {config}, which leaves no output head out; {beside:,} bytes of scales and zero points"
    )
    notes = [Note("assumption", "SM298", text, len(packed))]
    if skipped:
        text = f"{skipped} linear weights stay as they are: their rows do not divide into groups of {GROUP} numbers"
        notes.append(Note("assumption", "SM298", text, skipped))
    twice = sum(owners.storage_of(layer) in owners.kept for layer in owners.first.values())
    if twice:
        text = f"{twice} weights exist packed and as they were: something besides the linear layer reads them"
        notes.append(Note("assumption", "SM298", text, twice))
    return notes


BLOCK = 64  # elements of a weight that share one absmax: `blocksize` of `Params4bit`
BLOCK_OF_ABSMAX = 256  # with double quantisation: `quantize_blockwise(absmax, blocksize=256)`
CODE_OF_4_BITS, CODE_OF_8_BITS = 16, 256  # float32 numbers of a table: `get_4bit_type`, `create_dynamic_map`
_LOADED = 2  # bytes of a number on the GPU before it is packed there: `Params4bit._quantize`, `Int8Params.cuda`
_CLASSES = {4: "bitsandbytes.nn.modules.Linear4bit", 8: "bitsandbytes.nn.modules.Linear8bitLt"}


def quantize(graph: Graph, asked: tuple[Quantized, bool]) -> tuple[Graph, Sequence[Note]]:
    """The graph with packed weights. `asked` has them, and whether the step trains.

    Raises:
        UsageError: no layer could have one, or the file has no modules.
    """
    chosen, training = asked
    if not any(op.modules for op in graph.ops):
        raise without_modules("--quantize")
    if chosen.weight_only:
        return pack(graph, chosen)
    layers = _replaced(graph, layers_of(graph))
    if not layers:
        raise UsageError(
            "--quantize finds no weight to quantise",
            "It is for linear layers that run as modules, without the output head and tied ones.",
            "Leave --quantize out.",
            code="SM188",
        )
    names = names_of(graph)
    states = {layer.weight.value.name: _state(layer, chosen, names) for layer in layers}
    stretches: list[list[Op]] = [[op] for op in graph.ops]
    for layer in layers:
        for index in range(layer.start, layer.end):
            stretches[index] = []
        stretches[layer.product] = [_call(graph.ops[layer.product], layer, chosen, states[layer.weight.value.name])]
    changed = with_ops(graph, stretches, {})
    parameters = _parameters(graph, layers, chosen)
    buffers = (*graph.buffers, *(buffer for state in states.values() for buffer in state))
    if chosen.prepared:
        buffers = tuple(replace(b, cast=False) for b in buffers)
    return replace(changed, parameters=parameters, buffers=buffers), _notes(layers, chosen, states, training)


def _replaced(graph: Graph, layers: Sequence[Layer]) -> list[Layer]:
    """The linear layers that transformers replaces: `get_keys_to_not_convert` and `should_convert_module`."""
    head = output_head(graph, layers)
    shared = {p.alias_of for p in graph.parameters if p.alias_of is not None}
    looked_up = {layer.weight.value.name for layer in layers if layer.kind == EMBEDDING}
    owned = [p for p in graph.parameters if p.alias_of is None]
    last = owned[-1].value.name if owned else ""
    kept = shared | looked_up | {last}
    return [
        layer
        for layer in layers
        if layer.kind != EMBEDDING and layer.path != head and layer.weight.value.name not in kept
    ]


def _state(layer: Layer, chosen: Quantized, names: set[str]) -> list[Parameter]:
    """What is stored beside a packed weight, absmax or the scales of rows first."""
    fqn = layer.weight.fqn

    def buffer(name: str, dtype: dtypes.DType, size: int | None) -> Parameter:
        shape = () if size is None else (size,)
        value = Value(unused_name(f"{fqn}.{name}", names), dtype, shape)
        return Parameter(value, f"{fqn}.{name}", trainable=False, cast=False)

    if chosen.bits == 8:
        return [buffer("SCB", dtypes.float32, layer.features[1])]
    blocks = -(-layer.weight.value.numel // BLOCK)
    code = buffer("quant_map", dtypes.float32, CODE_OF_4_BITS)
    if not chosen.double:
        return [buffer("absmax", dtypes.float32, blocks), code]
    return [
        buffer("absmax", dtypes.uint8, blocks),
        code,
        buffer("nested_absmax", dtypes.float32, -(-blocks // BLOCK_OF_ABSMAX)),
        buffer("nested_quant_map", dtypes.float32, CODE_OF_8_BITS),
        buffer("offset", dtypes.float32, None),
    ]


def _call(product: Op, layer: Layer, chosen: Quantized, state: Sequence[Parameter]) -> Op:
    stack = product.modules
    frame = replace(stack[-1], cls=_CLASSES[chosen.bits])
    bias = Ref(layer.bias.value.name) if layer.bias is not None else None
    statistics = tuple(Ref(buffer.value.name) for buffer in state)
    args = (Ref(layer.input), Ref(layer.weight.value.name), bias, statistics, layer.features, chosen.compute)
    target = f"bitsandbytes::linear_{chosen.bits}bit"
    return product.changed(target=target, args=args, kwargs={}, outputs=(layer.output,), modules=(*stack[:-1], frame))


def _parameters(graph: Graph, layers: Sequence[Layer], chosen: Quantized) -> tuple[Parameter, ...]:
    """Packed weights, biases in the compute type, and in a prepared model all others in float32."""
    packed = {layer.weight.value.name for layer in layers}
    biases = {layer.bias.value.name for layer in layers if layer.bias is not None}
    result = []
    for p in graph.parameters:
        value = p.value
        if value.name in packed:
            dtype, size = (dtypes.int8, value.shape) if chosen.bits == 8 else (dtypes.uint8, (-(-value.numel // 2), 1))
            numbers = value.numel if chosen.bits == 4 else None
            packed_value = Value(value.name, dtype, size)
            p = replace(p, value=packed_value, trainable=False, packed=numbers, loading=_LOADED * value.numel)
        elif value.name in biases:
            p = replace(p, value=Value(value.name, chosen.compute, value.shape), trainable=False, cast=False)
        elif chosen.prepared and value.dtype.is_floating_point:
            p = replace(p, value=Value(value.name, dtypes.float32, value.shape), cast=False)
        result.append(p)
    return tuple(result)


def _notes(
    layers: Sequence[Layer], chosen: Quantized, states: dict[str, list[Parameter]], training: bool
) -> list[Note]:
    weights = {layer.weight.value.name: layer.weight.value.numel for layer in layers}
    beside = sum(b.value.dtype.nbytes(b.value.numel) for state in states.values() for b in state)
    text = (
        f"{len(weights)} linear weights of {sum(weights.values()):,} numbers are {chosen.name} of bitsandbytes, with "
        f"{beside:,} bytes of statistics; products in {chosen.compute.name} take the weight in that type for a moment"
    )
    notes = [Note("assumption", "SM276", text, len(weights))]
    text = (
        "each weight is packed on the GPU, where it has 16 bits a number for a moment; bands of allocated and reserved "
        "memory reach to a checkpoint whose weights are packed already"
    )
    notes.append(Note("assumption", "SM211", text))
    if chosen.bits == 8:
        text = "outliers of int8 products are not counted: the data decide which columns have some"
        notes.append(Note("assumption", "SM277", text))
        if training:
            text = (
                "bitsandbytes keeps inputs of int8 layers as attributes of ctx: checkpoints do not free them, unless "
                "use_reentrant=True, and a loop that has the loss in a variable keeps them through the next forward"
            )
            notes.append(Note("assumption", "SM277", text))
    elif training and not chosen.prepared:
        text = (
            "other parameters keep the type of the model; prepare_model_for_kbit_training casts them to float32 "
            "(--kbit-training)"
        )
        notes.append(Note("assumption", "SM277", text))
    elif chosen.prepared:
        text = "all parameters besides quantised ones are in float32, as prepare_model_for_kbit_training casts them"
        notes.append(Note("assumption", "SM277", text))
    if chosen.bits == 4 and training:
        text = (
            "bitsandbytes is 0.43.2 or later: before, 4-bit layers kept their inputs as attributes of ctx, which no "
            "checkpoint frees, until the next loss"
        )
        notes.append(Note("assumption", "SM277", text))
    return notes
