"""The cache of keys and values as vLLM divides it: pages of layers, groups of layers, blocks, tokens, requests.

Source: vllm/v1/core/kv_cache_utils.py and vllm/v1/kv_cache_interface.py; functions here carry the names of those there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, takewhile

from staticmem.errors import ModelFileError
from staticmem.ir.record import record
from staticmem.serving.decoder import ATTENTION, STATE, Decoder
from staticmem.serving.weights import Share, kv_heads_of
from staticmem.units import ceil_div

DRAWS, DRAWN_LENGTHS = 200, 10_000  # of requests that run at once, and of lengths that they have


@record(frozen=True)
class Spec:
    """What a layer keeps: a page of `page` bytes for a block of `tokens` tokens; with a `window` of the last ones; or
    with a `state` one page for a whole request."""

    tokens: int
    page: int
    window: int = 0
    state: bool = False

    def blocks(self, length: int, batched: int) -> int:
        """`max_memory_usage_bytes` in pages: blocks that a request of a length holds at most, while `batched` tokens of
        it are worked on at once."""
        if self.state:
            return 1
        if not self.window:
            return ceil_div(length, self.tokens)
        # a window may begin within a block
        return ceil_div(min(self.window - 1 + batched, length), self.tokens) + 1


@record(frozen=True)
class Group:
    """Layers that share a table of blocks."""

    spec: Spec
    layers: tuple[int, ...]


@record(frozen=True)
class Cache:
    """The groups of a whole model."""

    groups: tuple[Group, ...]

    def block_bytes(self, share: Share) -> int:
        """Bytes of a block on a rank: a page of each layer of its largest group."""
        most = max(sum(share.first <= layer < share.last for layer in group.layers) for group in self.groups)
        return most * self.groups[0].spec.page

    def blocks_of_request(self, length: int, batched: int) -> int:
        return sum(group.spec.blocks(length, batched) for group in self.groups)

    def tokens(self, blocks: int) -> int:
        """`_report_kv_cache_config`."""
        return blocks // len(self.groups) * min(group.spec.tokens for group in self.groups)

    def concurrency(self, blocks: int, length: int, batched: int) -> float:
        """`get_max_concurrency_for_kv_cache_config`: requests of a length at once."""
        return blocks / self.blocks_of_request(length, batched)

    def at_once(self, blocks: int, lengths: Sequence[int], batched: int, most: int) -> tuple[float, int]:
        """Requests of drawn lengths that fit at once, `most` at most: on average, and in 95 of 100 draws."""
        draw = random.Random(0)  # noqa: S311 - lengths, no secrets
        needs = [self.blocks_of_request(length, batched) for length in draw.choices(lengths, k=DRAWN_LENGTHS)]
        counts = []
        for _ in range(DRAWS):
            sums = accumulate(draw.choices(needs, k=most))
            counts.append(sum(1 for _ in takewhile(lambda taken: taken <= blocks, sums)))
        return sum(counts) / DRAWS, sorted(counts)[DRAWS // 20]

    def longest(self, blocks: int, batched: int, most: int) -> int:
        """`_estimate_max_model_len_from_groups`: the longest request that fits; 0: none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_of_request(middle, batched) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


def cache_of(decoder: Decoder, ranks: int, item: int, tokens: int) -> Cache:
    """The cache of a decoder whose layers are shared by `ranks`; `item` bytes for each number. `tokens`: of a block.

    Raises:
        ModelFileError: the groups of its layers cannot be divided evenly (SM601).
    """
    of_token = item_of_token(decoder, ranks, item)
    state = decoder.state.page(ranks, decoder.dtype.itemsize) if decoder.state is not None else 0
    # HybridAttentionMambaModelConfig, vllm/model_executor/models/config.py: a block is as large as a state
    tokens = max(tokens, ceil_div(state, tokens * of_token) * tokens)
    page = tokens * of_token
    by_spec: dict[Spec, list[int]] = {}
    for layer, (parts, window) in enumerate(zip(decoder.parts, decoder.windows, strict=True)):
        if STATE in parts:
            by_spec.setdefault(Spec(tokens, page, state=True), []).append(layer)
        elif ATTENTION in parts:
            by_spec.setdefault(Spec(tokens, page, window), []).append(layer)
    if len(by_spec) == 1:
        return Cache(tuple(Group(spec, tuple(layers)) for spec, layers in by_spec.items()))
    if len(by_spec) != 2:
        what = "layers with several windows, or without attention"
        raise ModelFileError(what, "Their groups are not covered.", "One window beside full attention is.", "SM601")
    return Cache(tuple(_uniform_page_size(list(by_spec.items()))))


def item_of_token(decoder: Decoder, ranks: int, item: int) -> int:
    """Bytes of a token in a layer. A latent vector is on every rank (MLAAttentionSpec)."""
    if decoder.latent is not None:
        return (decoder.latent.rank + decoder.latent.rotary) * item
    return 2 * kv_heads_of(decoder, ranks) * decoder.head * item


def _uniform_page_size(by_spec: Sequence[tuple[Spec, list[int]]]) -> list[Group]:
    """`_get_kv_cache_groups_uniform_page_size`: groups of as many layers as the rarer kind has, unless the kinds are
    nearly as many."""
    counts = [len(layers) for _, layers in by_spec]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for spec, layers in by_spec:
        parts = ceil_div(len(layers), size)
        groups += [Group(spec, tuple(layers[part::parts])) for part in range(parts)]
    return groups
