"""The tensors that a rank of an engine loads, in the order in which its model is built.

Source: vllm/model_executor/models/llama.py and the other files that `vllm.yaml` names; layers/linear.py (query, key and
value are one weight, as are gate and up), layers/vocab_parallel_embedding.py, layers/rotary_embedding/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from staticmem.errors import UsageError
from staticmem.ir.record import record
from staticmem.serving.decoder import Decoder, Experts
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


def tensors(decoder: Decoder, share: Share, padding: int) -> Iterator[Tensor]:
    """The tensors of a rank. `padding`: the vocabulary is a multiple of it."""
    item, hidden = decoder.dtype.itemsize, decoder.hidden
    rows = padded_vocabulary(decoder, padding) // share.ranks
    if share.embeds or (share.answers and decoder.tied):
        yield Tensor("embed_tokens", rows * hidden * item)
    for index in range(share.first, share.last):
        yield from _layer(decoder, share, index)
    if share.answers:
        yield Tensor("norm", hidden * item)
    if share.answers and not decoder.tied:
        yield Tensor("lm_head", rows * hidden * item)


def _layer(decoder: Decoder, share: Share, index: int) -> Iterator[Tensor]:
    item, hidden, ranks = decoder.dtype.itemsize, decoder.hidden, share.ranks
    heads = decoder.heads // ranks
    queries, keys = heads * decoder.head, kv_heads_of(decoder, ranks) * decoder.head
    place = f"layers.{index}"
    yield from _linear(decoder, f"{place}.self_attn.qkv_proj", queries + 2 * keys, hidden, decoder.qkv_bias)
    yield from _linear(decoder, f"{place}.self_attn.o_proj", hidden, queries, decoder.output_bias)
    if (
        index == share.first
    ):  # one table for all layers, vllm/model_executor/layers/rotary_embedding/__init__.py, _ROPE_DICT
        for rows in decoder.tables:
            yield Tensor(f"{place}.self_attn.rotary_emb", rows * decoder.rotary * item)
    for nbytes in SCALES_OF_ATTENTION:
        yield Tensor(f"{place}.self_attn.attn", nbytes)
    if decoder.qk_norm:
        sizes = (queries, keys) if decoder.qk_norm == "all" else (decoder.head, decoder.head)
        yield from (Tensor(f"{place}.self_attn.norms", size * item) for size in sizes)
    if decoder.experts is not None and index in decoder.experts.layers:
        yield from _experts(decoder, decoder.experts, ranks, f"{place}.mlp")
    else:
        yield from _gated(decoder, f"{place}.mlp", decoder.width // ranks)
    for _ in range(decoder.norms):
        yield Tensor(f"{place}.layernorm", hidden * item)


def _gated(decoder: Decoder, place: str, width: int) -> Iterator[Tensor]:
    yield from _linear(decoder, f"{place}.gate_up_proj", 2 * width, decoder.hidden, decoder.mlp_bias)
    yield from _linear(decoder, f"{place}.down_proj", decoder.hidden, width, decoder.mlp_bias)


def _experts(decoder: Decoder, experts: Experts, ranks: int, place: str) -> Iterator[Tensor]:
    """A router that every rank has whole, and a part of each expert."""
    hidden, item, width = decoder.hidden, decoder.dtype.itemsize, experts.width // ranks
    yield Tensor(f"{place}.gate", experts.count * hidden * item)
    if experts.shared_gate:
        yield Tensor(f"{place}.shared_expert_gate", hidden * item)
    if experts.shared:
        yield from _gated(decoder, f"{place}.shared_expert", experts.shared // ranks)
    for name, outputs, inputs in (("w13_weight", 2 * width, hidden), ("w2_weight", hidden, width)):
        for nbytes in decoder.packed.tensors(outputs, inputs, decoder.dtype):
            yield Tensor(f"{place}.experts.{name}", experts.count * nbytes)


def _linear(decoder: Decoder, place: str, outputs: int, inputs: int, bias: bool) -> Iterator[Tensor]:
    packed = WHOLE if f"model.{place}" in decoder.packed.ignored else decoder.packed
    for nbytes in packed.tensors(outputs, inputs, decoder.dtype):
        yield Tensor(place, nbytes)
    if bias:
        yield Tensor(place, outputs * decoder.dtype.itemsize)
