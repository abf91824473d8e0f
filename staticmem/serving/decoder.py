"""A decoder as a serving engine builds it: what decides its memory, from a config of transformers, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.serving.packing import Packed, packed_of

# parts of a config that are no decoder of text
SCALED = ("yarn", "linear", "dynamic")  # kinds of positions whose tables are longer by a factor
LARGEST_FACTOR = 1024  # configs have up to 64
PARTS_OF_OTHERS = ("vision_config", "audio_config", "text_config", "encoder_config", "encoder", "thinker_config")


@record(frozen=True)
class Experts:
    """Experts of a layer: how many, how many a token is sent to, the width of each, that of those which all tokens pass
    (0: none), whether these have a gate, and the layers that have experts."""

    count: int
    chosen: int
    width: int
    shared: int
    shared_gate: bool
    layers: frozenset[int]


@record(frozen=True)
class Decoder:
    """What decides the memory of a decoder.

    Attributes:
        head: the size of a head; `rotary` of it are turned by positions.
        windows: of each layer how many tokens its attention sees; 0: all.
        positions: the longest sequence; `usual` is the engine's where none is asked for.
        qk_norm: norms of queries and keys: "" without, "head" for each head, "all" for all heads at once.
        norms: of a layer.
        tables: rows of each table of positions, which all layers share.
    """

    kind: str
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head: int
    rotary: int
    vocabulary: int
    windows: tuple[int, ...]
    positions: int
    usual: int
    tables: tuple[int, ...]
    dtype: DType
    tied: bool
    softcap: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: str
    norms: int
    experts: Experts | None
    packed: Packed

    @property
    def layers(self) -> int:
        return len(self.windows)


class _Config:
    """Values of a config, which is hostile input."""

    def __init__(self, content: Mapping[str, Any], path: str) -> None:
        self.content, self.path = content, path

    def whole(self, names: str, otherwise: int | None = None) -> int:
        """The first of some keys that is a whole number of at least 1.

        Raises:
            ModelFileError: none is, and nothing stands for it.
        """
        for name in names.split():
            value = self.content.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if otherwise is not None:
            return otherwise
        what = f"{self.path}: a config that does not say its sizes"
        raise ModelFileError(what, f"It has no {names.split()[0]}.", "Give the config.json of a decoder.", "SM145")

    def switch(self, name: str, otherwise: bool = False) -> bool:
        value = self.content.get(name)
        return value if isinstance(value, bool) else otherwise


def decoder_of(
    content: Mapping[str, Any], path: str, models: Mapping[str, Mapping[str, Any]], dtype: DType | None, loads_as: str
) -> Decoder:
    """The decoder that a config describes.

    Args:
        content: the config, checked as `frontends.architectures` does.
        models: what the engine's class of each `model_type` has (rules of the engine).
        dtype: the type that was asked for; None: that of the config, float32 as bfloat16.
        loads_as: the type that the engine packs weights to while it loads them; "": none.

    Raises:
        ModelFileError: the engine's class is not covered (SM601), or the config lacks a size (SM145).
    """
    config = _Config(content, path)
    kind = str(content["model_type"])[:60]
    _refuse_others(content, kind, path, models)
    traits = models[kind]
    heads = config.whole("num_attention_heads")
    hidden = config.whole("hidden_size")
    head = config.whole("head_dim", max(hidden // heads, 1))
    layers = config.whole("num_hidden_layers")
    experts = _experts(config, traits, layers)
    partial = content.get("partial_rotary_factor")
    turned = partial if isinstance(partial, float) and 0 < partial <= 1 else 1.0
    bias = config.switch("attention_bias")
    return Decoder(
        kind,
        hidden,
        config.whole("intermediate_size", experts.width if experts is not None else None),
        heads,
        config.whole("num_key_value_heads", heads),
        head,
        int(head * turned),
        config.whole("vocab_size"),
        _windows(config, traits, layers),
        *_lengths(config, traits),
        dtype if dtype is not None else _dtype(content),
        config.switch("tie_word_embeddings", bool(traits.get("tied"))),
        bool(content.get("final_logit_softcapping", traits.get("softcap"))),
        bool(traits.get("qkv_bias")) or bias,
        bias,
        config.switch("mlp_bias"),
        str(traits.get("qk_norm", "")),
        int(traits.get("norms", 2)),
        experts,
        packed_of(content, path, loads_as),
    )


def _refuse_others(content: Mapping[str, Any], kind: str, path: str, models: Mapping[str, Any]) -> None:
    """Raises:
    ModelFileError: the engine's class of a model is not covered (SM601).
    """
    what = f"{path}: a model whose serving is not covered"
    parts = [name for name in PARTS_OF_OTHERS if content.get(name)]
    if parts:
        why = f"It has {', '.join(parts)}: the engine keeps room for an encoder of images or sound, which is not known."
        raise ModelFileError(what, why, "Give the config of its text model alone.", "SM601")
    if kind not in models:
        why = f"'{kind}' is no decoder whose class in the engine was read: {', '.join(models)}."
        raise ModelFileError(what, why, "--mode generate has the memory of transformers' generate.", "SM601")


def _dtype(content: Mapping[str, Any]) -> DType:
    """The type that an engine takes by itself: that of the config, float32 as bfloat16 (vllm/config/model.py,
    `_resolve_auto_dtype`)."""
    word = str(content.get("dtype") or content.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return dtypes.float16 if word in ("float16", "half") else dtypes.bfloat16


def _lengths(config: _Config, traits: Mapping[str, Any]) -> tuple[int, int, tuple[int, ...]]:
    """The longest sequence, the usual longest one, and rows of tables of positions, as they are scaled.

    Source: vllm/config/model.py, `_get_and_verify_max_len`; layers/rotary_embedding/: yarn_scaling_rope.py,
    linear_scaling_rope.py, dynamic_ntk_scaling_rope.py, phi3_long_rope_scaled_rope.py.
    """
    most = config.whole("max_position_embeddings")
    scaling = config.content.get("rope_scaling") or config.content.get("rope_parameters")
    rope: Mapping[str, Any] = scaling if isinstance(scaling, Mapping) else {}
    kind, factor = str(rope.get("rope_type") or rope.get("type") or "default"), rope.get("factor")
    first = _Config({**config.content, **rope}, config.path).whole("original_max_position_embeddings", most)
    if kind in ("longrope", "su"):
        return most, first, (first + most,)
    if kind not in SCALED or not isinstance(factor, int | float) or not 1 <= factor <= LARGEST_FACTOR:
        return most, most, (most,) * int(traits.get("ropes", 1))
    rows = int((first if kind == "yarn" else most) * factor)
    if traits.get("ropes"):  # Gemma 3: its length is scaled already, and layers with windows have a table as it is
        return most, most, (rows, most)
    return rows, rows, (rows,)


def _windows(config: _Config, traits: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Of each layer how many tokens it sees: by the list of the config, else by the engine's class, else all alike."""
    window = config.whole("sliding_window", 0) if config.switch("use_sliding_window", True) else 0
    kinds = config.content.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    alternates = config.whole("sliding_window_pattern", int(traits.get("alternates", 1)))
    if alternates > 1:
        return tuple(window if (index + 1) % alternates else 0 for index in range(layers))
    return (window,) * layers


def _experts(config: _Config, traits: Mapping[str, Any], layers: int) -> Experts | None:
    count = config.whole("num_local_experts num_experts n_routed_experts", 0)
    if not count:
        return None
    every, dense = config.whole("decoder_sparse_step", 1), config.content.get("mlp_only_layers")
    left_out: Sequence[Any] = dense if isinstance(dense, list) else ()
    return Experts(
        count,
        min(config.whole("num_experts_per_tok"), count),
        config.whole("moe_intermediate_size intermediate_size"),
        config.whole("shared_expert_intermediate_size", 0),
        bool(traits.get("shared_gate")),
        frozenset(index for index in range(layers) if (index + 1) % every == 0 and index not in left_out),
    )
