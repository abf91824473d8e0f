"""An engine with a model on a card: the parts of each rank, whether it starts, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Any

from staticmem.devices.gpus import Gpu
from staticmem.ir.record import record
from staticmem.serving.cache import Cache, cache_of
from staticmem.serving.decoder import Decoder
from staticmem.serving.profile_run import Peaks, Phase, Run, profiled
from staticmem.serving.rules import Rules
from staticmem.serving.weights import Padding, Share, padded_vocabulary, shares, tensors
from staticmem.units import GIB, MIB, Band, format_bytes

MEASURED_ON = "sm_90"  # the chip of the readings that the rules' figures are from
# Bounds as shares of what is expected: of activations by where the peak is (public readings of vLLM 0.19: within 0.5 %
# in the sampler, whose tensors are all known; within 1 % in the compiled forward, of which three readings are known).
ACTIVATION = {Phase.SAMPLER: 0.02, Phase.FORWARD: 0.06, Phase.COMPILING: 0.1, Phase.ENCODER: 0.4}
NOT_COMPILED = 0.25  # of the forward without the compiler, of which no reading is known
WITH_EXPERTS = 0.08  # one reading
WEIGHTS = 0.005
# Of classes of which no reading is known (encoders, state-space layers, latent attention) bounds are as wide as the
# widest that readings of others asked for: judgement, which one log of such an engine settles.
UNREAD = 0.06  # activations
UNREAD_WEIGHTS = 0.01
UNREAD_OUTSIDE = 0.3  # of what is not PyTorch's and of CUDA graphs; of experts one reading is known, a fifth above
LATENT_ROWS = 65536  # layers/attention/mla_attention.py, determine_chunked_prefill_workspace_size
OTHER_VERSION = {"weights": 0.01, "activation": 0.25, "outside": 0.5}
OTHER_CHIP = 0.4  # of what is not PyTorch's on a card without readings
# What CUDA shows of a card differs by driver: 79.11 to 79.19 GiB of an H100 (vllm-project/vllm issue 27508, and the
# public readings).
TOTAL_BY_DRIVER = 96 * MIB


@record(frozen=True)
class Asked:
    """What the engine is asked, with its defaults filled in. `item`: bytes of a number in the cache."""

    utilization: float
    length: int
    sequences: int
    batched: int
    item: int
    eager: bool
    tensor: int
    pipeline: int


@record(frozen=True)
class Stage:
    """The parts of one rank, of every rank of its stage: bytes that are read, and those left for the cache."""

    share: Share
    weights: Band
    activation: Band
    outside: Band
    graphs: Band
    left: Band
    phase: Phase
    block: int

    @property
    def blocks(self) -> Band:
        return Band(*(max(left, 0) // self.block for left in self.left))


@record(frozen=True)
class Refusal:
    """Why an engine does not start: a key of its messages, the message, and bytes that are missing: 0 where it refuses
    what it is asked, before it loads anything."""

    key: str
    message: str
    missing: int = 0


class Engine:
    """An engine that starts. The questions after it are asked of others like it (`asking`)."""

    def __init__(self, decoder: Decoder, card: Gpu, rules: Rules, asked: Asked) -> None:
        """Raises:
        UsageError: there are more stages than layers.
        ModelFileError: groups of layers that are not covered.
        """
        self.decoder, self.card, self.rules, self.asked = decoder, card, rules, asked
        self.cache: Cache = cache_of(decoder, asked.tensor, asked.item, rules.data["block_tokens"])

    def asking(self, **others: Any) -> Engine:
        """The same with other words."""
        return Engine(self.decoder, self.card, self.rules, replace(self.asked, **others))

    @property
    def requested(self) -> int:
        """`request_memory`, vllm/v1/worker/utils.py."""
        return ceil(self.card.usable * self.asked.utilization)

    @property
    def way(self) -> str:
        """How ranks divide the model, as the rules name it."""
        if self.asked.tensor > 1:
            return "tensor"
        return "pipeline" if self.asked.pipeline > 1 else "one"

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(map(self._stage, shares(self.decoder.layers, self.asked.tensor, self.asked.pipeline)))

    @cached_property
    def fewest(self) -> Stage:
        """The stage that holds the fewest blocks: all have as many (`get_kv_cache_configs`)."""
        return min(self.stages, key=lambda stage: stage.blocks.expected)

    @property
    def blocks(self) -> Band:
        low, expected, high = (min(counts) for counts in zip(*(stage.blocks for stage in self.stages), strict=True))
        return Band(low, expected, high)

    @property
    def tokens(self) -> Band:
        return Band(*map(self.cache.tokens, self.blocks))

    @property
    def concurrency(self) -> float:
        return self.held("expected")

    @property
    def at_start(self) -> Band:
        """Held on the card when the engine first looks at it."""
        return self._on_this_card(self.rules.outside(self.way, "at_start"))

    @cached_property
    def captured(self) -> tuple[int, ...]:
        """Sizes of CUDA graphs (`_set_cudagraph_sizes`, vllm/config/vllm.py)."""
        if self.asked.eager:
            return ()
        largest = self.decoder.captured or self.rules.data["largest_capture"]
        most = min(2 * self.asked.sequences, largest, self.asked.batched)
        sizes = {size for size in (1, 2, 4) if size <= most}
        sizes |= set(range(8, min(most + 1, 256), 8)) | set(range(256, most + 1, 16))
        return tuple(sorted(sizes))

    def refusal(self, left_over: str = "expected") -> Refusal | None:
        """Why the engine ends with an error; None where it starts. `left_over`: at which end of the bands."""
        return next(self._refusals(left_over), None)

    def largest_length(self, at: str = "expected", requests: int = 1) -> int:
        """The longest request of which it holds so many, at an end of its bands; 0: there is none."""
        return self.cache.longest(getattr(self.blocks, at) // requests, self.asked.batched, self.decoder.positions)

    def held(self, at: str) -> float:
        """Requests of the greatest length that it holds at once, at an end of its bands."""
        return self.cache.concurrency(getattr(self.blocks, at), self.asked.length, self.asked.batched)

    def largest_sequences(self, at: str = "expected", most: int = 1 << 14) -> int:
        """The most requests at once with which it starts, at an end of its bands; 0: there is none. More take memory of
        the sampler."""
        low, high = 0, min(most, self.asked.batched)
        while low < high:
            middle = (low + high + 1) // 2
            if self.asking(sequences=middle).refusal(at) is None:
                low = middle
            else:
                high = middle - 1
        return low

    # -- one rank ------------------------------------------------------------------------------------------------

    def _stage(self, share: Share) -> Stage:
        decoder, rules, asked = self.decoder, self.rules, self.asked
        padding = Padding(rules.data["vocabulary_padding"], *rules.padding_of_mxfp4(self.card))
        run = Run(
            asked.batched,
            min(asked.sequences, asked.batched),
            not asked.eager,
            rules.of_chip("cublas_mib", self.card),
            rules.of_chip("cache_mib", self.card),
            self.card.processors,
            padded_vocabulary(decoder, padding.vocabulary),
            decoder.encoder.images(asked.batched, asked.sequences, asked.length) if decoder.encoder is not None else 0,
            self._latent_rows(),
        )
        peaks = profiled(decoder, share, [tensor.nbytes for tensor in tensors(decoder, share, padding)], run)
        doubt = UNREAD_WEIGHTS if decoder.is_unread else WEIGHTS
        weights = _within(peaks.weights, doubt if rules.was_read else OTHER_VERSION["weights"])
        low, expected, high = _within(peaks.activation, self._doubt(peaks))
        activation = Band(min(low, int(peaks.compiled_before * (1 - ACTIVATION[Phase.FORWARD]))), expected, high)
        if peaks.phase is not Phase.COMPILING:
            activation = Band(low, expected, high)
        outside = self._on_this_card(rules.outside(self.way, "forward"))
        graphs = self._graphs(share)
        taken = Band(*map(sum, zip(weights, activation, outside, strict=True)))
        most = ceil((self.card.usable + TOTAL_BY_DRIVER) * asked.utilization)
        left = Band(self.requested - taken.high, self.requested - taken.expected, most - taken.low)
        return Stage(share, weights, activation, outside, graphs, left, peaks.phase, self.cache.block_bytes(share))

    def _latent_rows(self) -> int:
        """`determine_chunked_prefill_workspace_size` of layers/attention/mla_attention.py."""
        asked, block = self.asked, int(self.rules.data["block_tokens"])
        wanted = max(8 * asked.length, 4 * asked.sequences * block)
        return max(min(wanted, LATENT_ROWS), asked.sequences * block)

    def _doubt(self, peaks: Peaks) -> float:
        doubt = ACTIVATION[peaks.phase]
        if self.asked.eager and peaks.phase is Phase.FORWARD:
            doubt = NOT_COMPILED
        if self.decoder.experts is not None:
            doubt = max(doubt, WITH_EXPERTS)
        if self.decoder.is_unread:
            doubt = max(doubt, UNREAD)
        return doubt if self.rules.was_read else max(doubt, OTHER_VERSION["activation"])

    def _on_this_card(self, band: Band) -> Band:
        chip = self.card.chip or self.card.architecture
        wider = OTHER_CHIP if chip != MEASURED_ON else 0.0
        wider += 0.0 if self.rules.was_read else OTHER_VERSION["outside"]
        wider += UNREAD_OUTSIDE if self.decoder.is_unread or self.decoder.experts is not None else 0.0
        return Band(int(band.low * max(1 - wider, 0)), band.expected, int(band.high * (1 + wider)))

    def _graphs(self, share: Share) -> Band:
        if self.asked.eager:
            return Band(0, 0, 0)
        figures = self.rules.data["graphs"]
        pieces = len(self.captured) * (share.last - share.first)
        expected = int(figures["beside_gib"] * GIB + figures["piece_mib"] * MIB * pieces)
        low, high = figures["share"]
        return self._on_this_card(Band(int(low * expected), expected, int(high * expected)))

    # -- whether it starts ---------------------------------------------------------------------------------------

    def _refusals(self, at: str) -> Iterator[Refusal]:
        """In the order in which the engine meets them."""
        asked, decoder = self.asked, self.decoder
        if asked.length > decoder.positions:
            yield self._said("beyond", length=asked.length, longest=decoder.positions)
        if decoder.heads % asked.tensor:
            yield self._said("heads", heads=decoder.heads, ranks=asked.tensor)
        if asked.batched < asked.sequences:
            yield self._said("few_tokens", tokens=asked.batched, sequences=asked.sequences)
        usable, share = self.card.usable, f"{asked.utilization:g}"
        held: int = getattr(self.at_start, OTHER_END[at])
        if usable - held < self.requested:
            shown = {"free": format_bytes(usable - held), "total": format_bytes(usable)}
            missing = self.requested + held - usable
            yield self._said("not_free", missing, utilization=share, asked=format_bytes(self.requested), **shown)
        for stage in self.stages:
            yield from self._of_stage(stage, at, usable - held)

    def _of_stage(self, stage: Stage, at: str, free: int) -> Iterator[Refusal]:
        """What the memory of a rank refuses; `free` bytes of the card are the engine's to take, whatever it asked."""
        asked, end, left = self.asked, OTHER_END[at], int(getattr(stage.left, at))
        needed = self.cache.blocks_of_request(asked.length, asked.batched)
        weights, peak = getattr(stage.weights, end), getattr(stage.activation, end) + getattr(stage.outside, end)
        if weights > free:
            yield self._said("load", weights - free)
        elif weights + peak > free:
            yield self._said("profile", weights + peak - free)
        elif left <= 0:
            yield self._said("no_cache", max(-left, 1))
        elif needed * stage.block > left:
            longest = self.cache.longest(left // stage.block, asked.batched, self.decoder.positions)
            shown = {"needed": format_bytes(needed * stage.block), "available": format_bytes(left)}
            missing = needed * stage.block - left
            yield self._said("too_long", missing, length=asked.length, longest=longest, **shown)
        missing = self.requested + getattr(stage.graphs, end) - free
        if missing > 0:
            yield self._said("capture", missing)

    def _said(self, key: str, missing: int = 0, **values: object) -> Refusal:
        return Refusal(key, self.rules.says(key, **values), missing)


OTHER_END = {"low": "high", "expected": "expected", "high": "low"}


def _within(expected: int, share: float) -> Band:
    return Band(int(expected * (1 - share)), expected, int(expected * (1 + share)))
