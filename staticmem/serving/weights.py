"""The tensors that a rank of an engine loads, in the order in which its model is built.

Source: vllm/model_executor/models/llama.py and the other files that `vllm.yaml` names; layers/linear.py (query, key and
value are one weight, as are gate and up), layers/vocab_parallel_embedding.py, layers/rotary_embedding/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.serving.decoder import ATTENTION, DENSE, STATE, Decoder, Experts, Latent, State
from staticmem.serving.packing import WHOLE
from staticmem.units import round_up

# bytes of the scales of an attention: layers/attention/attention.py, set_default_quant_scales
SCALES_OF_ATTENTION = (4, 4, 4, 4)


@record(frozen=True)
class Share:
    """What a rank has: one of `ranks` parts of each layer from `first` to `last` (exclusive), the embedding where these
    begin with the first, and the output head where they end with the last."""

    ranks: int
    first: int
    last: int
    embeds: bool
    answers: bool


@record(frozen=True)
class Padding:
    """What sizes of a rank are multiples of: the vocabulary, and of experts in mxfp4 the hidden size and the width,
    each as an input of a weight and as its output."""

    vocabulary: int
    hidden: tuple[int, int] = (1, 1)
    width: tuple[int, int] = (1, 1)


class Tensor(NamedTuple):
    """A tensor of a rank: its module, and its bytes."""

    module: str
    nbytes: int


def shares(layers: int, tensor: int, pipeline: int) -> tuple[Share, ...]:
    """The ranks that differ: one of each stage of the pipeline.

    Source: vllm/distributed/utils.py, get_pp_indices: what is left over goes to the stages before the last.

    Raises:
        UsageError: there are more stages than layers (SM602).
    """
    if pipeline > layers:
        why = f"The model has {layers} layers."
        raise UsageError(f"a pipeline of {pipeline} stages", why, f"Use --devices {layers} at most.", "SM602")
    counts = [layers // pipeline] * pipeline
    for place in range(2, layers % pipeline + 2):
        counts[-place] += 1
    starts = [sum(counts[:stage]) for stage in range(pipeline)]
    return tuple(
        Share(tensor, start, start + count, stage == 0, stage == pipeline - 1)
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    )


def padded_vocabulary(decoder: Decoder, padding: int) -> int:
    return round_up(decoder.vocabulary, padding)


def kv_heads_of(decoder: Decoder, ranks: int) -> int:
    """Heads of keys and values that a rank has: each has a copy where there are more ranks than heads."""
    return max(decoder.kv_heads // ranks, 1)


def tensors(decoder: Decoder, share: Share, padding: Padding) -> Iterator[Tensor]:
    """The tensors of a rank. `padding`: what sizes are multiples of."""
    item, hidden = decoder.dtype.itemsize, decoder.hidden
    rows = padded_vocabulary(decoder, padding.vocabulary) // share.ranks
    if share.embeds and decoder.encoder is not None:
        for count in decoder.encoder.tensors(share.ranks):
            yield Tensor("encoder", count * item)
    if share.embeds or (share.answers and decoder.tied):
        yield Tensor("embed_tokens", rows * hidden * item)
    if share.embeds and decoder.learned:
        yield Tensor("embed_positions", decoder.learned * hidden * item)
    for index in range(share.first, share.last):
        yield from _layer(decoder, share, index, padding)
    if share.answers:
        yield from _norm(decoder, "norm")
    if share.answers and not decoder.tied:
        yield Tensor("lm_head", rows * hidden * item)
    if share.answers and decoder.head_bias:
        yield Tensor("lm_head", rows * item)


def _layer(decoder: Decoder, share: Share, index: int, padding: Padding) -> Iterator[Tensor]:
    ranks, place = share.ranks, f"layers.{index}"
    for part in decoder.parts[index]:
        if part == ATTENTION:
            yield from _attention(decoder, ranks, f"{place}.self_attn", index == share.first)
        elif part == STATE:
            assert decoder.state is not None
            yield from _state(decoder, decoder.state, ranks, f"{place}.mixer")
        elif part == DENSE:
            yield from _feed_forward(decoder, f"{place}.mlp", decoder.width // ranks)
        else:
            assert decoder.experts is not None
            yield from _experts(decoder, decoder.experts, ranks, f"{place}.mlp", padding)
    for _ in range(decoder.norms):
        yield from _norm(decoder, f"{place}.layernorm")


def _norm(decoder: Decoder, place: str) -> Iterator[Tensor]:
    for _ in range(1 + decoder.norm_bias):
        yield Tensor(place, decoder.hidden * decoder.dtype.itemsize)


def _attention(decoder: Decoder, ranks: int, place: str, first: bool) -> Iterator[Tensor]:
    item, hidden, heads = decoder.dtype.itemsize, decoder.hidden, decoder.heads // ranks
    queries, keys = heads * decoder.head, kv_heads_of(decoder, ranks) * decoder.head
    if decoder.latent is not None:
        yield from _latent(decoder, decoder.latent, heads, place)
    else:
        yield from _linear(decoder, f"{place}.qkv_proj", queries + 2 * keys, hidden, decoder.qkv_bias)
        yield from _linear(decoder, f"{place}.o_proj", hidden, queries, decoder.output_bias)
    if first:  # one table for all layers, vllm/model_executor/layers/rotary_embedding/__init__.py, _ROPE_DICT
        for rows in decoder.tables:
            yield Tensor(f"{place}.rotary_emb", rows * decoder.rotary * item)
    for nbytes in SCALES_OF_ATTENTION:
        yield Tensor(f"{place}.attn", nbytes)
    if decoder.sinks:
        yield Tensor(f"{place}.sinks", heads * item)
    if decoder.qk_norm:
        sizes = (queries, keys) if decoder.qk_norm == "all" else (decoder.head, decoder.head)
        yield from (Tensor(f"{place}.norms", size * item) for size in sizes)


def _latent(decoder: Decoder, latent: Latent, heads: int, place: str) -> Iterator[Tensor]:
    """models/deepseek_v2.py, DeepseekV2MLAAttention: what makes the vectors is whole on each rank. Where weights are
    packed, `process_weights_after_loading` of layers/attention/mla_attention.py keeps one of them in the model's type
    too."""
    item, hidden = decoder.dtype.itemsize, decoder.hidden
    queries, both = heads * (latent.nope + latent.rotary), heads * (latent.nope + latent.value)
    if latent.queries:
        yield from _linear(decoder, f"{place}.q_a_proj", latent.queries, hidden, False)
        yield Tensor(f"{place}.q_a_layernorm", latent.queries * item)
    yield from _linear(decoder, f"{place}.q_proj", queries, latent.queries or hidden, False)
    yield from _linear(decoder, f"{place}.kv_a_proj", latent.rank + latent.rotary, hidden, False)
    yield Tensor(f"{place}.kv_a_layernorm", latent.rank * item)
    yield from _linear(decoder, f"{place}.kv_b_proj", both, latent.rank, False)
    yield from _linear(decoder, f"{place}.o_proj", hidden, heads * latent.value, False)
    if decoder.packed.bits and not decoder.packed.leaves(f"{place}.kv_b_proj"):
        yield Tensor(f"{place}.kv_b_proj, whole", both * latent.rank * item)


def _state(decoder: Decoder, state: State, ranks: int, place: str) -> Iterator[Tensor]:
    """layers/mamba/mamba_mixer2.py: the rates are float32."""
    item, width, heads = decoder.dtype.itemsize, state.width // ranks, state.heads // ranks
    convolved = state.convolved(ranks)
    yield Tensor(f"{place}.conv1d", convolved * state.kernel * item)
    if state.convolution_bias:
        yield Tensor(f"{place}.conv1d", convolved * item)
    yield from _linear(decoder, f"{place}.in_proj", width + convolved + heads, decoder.hidden, state.bias)
    for nbytes in (4, item, item):
        yield Tensor(f"{place}.rates", heads * nbytes)
    yield from _linear(decoder, f"{place}.out_proj", decoder.hidden, width, state.bias)
    yield Tensor(f"{place}.norm", width * item)


def _feed_forward(decoder: Decoder, place: str, width: int) -> Iterator[Tensor]:
    outputs = (1 + decoder.gated) * width
    yield from _linear(decoder, f"{place}.gate_up_proj", outputs, decoder.hidden, decoder.mlp_bias)
    yield from _linear(decoder, f"{place}.down_proj", decoder.hidden, width, decoder.mlp_bias)


def _experts(decoder: Decoder, experts: Experts, ranks: int, place: str, padding: Padding) -> Iterator[Tensor]:
    """A router that every rank has whole, and a part of each expert."""
    hidden, item, width = decoder.hidden, decoder.dtype.itemsize, experts.width // ranks
    yield Tensor(f"{place}.gate", experts.count * hidden * item)
    if experts.biased:
        yield Tensor(f"{place}.gate", experts.count * item)
    if experts.corrected:
        yield Tensor(f"{place}.gate.e_score_correction_bias", experts.count * 4)
    if experts.shared_gate:
        yield Tensor(f"{place}.shared_expert_gate", hidden * item)
    if experts.shared:
        yield from _feed_forward(decoder, f"{place}.shared_expert", experts.shared // ranks)
    if not decoder.packed.experts:
        padding = Padding(padding.vocabulary)
    (hidden_in, hidden_out), (width_in, width_out) = (
        [round_up(size, multiple) for multiple in multiples]
        for size, multiples in ((hidden, padding.hidden), (width, padding.width))
    )
    first = (1 + decoder.gated) * width_out
    for name, outputs, inputs in (("w13_weight", first, hidden_in), ("w2_weight", hidden_out, width_in)):
        module = f"{place}.experts.{name}"
        packed = WHOLE if decoder.packed.leaves(module) else decoder.packed
        for nbytes in packed.tensors(outputs, inputs, decoder.dtype):
            yield Tensor(module, experts.count * nbytes)
        if experts.biased:  # gpt_oss_triton_kernels_moe.py takes them in float32
            yield Tensor(module, experts.count * outputs * 4)


def _linear(decoder: Decoder, place: str, outputs: int, inputs: int, bias: bool) -> Iterator[Tensor]:
    packed = WHOLE if decoder.packed.leaves(place) else decoder.packed
    for nbytes in packed.tensors(outputs, inputs, decoder.dtype):
        yield Tensor(place, nbytes)
    if bias:
        yield Tensor(place, outputs * decoder.dtype.itemsize)
