"""How the weights of a checkpoint are packed, by the `quantization_config` of its config, which is hostile input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.frontends.architectures import all_items

PACKING = "quantization_config"
# methods with a word for it: dequantize of FineGrainedFP8Config, Mxfp4Config, FbgemmFp8Config, CompressedTensorsConfig
_WHOLE = ("fp8", "mxfp4", "compressed-tensors", "fbgemm_fp8")
BUILT = ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors")  # whose layers `recording.packed_layers` builds


@dataclass(frozen=True)
class Packing:
    """How the weights of a checkpoint are packed.

    Attributes:
        config: the config without what it says of that, at any depth.
        quantize: the type of `--quantize` that they have; empty where they are whole, or in `layers`.
        compute: the type in which products of bitsandbytes run (empty: its default).
        layers: what the config says of layers that are recorded with their packed weights; empty where none are.
        whole: the method whose weights are loaded whole, as was asked; empty where they are packed, or never were.
    """

    config: dict[str, Any]
    quantize: str = ""
    compute: str = ""
    layers: Mapping[str, Any] = field(default_factory=dict)
    whole: str = ""


def packing_of(content: dict[str, Any], path: str, dequantize: bool) -> Packing:
    """How the weights of a checkpoint are packed by its config, wherever in it that stands: composite configs have it
    in the part of the text too, or there alone.

    `dequantize`: they are loaded whole.

    Raises:
        ModelFileError: they are packed in a way that is not built (SM147).
    """
    packings = [value for key, value in all_items(content) if key == PACKING and value]
    whole: dict[str, Any] = _without_packing(content)
    if not packings:
        return Packing(whole)
    packing = content.get(PACKING) or packings[0]
    what = f"{path}: a model that is not built"
    if any(other != packing for other in packings):
        why = "Its parts have several 'quantization_config', which differ; transformers takes one for the whole model."
        raise ModelFileError(what, why, "Leave one of them in a copy of it.", "SM147")
    packing = packing if isinstance(packing, dict) else {}
    method = str(packing.get("quant_method") or "")[:40]
    if method == "bitsandbytes" or packing.get("load_in_4bit") or packing.get("load_in_8bit"):
        return Packing(whole, whole="bitsandbytes") if dequantize else _by_bitsandbytes(packing, content, whole, what)
    if dequantize and method in _WHOLE:
        return Packing(whole, whole=method)
    if method in BUILT and not dequantize:
        return Packing(whole, layers=packing)
    why = f"Its weights are packed by {method or 'a method that it does not name'}, whose layers are not built."
    hint = "Remove 'quantization_config' from a copy of it, for the model as it was before it was quantised."
    if method in BUILT:
        why = f"transformers loads weights that {method} has packed as they are, and not whole."
        hint = f"Leave dequantize=yes and --quantize out. {hint}"
    elif method in _WHOLE:
        hint = "dequantize=yes is the model as transformers loads it whole."
    raise ModelFileError(what, why, hint, "SM147")


def _by_bitsandbytes(packing: dict[str, Any], content: dict[str, Any], whole: dict[str, Any], what: str) -> Packing:
    left_out = packing.get("llm_int8_skip_modules") or []
    if any(name != "lm_head" for name in left_out):
        why = f"'llm_int8_skip_modules' leaves {str(left_out)[:100]} whole, and only the output head is left so here."
        hint = "Remove 'quantization_config' from a copy of it, and give --quantize: all linear layers are packed then."
        raise ModelFileError(what, why, hint, "SM147")
    if packing.get("load_in_8bit"):
        return Packing(whole, "int8", str(content.get("dtype") or content.get("torch_dtype") or "float16"))
    kind = str(packing.get("bnb_4bit_quant_type") or "fp4")  # the default of BitsAndBytesConfig
    if kind not in ("nf4", "fp4"):
        raise ModelFileError(what, f"'bnb_4bit_quant_type' is '{kind[:20]}'.", "It is nf4 or fp4.", "SM147")
    compute = str(packing.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    return Packing(whole, kind + ("-dq" if packing.get("bnb_4bit_use_double_quant") else ""), compute)


def _without_packing(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_packing(value) for key, value in content.items() if key != PACKING}
    return [_without_packing(item) for item in content] if isinstance(content, list) else content
