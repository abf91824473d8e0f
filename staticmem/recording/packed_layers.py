"""Layers with packed weights in a model on the meta device, in place of those that a library replaces as it loads a
checkpoint. Their tensors have the names, types and sizes of the checkpoint; their product is one op, of whose memory
`ops.packed_linear` knows.

transformers builds the layers of fp8 and of mxfp4 itself, and compressed-tensors, where it is installed, its own. Those
of GPTQ and AWQ follow gptqmodel, which has to be compiled.

Sources: transformers 5.24, integrations/finegrained_fp8.py (`replace_with_fp8_linear`, `FP8Linear`, `FP8Experts`),
integrations/mxfp4.py (`Mxfp4GptOssExperts`, `swizzle_mxfp4`), integrations/awq.py (`replace_with_awq_linear`),
quantizers/base.py (`get_modules_to_not_convert`), quantizers/quantizer_*.py; optimum 2.3, gptq/quantizer.py
(`convert_model`); gptqmodel 7.7, nn_modules/qlinear/marlin.py, marlin_awq.py, __init__.py (`_register_gptq_buffers`);
compressed-tensors 0.20, compressors/model_compressors/model_compressor.py (`add_decompress_hook`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from staticmem.child import FailedError

NAMESPACE = "packed"
WORD = 32  # bits of a packed integer: `pack_dtype` of gptqmodel
GROUP = 128  # `group_size` of GPTQConfig and AwqConfig
MARLIN_BITS = (4, 8)  # `SUPPORTS_BITS` of MarlinLinear and AwqMarlinLinear
MX_BLOCK = 32  # numbers that share a scale: OCP Microscaling Formats 1.0
_library: list[torch.library.Library] = []  # while it is there, its ops are


Stored = dict[str, tuple[list[int], str]]  # shapes and types of tensors, by their names


def pack(model: Any, packing: Mapping[str, Any]) -> tuple[dict[str, int], Stored]:
    """Replaces layers as the config of a checkpoint says. Gives the numbers that each packed tensor holds, by its name,
    and the packed tensors of the checkpoint where the model has others as it runs.

    Raises:
        FailedError: the library has no such layers.
    """
    _define_ops()
    method = str(packing["quant_method"])
    whole, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    usual = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)  # as `PreTrainedModel.get_init_context` does
    try:
        with torch.device("meta"):
            stored = _METHODS[method](model, packing) or {}
    finally:
        torch.set_default_dtype(usual)
    replaced = {name: t for name, t in _tensors(model).items() if whole.get(name) is not t and name not in buffers}
    if not replaced:
        raise FailedError("refused", f"{method} finds no layer to pack: 'modules_to_not_convert' names all")
    for tensor in replaced.values():
        tensor.requires_grad_(False)
    return {name: _numbers(name, tensor, whole) for name, tensor in replaced.items()}, stored


def _tensors(model: Any) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _numbers(name: str, tensor: Any, whole: Mapping[str, Any]) -> int:
    """How many numbers of the model a tensor holds: those of the weight that it stands for."""
    path, _, last = name.rpartition(".")
    weight = f"{path}.weight" if last in ("qweight", "weight_packed") else name
    return whole[weight].numel() if weight in whole else 0


# -- ops -------------------------------------------------------------------------------------------------------------


def _define_ops() -> None:
    """The ops that stand for the products; in training their results need a gradient if their input does."""
    if _library:
        return
    library = torch.library.Library(NAMESPACE, "DEF")
    _library.append(library)
    products = "Tensor weight, Tensor? bias, Tensor[] beside, int[] features, str kernel"
    _define(library, f"linear(Tensor input, {products}) -> Tensor", "linear", _linear)
    _define(
        library, "grouped(Tensor input, Tensor weight, Tensor scale, Tensor offsets) -> Tensor", "grouped", _grouped
    )
    experts = "Tensor input, Tensor logits, Tensor[] up, Tensor[] down, int[] sizes"
    _define(library, f"experts({experts}) -> Tensor", "experts", lambda x, *rest: torch.empty_like(x))


def _define(library: Any, schema: str, name: str, make: Callable[..., torch.Tensor]) -> None:
    library.define(schema)
    library.impl(name, make, "CompositeExplicitAutograd")
    op = getattr(getattr(torch.ops, NAMESPACE), name)

    def differentiable(input: torch.Tensor, *rest: Any) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = op(input, *rest)
        return result + 0 * input.sum() if torch.is_grad_enabled() and input.requires_grad else result

    library.impl(name, differentiable, "Autograd")


def _linear(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    return input.new_empty([*input.shape[:-1], rest[3][1]])


def _grouped(input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return input.new_empty([input.shape[0], weight.shape[1]])


class PackedLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer of packed tensors: the first is its weight."""

    def __init__(self, layer: torch.nn.Linear, kernel: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kernel = layer.in_features, layer.out_features, kernel
        self.names = list(tensors)
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        self.bias = layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, *beside = (getattr(self, name) for name in self.names)
        features = [self.in_features, self.out_features]
        result: torch.Tensor = torch.ops.packed.linear(input, weight, self.bias, beside, features, self.kernel)
        return result


def _linear_layers(model: Any, left_out: Callable[[str], bool]) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and not left_out(name):
            yield name, module


# -- fp8 in blocks, as transformers builds it --------------------------------------------------------------------------


def _fp8(model: Any, packing: Mapping[str, Any]) -> None:
    from transformers.integrations import finegrained_fp8 as library
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = FineGrainedFP8Config.from_dict({**packing, "dequantize": False})
    quantizer = FineGrainedFP8HfQuantizer(config, pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    layers: Any = library

    def run(self: Any, input: torch.Tensor) -> torch.Tensor:
        beside = [t for t in (self.weight_scale_inv, self.activation_scale) if t is not None]
        features = [self.in_features, self.out_features]
        kernel = "fp8" if self.block_size is not None else "fp8-tensor"
        result: torch.Tensor = torch.ops.packed.linear(input, self.weight, self.bias, beside, features, kernel)
        return result

    def multiply(input: Any, weight: Any, scale: Any, offsets: Any, *rest: Any) -> Any:
        return torch.ops.packed.grouped(input, weight, scale, offsets)

    layers.FP8Linear.forward = run
    layers.fp8_grouped_matmul = multiply
    layers._apply_if_grad = lambda function, direct, input, *args: direct(input, *args)


# -- mxfp4 -------------------------------------------------------------------------------------------------------------


def _mxfp4(model: Any, packing: Mapping[str, Any]) -> None:
    """Experts of gpt-oss: transformers' module, and the scales that it keeps beside the parameters.

    transformers multiplies by kernels of the Hub (gpt-oss-triton-kernels), whose calls are one op here.
    """
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts, Mxfp4GptOssMLP
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = packing.get("modules_to_not_convert")
    skipped = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
    for name, module in list(model.named_modules()):
        if not isinstance(module, GptOssMLP) or not should_convert_module(f"{name}.experts", skipped):
            continue
        experts = Mxfp4GptOssExperts(model.config)
        for part in ("gate_up_proj", "down_proj"):
            blocks = getattr(experts, part)
            shape = (*blocks.shape[:2], 2 * blocks.shape[2] // MX_BLOCK)
            scales = torch.empty(shape, dtype=torch.uint8)
            setattr(experts, f"{part}_scales", torch.nn.Parameter(scales, requires_grad=False))
        model.set_submodule(name, Mxfp4GptOssMLP(module.router, experts))
    layers: Any = Mxfp4GptOssMLP
    layers.forward = _run_experts


def _run_experts(self: Any, hidden_states: torch.Tensor) -> Any:
    batch, own = hidden_states.shape[0], self.experts
    rows = hidden_states.reshape(-1, self.router.hidden_dim)
    logits = torch.nn.functional.linear(rows, self.router.weight, self.router.bias)
    up = [own.gate_up_proj, own.gate_up_proj_scales, own.gate_up_proj_bias]
    down = [own.down_proj, own.down_proj_scales, own.down_proj_bias]
    sizes = [own.num_experts, self.router.top_k, own.intermediate_size]
    out = torch.ops.packed.experts(rows, logits, up, down, sizes)
    out = out.reshape(batch, -1, self.router.hidden_dim)
    return out, logits


# -- GPTQ and AWQ, as gptqmodel has them -------------------------------------------------------------------------------


def _gptq(model: Any, packing: Mapping[str, Any]) -> None:
    """The linear layers within blocks, so that the output head stays (optimum, `get_block_name_with_pattern`)."""
    inside = [part for parts in packing.get("modules_in_block_to_quantize") or () for part in parts]
    blocks = str(packing.get("block_name_to_quantize") or "")

    def left_out(name: str) -> bool:
        in_blocks = name.startswith(f"{blocks}.") if blocks else any(part.isdigit() for part in name.split("."))
        return not in_blocks or bool(inside and not name.endswith(tuple(inside)))

    _refuse_other_experts(model, "GPTQ")
    make = partial(_gptq_tensors, bits=_bits(packing), group=int(packing.get("group_size", GROUP)))
    fused = bool(packing.get("sym", True)) and _bits(packing) in MARLIN_BITS
    for name, layer in _linear_layers(model, left_out):
        model.set_submodule(name, PackedLinear(layer, "gptq" if fused else "gptq-torch", make(layer)))


def _gptq_tensors(layer: torch.nn.Linear, bits: int, group: int) -> dict[str, torch.Tensor]:
    """`qweight` first; zero points and the groups of columns are in the checkpoint, whoever reads them."""
    columns, rows = layer.in_features, layer.out_features
    groups = -(-columns // group) if group > 0 else 1
    return {
        "qweight": torch.empty(-(-columns * bits // WORD), rows, dtype=torch.int32),
        "qzeros": torch.empty(groups, -(-rows * bits // WORD), dtype=torch.int32),
        "scales": torch.empty(groups, rows, dtype=layer.weight.dtype),
        "g_idx": torch.empty(columns, dtype=torch.int32),
    }


def _awq(model: Any, packing: Mapping[str, Any]) -> None:
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    version = str(packing.get("version") or packing.get("format") or "gemm").lower()
    if version != "gemm":
        raise FailedError("refused", f"its AWQ weights are in the layout '{version[:20]}', and gemm is built")
    _refuse_other_experts(model, "AWQ")
    skipped = packing.get("modules_to_not_convert")
    skipped = HfQuantizer.get_modules_to_not_convert(
        model, skipped, model._keep_in_fp32_modules, add_default_skips=True
    )
    bits = _bits(packing)
    group = int(packing.get("group_size", packing.get("q_group_size", GROUP)))
    for name, layer in _linear_layers(model, lambda name: not should_convert_module(name, skipped)):
        columns, rows = layer.in_features, layer.out_features
        groups = columns // group if group > 0 else 1
        tensors = {
            "qweight": torch.empty(columns, rows * bits // WORD, dtype=torch.int32),
            "qzeros": torch.empty(groups, rows * bits // WORD, dtype=torch.int32),
            "scales": torch.empty(groups, rows, dtype=layer.weight.dtype),
        }
        model.set_submodule(name, PackedLinear(layer, "awq", tensors))


def _bits(packing: Mapping[str, Any]) -> int:
    bits = int(packing.get("bits") or packing.get("w_bit") or 4)
    if not 1 <= bits <= 8:
        raise FailedError("refused", f"its weights have {bits} bits, and 1 to 8 are packed")
    return bits


def _refuse_other_experts(model: Any, method: str) -> None:
    """Experts of a checkpoint are layers of their own there, and one tensor in transformers 5: no library of these
    loads them into it."""
    for name, module in model.named_modules():
        if name.endswith("experts") and any(p.ndim == 3 for p in module.parameters(recurse=False)):
            raise FailedError("refused", f"{method} packs each expert, and {name} has all in one tensor here")


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def _compressed(model: Any, packing: Mapping[str, Any]) -> Stored:
    """The layers as compressed-tensors leaves them: whole from the first forward on, beside what it was packed with.

    Its code is recorded where it runs in the forward: activations are rounded there, layer by layer.
    """
    try:
        from compressed_tensors.compressors import compress_module, decompress_module
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    except ImportError as error:
        why = "compressed-tensors is not installed, whose code these layers run: pip install compressed-tensors"
        raise FailedError("refused", why) from error
    taken = {key: value for key, value in packing.items() if key in QuantizationConfig.model_fields}
    apply_quantization_config(model, QuantizationConfig.model_validate(taken), run_compressed=False)
    stored: Stored = {}
    for path, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            compress_module(module)
            tensors = module.state_dict().items()
            stored |= {f"{path}.{name}": (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors}
            decompress_module(module)
    return stored


_METHODS: dict[str, Callable[[Any, Mapping[str, Any]], Stored | None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
