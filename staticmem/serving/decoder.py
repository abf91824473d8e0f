"""A decoder as a serving engine builds it: what decides its memory, from a config of transformers, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from staticmem.errors import ModelFileError
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.ir.record import record
from staticmem.serving.config import Config
from staticmem.serving.images import Encoder, encoder_of
from staticmem.serving.packing import Packed, kv_item_of, packed_of

SCALED = ("yarn", "linear", "dynamic")  # kinds of positions whose tables are longer by a factor
LARGEST_FACTOR = 1024  # configs have up to 64
TEXT = "text_config"
# parts of a config that are no decoder of text
PARTS_OF_OTHERS = ("audio_config", "encoder_config", "encoder", "thinker_config", "vision_config", TEXT)
ATTENTION, STATE, DENSE, EXPERTS = "attention", "state", "dense", "experts"
# letters of `hybrid_override_pattern`, vllm/model_executor/models/nemotron_h.py
LETTERS = {"M": STATE, "*": ATTENTION, "-": DENSE, "E": EXPERTS}
# the same of transformers, whose releases name a state-space layer in two ways
WORDS = {"mamba": STATE, "linear_attention": STATE, "attention": ATTENTION, "full_attention": ATTENTION}
WORDS |= {"mlp": DENSE, "moe": EXPERTS}


@record(frozen=True)
class Experts:
    """Experts of a layer: how many, how many a token is sent to, the width of each, that of those which all tokens pass
    (0: none), whether these have a gate, whether experts and their router have biases, and whether the router has a
    float32 of each expert beside (`e_score_correction_bias`)."""

    count: int
    chosen: int
    width: int
    shared: int
    shared_gate: bool = False
    biased: bool = False
    corrected: bool = False


@record(frozen=True)
class Latent:
    """Keys and values as one vector of `rank` numbers and `rotary` turned ones, which all heads share. A head has
    `nope` numbers of a key that are not turned, and `value` of a value; `queries`: the rank of queries, 0: whole."""

    rank: int
    rotary: int
    nope: int
    value: int
    queries: int


@record(frozen=True)
class State:
    """A state-space layer (Mamba 2): `heads` of `head` numbers with `size` states for each, in `groups`; its
    convolution sees `kernel` tokens. `bias`: of its projections; `item`: bytes of a number of its state (0: as the
    model's type)."""

    heads: int
    head: int
    size: int
    groups: int
    kernel: int
    bias: bool
    convolution_bias: bool
    item: int

    @property
    def width(self) -> int:
        return self.heads * self.head

    def groups_of(self, ranks: int) -> int:
        """Of all ranks: each has a copy where they cannot be divided (`extra_groups_for_head_shards`)."""
        return self.groups if self.groups % ranks == 0 else ranks

    def convolved(self, ranks: int) -> int:
        """Channels of the convolution on a rank."""
        return (self.width + 2 * self.groups_of(ranks) * self.size) // ranks

    def page(self, ranks: int, item: int) -> int:
        """Bytes that a sequence keeps on a rank: layers/mamba/mamba_utils.py, `mamba2_state_shape`."""
        kept = self.heads // ranks * self.head * self.size
        return (self.kernel - 1) * self.convolved(ranks) * item + kept * (self.item or item)


@record(frozen=True)
class Decoder:
    """What decides the memory of a decoder.

    Attributes:
        width: of a layer without experts; `gated`: it has a gate beside.
        head: the size of a head; `rotary` of it are turned by positions.
        parts: of each layer, in their order: attention, state, dense, experts; each has its share of `norms`.
        windows: of each layer how many tokens its attention sees; 0: all.
        positions: the longest sequence; `usual` is the engine's where none is asked for.
        qk_norm: norms of queries and keys: "" without, "head" for each head, "all" for all heads at once.
        norms: of a layer.
        norm_bias: norms have a bias.
        tables: rows of each table of positions, which all layers share; `learned`: rows of the learned one.
        sinks: each head has a number that takes attention of no token.
        captured: the largest captured size, where the class has another than the engine.
        kv_item: bytes of a number in the cache, as the checkpoint says it; 0: as the model's type.
    """

    kind: str
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head: int
    rotary: int
    vocabulary: int
    parts: tuple[tuple[str, ...], ...]
    windows: tuple[int, ...]
    positions: int
    usual: int
    tables: tuple[int, ...]
    learned: int
    dtype: DType
    tied: bool
    softcap: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_bias: bool
    gated: bool
    qk_norm: str
    norms: int
    norm_bias: bool
    sinks: bool
    captured: int
    kv_item: int
    experts: Experts | None
    latent: Latent | None
    state: State | None
    encoder: Encoder | None
    packed: Packed

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def is_unread(self) -> bool:
        """Whether it has a part of which no reading of an engine is known."""
        return any((self.encoder, self.latent, self.state, self.sinks, self.learned, not self.gated))


def decoder_of(
    content: Mapping[str, Any], path: str, rules: Mapping[str, Any], dtype: DType | None, loads_as: str
) -> Decoder:
    """The decoder that a config describes.

    Args:
        content: the config, checked as `frontends.architectures` does.
        rules: of the engine: `models` and `encoders` say what its class of each `model_type` has.
        dtype: the type that was asked for; None: that of the config, float32 as bfloat16.
        loads_as: the type that the engine packs weights to while it loads them; "": none.

    Raises:
        ModelFileError: the engine's class is not covered (SM601), or the config lacks a size (SM145).
    """
    kind = outer = str(content["model_type"])[:60]
    sees: Mapping[str, Any] | None = rules["encoders"].get(outer)
    inner, text = content, content.get(TEXT)
    if sees is not None:
        kind = sees["text"]
        inner = {**content, **text} if isinstance(text, Mapping) else content
    _refuse_others(content if kind == outer else {}, kind, path, rules)
    traits: Mapping[str, Any] = rules["models"][kind]
    config = Config({**traits.get("defaults", {}), **inner}, path)
    kinds = inner.get("layers_block_type")
    layers = config.whole("num_hidden_layers n_layer num_layers", len(kinds) if isinstance(kinds, list) else None)
    experts = _experts(config, traits)
    parts = _parts(config, traits, layers, experts)
    encoder = encoder_of(content, path, sees, config) if sees is not None else None
    normed = "qk_norm_if" not in traits  # some classes have it where the config says so
    return Decoder(
        kind=outer,
        parts=parts,
        windows=_windows(config, traits, layers),
        dtype=dtype if dtype is not None else _dtype({**inner, **content}),
        tied=config.switch("tie_word_embeddings", bool(traits.get("tied"))),
        softcap=bool(config.content.get("final_logit_softcapping", traits.get("softcap"))),
        gated=not traits.get("ungated"),
        qk_norm=str(traits.get("qk_norm", "")) if config.switch(str(traits.get("qk_norm_if")), normed) else "",
        norms=_norms(config, traits),
        sinks=bool(traits.get("sinks")),
        captured=int(traits.get("captured", 0)),
        kv_item=kv_item_of(content),
        experts=experts,
        latent=_latent(config) if traits.get("latent") else None,
        # Granite 4 without such layers is no hybrid to the engine: vllm/config/model.py, is_hybrid
        state=_state(config, traits) if any(STATE in one for one in parts) else None,
        encoder=encoder,
        packed=packed_of(content, path, loads_as),
        **_sizes(config, traits, experts),
        **_biases(config, traits),
        **_lengths(config, traits),
    )


def _sizes(config: Config, traits: Mapping[str, Any], experts: Experts | None) -> dict[str, Any]:
    heads = config.whole("num_attention_heads n_head")
    hidden = config.whole("hidden_size n_embd")
    head = config.whole("head_dim", max(hidden // heads, 1))
    partial = config.content.get("partial_rotary_factor", traits.get("partial_rotary"))
    turned = partial if isinstance(partial, float) and 0 < partial <= 1 else 1.0
    names, otherwise = str(traits.get("width", "intermediate_size")), experts.width if experts is not None else None
    return {
        "hidden": hidden,
        "width": config.whole(names, 4 * hidden if names == "ffn_hidden_size" else otherwise),
        "heads": heads,
        "kv_heads": _kv_heads(config, heads),
        "head": head,
        "rotary": config.whole("qk_rope_head_dim", int(head * turned)),
        "vocabulary": config.whole("vocab_size"),
    }


def _kv_heads(config: Config, heads: int) -> int:
    """Falcon: one for all heads where `multi_query`, unless it is of the new kind."""
    if config.switch("multi_query") and not config.switch("new_decoder_architecture"):
        return 1
    return config.whole("num_key_value_heads num_kv_heads", heads)


def _biases(config: Config, traits: Mapping[str, Any]) -> dict[str, Any]:
    biased = config.switch(
        "attention_bias", config.switch("bias", config.switch("use_bias", bool(traits.get("biased"))))
    )
    return {
        "qkv_bias": bool(traits.get("qkv_bias")) or biased,
        "output_bias": bool(traits.get("output_bias", biased)) and not traits.get("no_output_bias"),
        "mlp_bias": config.switch("mlp_bias", biased and bool(traits.get("ungated"))),
        "head_bias": config.switch("lm_head_bias", bool(traits.get("head_bias"))),
        "norm_bias": bool(traits.get("norm_bias")),
    }


def _norms(config: Config, traits: Mapping[str, Any]) -> int:
    """Of a layer: attention and the rest share one where they run side by side."""
    parallel = config.switch("parallel_attn") and not config.switch("new_decoder_architecture")
    return 1 if parallel else int(traits.get("norms", 2))


def _latent(config: Config) -> Latent:
    queries = config.whole("q_lora_rank", 0)
    rank, rotary = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    return Latent(rank, rotary, config.whole("qk_nope_head_dim"), config.whole("v_head_dim"), queries)


def _state(config: Config, traits: Mapping[str, Any]) -> State:
    # vllm/model_executor/models/config.py, NemotronHForCausalLMConfig: that of the config, else float16
    item = 4 if config.content.get("mamba_ssm_cache_dtype") == "float32" else 2
    return State(
        config.whole("mamba_n_heads mamba_num_heads"),
        config.whole("mamba_d_head mamba_head_dim"),
        config.whole("mamba_d_state ssm_state_size"),
        config.whole("mamba_n_groups n_groups", 1),
        config.whole("mamba_d_conv conv_kernel", 4),
        config.switch("mamba_proj_bias"),
        config.switch("mamba_conv_bias", config.switch("use_conv_bias", True)),
        item if traits.get("alone") else 0,
    )


def _parts(
    config: Config, traits: Mapping[str, Any], layers: int, experts: Experts | None
) -> tuple[tuple[str, ...], ...]:
    """The parts of each layer: attention or state, then one of experts or none."""
    pattern = config.content.get("hybrid_override_pattern")
    if traits.get("state") and isinstance(pattern, str) and len(pattern) == layers and set(pattern) <= set(LETTERS):
        return tuple((LETTERS[letter],) for letter in pattern)
    alone = config.content.get("layers_block_type")
    if traits.get("alone") and isinstance(alone, list) and len(alone) == layers:
        return tuple((WORDS.get(str(kind), DENSE),) for kind in alone)
    kinds = config.content.get("layer_types")
    states = traits.get("state") and isinstance(kinds, list) and len(kinds) == layers
    with_experts = _layers_with_experts(config, layers) if experts is not None else frozenset()
    listed: Sequence[Any] = kinds if states and isinstance(kinds, list) else [ATTENTION] * layers
    return tuple(
        (WORDS.get(str(kind), ATTENTION), EXPERTS if index in with_experts else DENSE)
        for index, kind in enumerate(listed)
    )


def _refuse_others(content: Mapping[str, Any], kind: str, path: str, rules: Mapping[str, Any]) -> None:
    """Raises:
    ModelFileError: the engine's class of a model is not covered (SM601).
    """
    what = f"{path}: a model whose serving is not covered"
    parts = [name for name in PARTS_OF_OTHERS if content.get(name)]
    models = [*rules["models"], *rules["encoders"]]
    if parts:
        why = f"It has {', '.join(parts)}: the engine keeps room for an encoder of images or sound, which is not known."
        raise ModelFileError(what, why, "Give the config of its text model alone.", "SM601")
    if kind not in rules["models"]:
        why = f"'{kind}' is no decoder whose class in the engine was read: {', '.join(models)}."
        raise ModelFileError(what, why, "--mode generate has the memory of transformers' generate.", "SM601")


def _dtype(content: Mapping[str, Any]) -> DType:
    """The type that an engine takes by itself: that of the config, float32 as bfloat16 (vllm/config/model.py,
    `_resolve_auto_dtype`)."""
    word = str(content.get("dtype") or content.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return dtypes.float16 if word in ("float16", "half") else dtypes.bfloat16


def _lengths(config: Config, traits: Mapping[str, Any]) -> dict[str, Any]:
    """The longest sequence, the usual longest one, and rows of tables of positions."""
    most = config.whole("max_position_embeddings n_positions")
    if traits.get("learned"):  # two rows stand before them, OPTLearnedPositionalEmbedding
        return {"positions": most, "usual": most, "tables": (), "learned": most + int(traits["learned"])}
    longest, usual, tables = _scaled(config, traits, most)
    if traits.get("no_rope") or config.content.get("position_embedding_type") == "nope":
        tables = ()
    return {"positions": longest, "usual": usual, "tables": tables, "learned": 0}


def _scaled(config: Config, traits: Mapping[str, Any], most: int) -> tuple[int, int, tuple[int, ...]]:
    """Source: vllm/config/model.py, `_get_and_verify_max_len`; layers/rotary_embedding/: yarn_scaling_rope.py,
    linear_scaling_rope.py, dynamic_ntk_scaling_rope.py, phi3_long_rope_scaled_rope.py.
    """
    scaling = config.content.get("rope_scaling") or config.content.get("rope_parameters")
    rope: Mapping[str, Any] = scaling if isinstance(scaling, Mapping) else {}
    kind, factor = str(rope.get("rope_type") or rope.get("type") or "default"), rope.get("factor")
    first = Config({**config.content, **rope}, config.path).whole("original_max_position_embeddings", most)
    if kind in ("longrope", "su"):
        return most, first, (first + most,)
    if rope.get("mrope_section"):  # mrope.py, MRotaryEmbedding: four times as many, for videos
        return most, most, (4 * most,)
    if kind not in SCALED or not isinstance(factor, int | float) or not 1 <= factor <= LARGEST_FACTOR:
        return most, most, (most,) * int(traits.get("ropes", 1))
    rows = int((first if kind == "yarn" else most) * factor)
    if traits.get("ropes"):  # Gemma 3: its length is scaled already, and layers with windows have a table as it is
        return most, most, (rows, most)
    return rows, rows, (rows,)


def _windows(config: Config, traits: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Of each layer how many tokens it sees: by the list of the config, else by the engine's class, else all alike."""
    window = config.whole("sliding_window", 0) if config.switch("use_sliding_window", True) else 0
    if traits.get("no_windows"):
        return (0,) * layers
    kinds = config.content.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    alternates = config.whole("sliding_window_pattern", int(traits.get("alternates", 1)))
    if alternates > 1:
        return tuple(window if (index + 1) % alternates else 0 for index in range(layers))
    return (window,) * layers


def _experts(config: Config, traits: Mapping[str, Any]) -> Experts | None:
    count = config.whole("num_local_experts num_experts n_routed_experts", 0)
    if not count:
        return None
    width = config.whole(str(traits.get("expert_width", "moe_intermediate_size intermediate_size")))
    beside = config.whole("shared_expert_intermediate_size shared_intermediate_size", 0)
    if traits.get("shared") == "as wide":
        beside = width
    elif not beside:
        each = config.whole("moe_shared_expert_intermediate_size", width)
        beside = config.whole("n_shared_experts num_shared_experts", 0) * each
    return Experts(
        count,
        min(config.whole("num_experts_per_tok"), count),
        width,
        beside,
        bool(traits.get("shared_gate")),
        bool(traits.get("expert_bias")),
        bool(traits.get("corrected")) or config.content.get("topk_method") == "noaux_tc",
    )


def _layers_with_experts(config: Config, layers: int) -> frozenset[int]:
    every = config.whole("decoder_sparse_step interleave_moe_layer_step", 1)
    frequency, first = config.whole("moe_layer_freq", 1), config.whole("first_k_dense_replace", 0)
    dense = config.content.get("mlp_only_layers")
    left_out: Sequence[Any] = dense if isinstance(dense, list) else ()
    return frozenset(
        index
        for index in range(first, layers)
        if (index + 1) % every == 0 and index % frequency == 0 and index not in left_out
    )
