"""What vLLM's profile run asks of PyTorch's allocator, and the peak that it reads there.

The run is a forward of `max_num_batched_tokens` dummy tokens through the compiled model, attention apart, then the
sampler over logits of `max_num_seqs` sequences. Its tensors go through the replay of the caching allocator behind the
weights, in order: the engine reads allocated bytes, which are those of blocks.

Source: vllm/v1/worker/gpu_model_runner.py (profile_run, _dummy_run, _dummy_sampler_run), vllm/v1/sample/sampler.py and
ops/topk_topp_sampler.py, ops/topk_topp_triton.py, vllm/model_executor/layers/logits_processor.py and fused_moe/.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from staticmem.allocators.cuda_caching import simulate
from staticmem.allocators.process import EMPTY_CACHE, RELEASE, Event
from staticmem.ir.record import record
from staticmem.serving.decoder import EXPERTS, STATE, Decoder, Experts
from staticmem.serving.images import Encoder
from staticmem.serving.weights import Share, kv_heads_of

SORTED_BELOW = 8  # sequences: ops/topk_topp_sampler.py, apply_top_k_top_p sorts fewer, and has a Triton kernel for more
FLOAT32, INT64 = 4, 8


class Phase(Enum):
    """Where the peak is."""

    ENCODER = "the encoder of images"
    COMPILING = "the compilation of its first kernels"
    FORWARD = "the forward"
    SAMPLER = "the sampler"


@record(frozen=True)
class Run:
    """What decides the run beside the model: tokens and sequences of a batch, whether the model is compiled, bytes of
    cuBLAS's workspace and of the second level cache of the card, its multiprocessors, rows of the vocabulary with
    their padding, images of a batch, and rows of the workspace of latent attention."""

    tokens: int
    sequences: int
    compiled: bool
    cublas: int
    cache: int
    processors: int
    rows: int
    images: int = 0
    latent_rows: int = 0


@record(frozen=True)
class Peaks:
    """Allocated bytes of weights, what the run adds to them at its peak, and where that is. `compiled_before`: what it
    adds where the compiler has its code from an earlier start."""

    weights: int
    activation: int
    phase: Phase
    compiled_before: int


class _Tape:
    """Allocations and releases in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.starts: list[tuple[int, Phase | None]] = [(0, None)]

    def take(self, nbytes: int) -> int:
        """An allocation; the id that releases it."""
        key = len(self.events)
        self.events.append(Event(key, nbytes))
        return key

    def free(self, *keys: int) -> None:
        for key in keys:
            self.events.append(Event(key, RELEASE))

    def begin(self, phase: Phase) -> None:
        self.starts.append((len(self.events), phase))

    def phase_at(self, time: int) -> Phase | None:
        return [phase for start, phase in self.starts if start <= time][-1]


def profiled(decoder: Decoder, share: Share, weights: Iterable[int], run: Run) -> Peaks:
    """The peak of the profile run of a rank that has loaded tensors of these bytes."""
    tape = _Tape()
    for nbytes in weights:
        tape.take(nbytes)
    loaded = len(tape.events)
    tape.events.append(Event(-1, EMPTY_CACHE))
    states = run.tokens * decoder.hidden * decoder.dtype.itemsize
    if share.embeds and decoder.encoder is not None:
        tape.begin(Phase.ENCODER)
        _encode(tape, decoder.encoder, run.images, share.ranks, decoder.dtype.itemsize)
    tape.begin(Phase.COMPILING)
    if not share.embeds:  # `intermediate_tensors`, which stay: what the rank before sends, and its residual
        tape.take(states)
        tape.take(states)
    elif run.compiled:
        _compile(tape, decoder, share, run, states)
    begin = len(tape.events)
    tape.begin(Phase.FORWARD)
    output = _forward(tape, decoder, share, run, states)
    tape.begin(Phase.SAMPLER)
    if share.answers:
        _sample(tape, decoder, share, run)
    tape.free(output)
    replay = simulate(tape.events)
    resident = int(replay.allocated[loaded])
    phase = tape.phase_at(replay.peak_allocated_at)
    later = int(max(replay.allocated[begin:])) - resident
    return Peaks(resident, replay.peak_allocated - resident, phase or Phase.FORWARD, later)


