"""What `--lora` and `--quantize` ask for: adapters beside the layers of a frozen model, and weights of few bits.

The value of `--lora` is kept as one text, which flags, configs, sweeps and reports show alike; `lora_of` reads it.

Sources: peft/tuners/lora/config.py (`LoraConfig`), peft/tuners/tuners_utils.py (`cast_adapter_dtype`),
transformers/utils/quantization_config.py (`BitsAndBytesConfig`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from staticmem.errors import UsageError, closest
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.scenario.options import STEP, TRAINED, option

ALL_LINEAR = "all-linear"
AUTO, BASE = "auto", "base"  # dtypes of adapters: float32 as PEFT makes them, and that of the layer
KEYS = ("r", "alpha", "dropout", "targets", "dtype", "save", "input_grads", "dora")
EXAMPLE = "r=16,alpha=32,targets=q_proj+v_proj"
MAX_TEXT = 2000  # characters: longer ones are a mistake
_NEXT_KEY = re.compile(rf",(?=\s*(?:{'|'.join(KEYS)})\s*=)")
_PATTERN = re.compile(r"[\\*?\[(|^$]")  # what no name of a module has
_SWITCHES = {"true": True, "yes": True, "false": False, "no": False}


@record(frozen=True)
class Lora:
    """Low-rank adapters as PEFT inserts them.

    Attributes:
        r: the rank; `alpha` over it is the factor of what an adapter adds.
        targets: ends of paths of modules; `pattern` is a regular expression of whole paths in their place, and
            `ALL_LINEAR` every linear layer but the output head.
        dtype: `AUTO`, `BASE`, or the name of an element type.
        save: modules that are trained in a copy of their own (PEFT's `modules_to_save`).
        input_grads: `enable_input_require_grads()` was called: the embeddings' result requires a gradient.
        dora: `use_dora`: the weight is divided into its rows' lengths, which are trained, and their direction.
    """

    r: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    pattern: str = ""
    dtype: str = AUTO
    save: tuple[str, ...] = ()
    input_grads: bool = False
    dora: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / self.r

    @property
    def all_linear(self) -> bool:
        return self.targets == (ALL_LINEAR,)

    @property
    def fixed_dtype(self) -> DType | None:
        """The element type of adapters; None: that of the layer that they belong to."""
        return None if self.dtype == BASE else dtypes.parse(self.dtype) or dtypes.float32


WEIGHT_ONLY = ("int8wo", "int4wo")  # of torchao, for inference; the others are of bitsandbytes
FOUR_BITS = ("nf4", "nf4-dq", "fp4", "fp4-dq")  # with -dq statistics of blocks are quantised too
QUANTIZED = (*FOUR_BITS, "int8", *WEIGHT_ONLY)


@record(frozen=True)
class Quantized:
    """Weights of linear layers as bitsandbytes or torchao hold them.

    Attributes:
        name: one of `QUANTIZED`.
        compute: the type in which products run (`bnb_4bit_compute_dtype`).
        prepared: `prepare_model_for_kbit_training` was called: all other parameters are in float32.
        cast: the type that the model was cast to before, if any.
    """

    name: str
    compute: DType
    prepared: bool = False
    cast: DType | None = None

    @property
    def weight_only(self) -> bool:
        """Whether it is torchao that packs them, for inference alone."""
        return self.name in WEIGHT_ONLY

    @property
    def bits(self) -> int:
        return 8 if self.name.startswith("int8") else 4

    @property
    def double(self) -> bool:
        """Whether absmax is quantised itself (`bnb_4bit_use_double_quant`)."""
        return self.name.endswith("-dq")


# fmt: off
@record(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters beside the layers, and weights of few bits."""

    lora: str | Mapping[str, Any] | None = option(
        None, STEP, "adapters", "KEY=VALUE,...", "low-rank adapters beside layers of a frozen model, as PEFT has them",
        example="{r: 16, alpha: 32, dropout: 0.05, targets: [q_proj, v_proj]}",
        details="`r`, `alpha`, `dropout`, `targets`, `dtype`, `save`, `input_grads`, `dora` ([adapters](adapters.md))",
    )
    quantize: str | None = option(
        None, STEP, "choice", "TYPE",
        "type of the weights of linear layers, as bitsandbytes or torchao (`wo`) holds them",
        choices=("none", *QUANTIZED), example="nf4",
        details="Training needs `lora` ([adapters](adapters.md#quantised-weights))",
    )
    kbit_training: bool = option(
        False, STEP, "switch", "", "prepare_model_for_kbit_training: what is not quantised is in float32",
        needs=TRAINED, details="With `quantize`; `dtype` is then the type of products alone",
    )
    # fmt: on


def lora_text(value: str | Mapping[str, Any]) -> str:
    """A text or mapping as the text that `lora_of` reads, checked; "none" stays.

    Raises:
        UsageError: an unknown key, or a value that is not one of its key.
    """
    if isinstance(value, str):
        text = value.strip()
    elif not isinstance(value, Mapping):
        raise _wrong("--lora is neither a text nor a mapping", f"It is of type {type(value).__name__}.")
    else:
        text = ",".join(f"{key}={_shown(one)}" for key, one in value.items() if one is not None)
    if text.lower() != "none":
        lora_of(text)
    return text


def in_type_of_layers(text: str) -> str:
    """The same adapters in the type of their layers, whatever type they were asked for in."""
    others = [part for part in _NEXT_KEY.split(text) if part.partition("=")[0].strip() != "dtype"]
    return ",".join([*others, f"dtype={BASE}"])


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple | set | frozenset):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def lora_of(text: str) -> Lora:
    """The adapters that a text asks for: `r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj`.

    Raises:
        UsageError: an unknown key, or a value that is not one of its key.
    """
    if len(text) > MAX_TEXT:
        raise _wrong(f"--lora is {len(text)} characters long", f"It has at most {MAX_TEXT}.")
    values: dict[str, str] = {}
    for part in _NEXT_KEY.split(text):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in KEYS or not equals:
            what = f"--lora has no key '{key[:60]}'" if equals else f"--lora '{part[:60]}' is not KEY=VALUE"
            raise _wrong(what, f"Keys are {', '.join(KEYS)}.", closest(key, KEYS))
        if key in values:
            raise _wrong(f"--lora gives '{key}' twice", "Each key has one value.")
        values[key] = value
    if not values.get("targets"):
        why = "Which layers get adapters depends on the model, so there is no default."
        raise _wrong("--lora does not say which layers it is for", why, f"Example: --lora {EXAMPLE}")
    rank = _number(values, "r", 8, 1, 65536)
    if rank != int(rank):
        raise _wrong(f"--lora r={values['r']} is not a whole number", "The rank counts rows.")
    targets = values["targets"]
    pattern = _compiled(targets) if _PATTERN.search(targets) else ""
    names = () if pattern else _names(targets)
    if ALL_LINEAR in map(str.lower, names):
        names = (ALL_LINEAR,)
    return Lora(
        int(rank),
        _number(values, "alpha", 8, 0, 1e9),
        _number(values, "dropout", 0, 0, 0.999),
        names,
        pattern,
        _dtype(values.get("dtype", AUTO).lower()),
        _names(values.get("save", "")),
        _switch("input_grads", values),
        _switch("dora", values),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split("+") if name.strip()))


