"""How a serving engine holds the weights of linear layers, by the `quantization_config` of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from staticmem.errors import ModelFileError, UsageError
from staticmem.frontends.packing import PACKING
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.units import ceil_div

FP8 = "fp8"
ONLINE = (FP8,)  # what the engine packs weights to while it loads them, vllm/model_executor/layers/quantization/fp8.py


@record(frozen=True)
class Packed:
    """Weights of linear layers of `bits` bits (0: not packed). Each `group` inputs of an output have a scale of
    `scale` bytes, and where `zeros` a zero point of `bits` bits; group 0: one scale of an output, -1: one of a layer.
    With `square` scales are of blocks of `group` outputs and inputs. `ignored` are modules that stay whole, by name or
    by what their names have. With `experts` nothing else is packed; `ordered`: each input has a place."""

    bits: int = 0
    group: int = 0
    scale: int = 4
    zeros: bool = False
    square: bool = False
    ignored: tuple[str, ...] = ()
    title: str = ""
    experts: bool = False
    ordered: bool = False

    def leaves(self, place: str) -> bool:
        """Whether a module stays whole."""
        if self.experts:
            return ".experts." not in place
        # the engine has three linears as one, and leaves it whole where it does so with each
        named = f".{place}".replace(".qkv_proj", ".q_proj").replace(".gate_up_proj", ".gate_proj")
        return any(named.endswith(name) if ends else name in named for name, ends in map(_plain, self.ignored))

    def tensors(self, outputs: int, inputs: int, dtype: DType, whole: bool = False) -> Iterator[int]:
        """Bytes of each tensor of a layer's weight."""
        if not self.bits or whole:
            yield outputs * inputs * dtype.itemsize
            return
        yield ceil_div(outputs * inputs * self.bits, 8)
        columns = 1 if self.group <= 0 else ceil_div(inputs, self.group)
        rows = ceil_div(outputs, self.group) if self.square else outputs
        yield self.scale if self.group < 0 else rows * columns * self.scale
        if self.zeros:
            yield ceil_div(rows * columns * self.bits, 8)
        if self.ordered:  # the group of each input, and their order: gptq_marlin.py, g_idx and g_idx_sort_indices
            yield from (4 * inputs, 4 * inputs)


def _plain(name: str) -> tuple[str, bool]:
    """What the name of a module ends with, or (of a pattern that ends openly) has. Patterns are not run: a config is
    hostile input."""
    ends = not name.endswith("*")
    text = name.removeprefix("re:").replace("\\.", ".").strip("^$.*").split("*")[-1].strip(".")
    return f".{text.removeprefix('model.')}" if text else "/", ends


WHOLE = Packed()


def packed_of(content: Mapping[str, Any], path: str, loads_as: str) -> Packed:
    """How weights are packed on the card.

    Raises:
        ModelFileError: the checkpoint is packed in a way that is not covered (SM601).
        UsageError: it is packed, and another packing is asked for (SM602).
    """
    packing = content.get(PACKING)
    if not isinstance(packing, Mapping) or not packing:
        return Packed(8, -1, title="fp8, while it is loaded") if loads_as == FP8 else WHOLE
    method = str(packing.get("quant_method") or "")[:40]
    if loads_as:
        why = f"{path} has weights that {method or 'a method without a name'} has packed."
        raise UsageError("weights that are packed already", why, "Leave --load-as out.", "SM602")
    reader = _READERS.get(method)
    packed = reader(packing) if reader is not None else None
    if packed is None:
        what, why = f"{path}: weights that are not covered", f"They are packed by {method or 'an unnamed method'}."
        raise ModelFileError(what, why, f"Covered: {', '.join(_READERS)} of usual widths.", "SM601")
    return packed


