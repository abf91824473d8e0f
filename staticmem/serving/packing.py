"""How a serving engine holds the weights of linear layers, by the `quantization_config` of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    With `square` scales are of blocks of `group` outputs and inputs. `ignored` are modules that stay whole."""

    bits: int = 0
    group: int = 0
    scale: int = 4
    zeros: bool = False
    square: bool = False
    ignored: tuple[str, ...] = ()
    title: str = ""

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
    listed = packing.get("ignore")
    ignored = tuple(str(name) for name in listed if isinstance(name, str)) if isinstance(listed, list) else ()
    title = f"{'fp' if weights.get('type') == 'float' else 'int'}{bits}, compressed-tensors"
    has_zeros = bits == 4 and not weights.get("symmetric", True)
    return Packed(bits, group, 2 if bits == 4 else 4, has_zeros, False, ignored, title)


def _of_fp8(packing: Mapping[str, Any]) -> Packed:
    block = packing.get("weight_block_size")
    side = _whole(block[0], 128) if isinstance(block, list) and block else 0
    return Packed(8, side or -1, square=bool(side), title="fp8")


def _of_groups(packing: Mapping[str, Any]) -> Packed | None:
    """GPTQ and AWQ: scales in the model's type."""
    bits, group = _whole(packing.get("bits"), 4), _whole(packing.get("group_size"), 0)
    method = str(packing["quant_method"])
    return Packed(bits, group, 2, method == "awq", title=f"int{bits}, {method}") if bits in (4, 8) else None


_READERS = {"compressed-tensors": _of_compressed_tensors, "fp8": _of_fp8, "gptq": _of_groups, "awq": _of_groups}