def _number(values: Mapping[str, str], key: str, default: float, low: float, high: float) -> float:
    text = values.get(key, str(default))
    try:
        number = float(text) if len(text) <= 20 else float("nan")
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise _wrong(f"--lora {key}={text[:60]} is out of range", f"It is a number from {low:g} to {high:g}.")
    return number


def _compiled(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _wrong(f"--lora targets={pattern[:60]} is not a regular expression", f"Python says: {error}.") from error
    return pattern


def _dtype(word: str) -> str:
    if word in (AUTO, BASE):
        return word
    dtype = dtypes.parse(word)
    if dtype is None or dtype.name not in ("float32", "float16", "bfloat16"):
        choices = (AUTO, BASE, "fp32", "fp16", "bf16")
        raise _wrong(f"--lora dtype={word[:60]} is unknown", f"It is one of {', '.join(choices)}.")
    return dtype.name


def _switch(key: str, values: Mapping[str, str]) -> bool:
    word = values.get(key, "false")
    if word.lower() not in _SWITCHES:
        raise _wrong(f"--lora {key}={word[:60]} is no switch", "It is true or false.")
    return _SWITCHES[word.lower()]


def _wrong(what: str, why: str, hint: str = "") -> UsageError:
    return UsageError(what, why, hint or f"Example: --lora {EXAMPLE}", code="SM186")