def kv_item_of(content: Mapping[str, Any]) -> int:
    """Bytes of a number in the cache where the checkpoint says it, else 0: vllm/utils/torch_utils.py,
    get_kv_cache_quant_algo_string; layers/attention/attention.py for compressed-tensors."""
    packing = content.get(PACKING)
    if not isinstance(packing, Mapping):
        return 0
    inner = packing.get("quantization")
    said: Mapping[str, Any] = {**packing, **(inner if isinstance(inner, Mapping) else {})}
    scheme = said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return 1 if scheme.get("num_bits") == 8 and scheme.get("type") == "float" else 0
    return 1 if str(scheme).lower() == "fp8" else 0


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


def _of_compressed_tensors(packing: Mapping[str, Any]) -> Packed | None:
    """vllm/model_executor/layers/quantization/compressed_tensors/schemes/: scales of 8-bit layers are in float32, those
    of 4-bit ones in the model's type."""
    groups = packing.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(groups, Mapping) or len(groups) != 1 or not isinstance(weights, Mapping):
        return None
    bits, strategy = _whole(weights.get("num_bits"), 0), weights.get("strategy")
    if bits not in (4, 8):
        return None
    group = {"tensor": -1, "channel": 0}.get(str(strategy), _whole(weights.get("group_size"), 128))
    ignored = _names(packing.get("ignore"))
    floats = weights.get("type") == "float"
    title = f"{'fp' if floats else 'int'}{bits}, compressed-tensors"
    has_zeros = bits == 4 and not weights.get("symmetric", True)
    block = weights.get("block_structure")
    if strategy == "block" and isinstance(block, list) and block:
        return Packed(bits, _whole(block[0], 128), 4, False, True, ignored, title)
    scale = 4
    if bits == 4:
        scale = 1 if floats else 2
    return Packed(bits, group, scale, has_zeros, False, ignored, title)


def _names(listed: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in listed if isinstance(name, str)) if isinstance(listed, list) else ()


def _of_fp8(packing: Mapping[str, Any]) -> Packed:
    block = packing.get("weight_block_size")
    side = _whole(block[0], 128) if isinstance(block, list) and block else 0
    ignored = _names(packing.get("modules_to_not_convert") or packing.get("ignored_layers"))
    return Packed(8, side or -1, square=bool(side), ignored=ignored, title="fp8")


def _of_modelopt(packing: Mapping[str, Any]) -> Packed | None:
    """vllm/model_executor/layers/quantization/modelopt.py: NVFP4 has a scale of 8 bits for each 16 inputs."""
    inner = packing.get("quantization")
    said: Mapping[str, Any] = inner if isinstance(inner, Mapping) else packing
    ignored = _names(said.get("exclude_modules") or packing.get("ignore"))
    kinds = {"FP8": Packed(8, -1, ignored=ignored, title="fp8, modelopt")}
    kinds["NVFP4"] = Packed(4, 16, 1, ignored=ignored, title="nvfp4, modelopt")
    return kinds.get(str(said.get("quant_algo") or packing.get("quant_algo")))


def _of_groups(packing: Mapping[str, Any]) -> Packed | None:
    """GPTQ and AWQ: scales in the model's type."""
    bits, group = _whole(packing.get("bits"), 4), _whole(packing.get("group_size"), 0)
    method = str(packing["quant_method"])
    if bits not in (4, 8):
        return None
    ignored, ordered = _names(packing.get("modules_to_not_convert")), packing.get("desc_act") is True
    return Packed(bits, group, 2, method == "awq", False, ignored, f"int{bits}, {method}", ordered=ordered)


_READERS: dict[str, Callable[[Mapping[str, Any]], Packed | None]] = {
    "compressed-tensors": _of_compressed_tensors,
    "fp8": _of_fp8,
    "gptq": _of_groups,
    "awq": _of_groups,
    "modelopt": _of_modelopt,
    "modelopt_fp4": _of_modelopt,
    # vllm/model_executor/layers/quantization/mxfp4.py: experts alone; a scale of 8 bits for each 32 inputs
    "mxfp4": lambda _: Packed(4, 32, 1, title="mxfp4", experts=True),
}
