"""Weights of linear layers in 8 or 4 bits as `torchao.quantization.quantize_` packs them for inference.

Every nn.Linear is replaced, the output head too. A weight that something else reads (a tied embedding) stays as it is
beside the packed one: `quantize_` gives the layer a new parameter.

Sources, torchao 0.18: torchao/quantization/quant_api.py (`_is_linear`, `_int8_weight_only_transform`,
`_int4_weight_only_quantize_tensor`),
torchao/quantization/quantize_/workflows/int8/int8_tensor.py (`Int8Tensor.from_hp`),
torchao/quantization/quantize_/workflows/int4/int4_tile_packed_to_4d_tensor.py (`Int4TilePackedTo4dTensor.from_hp`),
torchao/quantization/utils.py (`pack_tinygemm_scales_and_zeros`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph, Note, Op, Parameter, Ref, Value
from staticmem.ops.torchao import COLUMNS_OF_TILES, GROUP, INNER_TILES, ROWS_OF_TILES, padded
from staticmem.passes.edit import names_of, unused_name, with_ops
from staticmem.passes.requested.layers import LINEAR, WRITTEN_OUT, Layer, layers_of
from staticmem.scenario.adapters import Quantized

_NOT_REPLACED = "NonDynamicallyQuantizableLinear"  # of nn.MultiheadAttention: `_is_linear`


def pack(graph: Graph, chosen: Quantized) -> tuple[Graph, Sequence[Note]]:
    """The graph with packed weights.

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
        stretches[layer.product] = [_call(graph.ops[layer.product], layer, chosen, packed[layer.path])]
    changed = with_ops(graph, stretches, {})
    parameters = [p for p in graph.parameters if not owners.is_replaced(p)]
    parameters += [tensors[0] for tensors in packed.values()]
    buffers = (*graph.buffers, *(buffer for tensors in packed.values() for buffer in tensors[1:]))
    changed = replace(changed, parameters=tuple(parameters), buffers=buffers)
    return changed, _notes(owners, packed, len({x.path for x in linear}) - len(packed), chosen)


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
    wide, high = padded(columns, COLUMNS_OF_TILES), padded(rows, ROWS_OF_TILES)
    tiles = (high // ROWS_OF_TILES, wide // (INNER_TILES * 16), 32, INNER_TILES // 2)
    weight = replace(tensor("qdata", dtypes.int32, *tiles), fqn=fqn, packed=rows * columns)
    return [weight, tensor("scale_and_zero", dtypes.bfloat16, wide // GROUP, high, 2)]


def _call(product: Op, layer: Layer, chosen: Quantized, packed: Sequence[Parameter]) -> Op:
    bias = Ref(layer.bias.value.name) if layer.bias is not None else None
    statistics = tuple(Ref(buffer.value.name) for buffer in packed[1:])
    args = (Ref(layer.input), Ref(packed[0].value.name), bias, statistics, layer.features)
    target = f"torchao::linear_int{chosen.bits}"
    return product.changed(target=target, args=args, kwargs={}, outputs=(layer.output,))


def _notes(owners: _Owners, packed: dict[str, list[Parameter]], skipped: int, chosen: Quantized) -> list[Note]:
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