def _encode(tape: _Tape, encoder: Encoder, images: int, ranks: int, item: int) -> None:
    """The largest layer over all images, one operation after the other. What goes in stays until the run ends, as does
    what comes out (`encoder_cache`)."""
    rows = images * encoder.patches * item
    tape.take(rows * encoder.pixels)
    mask = tape.take(images * encoder.patches * rows) if encoder.masked else None
    residual, normed = tape.take(rows * encoder.width), tape.take(rows * encoder.width)
    projected = tape.take(rows * 3 * encoder.width // ranks)
    turned = [tape.take(rows * encoder.width // ranks) for _ in range(3)]
    tape.free(projected, *turned)
    wide = tape.take(rows * (1 + encoder.gated) * encoder.inner // ranks)
    active = tape.take(rows * encoder.inner // ranks)
    tape.free(wide, active, normed, *([mask] if mask is not None else []))
    tape.take(images * encoder.tokens * encoder.output * item)
    tape.free(residual)


def _compile(tape: _Tape, decoder: Decoder, share: Share, run: Run, states: int) -> None:
    """While the first piece is compiled its kernel is tried on tensors like its arguments: the embedding, and the two
    results of lookup and norm. Read from two public readings whose peak this is (a first rank of two, and float32),
    within 3 MiB of both; where the sampler follows in half precision it is never the peak."""
    copies = [run.rows // share.ranks * decoder.hidden * decoder.dtype.itemsize, states, states]
    tape.free(*[tape.take(nbytes) for nbytes in copies])


def _forward(tape: _Tape, decoder: Decoder, share: Share, run: Run, states: int) -> int:
    """A layer, which all others repeat; the id of its output. Pieces between attentions hold their arguments until they
    end: the result of attention and the residual."""
    item, tokens = decoder.dtype.itemsize, run.tokens
    queries, keys = _mixed(decoder, share)
    residual, normed = tape.take(states), tape.take(states)
    tape.take(run.cublas)  # of the handle, which stays
    projected = tape.take(tokens * (queries + 2 * keys) * item)
    tape.free(normed)
    turned = [tape.take(tokens * size * item) for size in (queries, keys)]
    attended = tape.take(tokens * queries * item)
    if decoder.latent is not None:  # layers/attention/mla_attention.py: what a prefix would take is tried
        of_head = decoder.heads // share.ranks * (decoder.latent.nope + decoder.latent.value)
        tape.free(tape.take(run.latent_rows * of_head * item))
    tape.free(projected, *turned)
    after = tape.take(states)
    if not run.compiled:
        tape.free(attended)
    normed = tape.take(states)
    experts = decoder.experts
    if experts is not None and any(EXPERTS in parts for parts in decoder.parts[share.first : share.last]):
        output = _expert_layer(tape, decoder, experts, share, run, states)
        tape.free(normed)
    else:
        output = _gated_layer(tape, decoder, share, run, states, normed)
    if run.compiled:
        tape.free(attended)
    tape.free(after, residual)
    return output


def _mixed(decoder: Decoder, share: Share) -> tuple[int, int]:
    """Numbers of a token that queries have, and keys, in the widest layer of a rank."""
    latent, heads = decoder.latent, decoder.heads // share.ranks
    if latent is not None:
        return heads * (latent.nope + latent.rotary), heads * (latent.nope + latent.value) // 2
    queries, keys = heads * decoder.head, kv_heads_of(decoder, share.ranks) * decoder.head
    if decoder.state is not None and any(STATE in parts for parts in decoder.parts[share.first : share.last]):
        width, convolved = decoder.state.width // share.ranks, decoder.state.convolved(share.ranks)
        return max(queries, width), max(keys, convolved // 2)
    return queries, keys


def _gated_layer(tape: _Tape, decoder: Decoder, share: Share, run: Run, states: int, normed: int) -> int:
    width = decoder.width // share.ranks
    both = tape.take(run.tokens * (1 + decoder.gated) * width * decoder.dtype.itemsize)
    tape.free(normed)
    active = tape.take(run.tokens * width * decoder.dtype.itemsize)
    if run.compiled:  # the kernel is timed at its first call: InductorBenchmarker.benchmark_gpu empties the cache
        tape.free(tape.take(run.cache))
    tape.free(both)
    output = tape.take(states)
    tape.free(active)
    return output


def _expert_layer(tape: _Tape, decoder: Decoder, experts: Experts, share: Share, run: Run, states: int) -> int:
    """fused_moe/modular_kernel.py, _allocate_buffers: one workspace of two parts, which stays (v1/worker/workspace.py);
    fused_moe.py, workspace_shapes: a row for each expert that a token is sent to."""
    item, rows, width = decoder.dtype.itemsize, run.tokens * experts.chosen, experts.width // share.ranks
    logits = tape.take(run.tokens * experts.count * item)
    chosen = [tape.take(rows * size) for size in (FLOAT32, FLOAT32)]
    workspace = tape.take(rows * (max(width, decoder.hidden) + max(2 * width, decoder.hidden)) * item)
    # gpt_oss_triton_kernels_moe.py, OAITritonMxfp4ExpertsMonolithic: no workspace that stays
    beside = [workspace] if decoder.packed.experts else []
    if experts.shared:
        shared = experts.shared // share.ranks
        beside += [tape.take(run.tokens * size * item) for size in (2 * shared, shared, decoder.hidden)]
    output = tape.take(states)
    tape.free(logits, *chosen, *beside)
    return output


def _sample(tape: _Tape, decoder: Decoder, share: Share, run: Run) -> None:
    """Logits in the model's type, which the caller holds; a copy in float32, the probabilities, and random numbers by
    which they are divided. The Triton kernel keeps a row of the vocabulary for each program."""
    item, sequences, numbers = decoder.dtype.itemsize, run.sequences, run.sequences * decoder.vocabulary
    last = tape.take(sequences * decoder.hidden * item)
    noise = tape.take(sequences * decoder.hidden * item)
    padded = sequences * run.rows
    logits = tape.take(padded // share.ranks * item)
    if share.ranks > 1:
        gathered = tape.take(padded * item)
        ordered = tape.take(padded * item)
        tape.free(gathered, logits)
        logits = ordered
    if decoder.softcap:  # logits / cap, tanh, and times the cap, each a new tensor
        for _ in range(3):
            capped = tape.take(numbers * item)
            tape.free(logits)
            logits = capped
    scores = logits if item == FLOAT32 else tape.take(numbers * FLOAT32)
    if sequences >= SORTED_BELOW:
        tape.take(min(run.processors, sequences) * decoder.vocabulary * FLOAT32)
    else:
        kept = [tape.take(numbers * size) for size in (FLOAT32, INT64, 1)]
        tape.free(*kept)
    probabilities, random = tape.take(numbers * FLOAT32), tape.take(numbers * FLOAT32)
    tape.free(random, probabilities, logits, noise, last, *([scores] if scores != logits else []))
