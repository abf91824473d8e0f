"""What does not go with strategies of several GPUs, of options that may be given together."""

from __future__ import annotations

from collections.abc import Mapping

from staticmem.errors import UsageError
from staticmem.scenario.adapters import Quantized
from staticmem.scenario.low_rank import LOW_RANK
from staticmem.scenario.step import GRAPH_MODES, TORCHAO, WHOLE
from staticmem.scenario.strategies import BLOCKS, STRATEGIES, WEIGHT_ONLY, facts_of

MOST_RANKS = 1024  # that share a sequence; a step runs as many turns


def check_compiled_rank(parallel: str, compiled: tuple[str, ...], mode: str) -> None:
    """Raises UsageError where compiled code and a strategy do not go together, or what they would do is not covered."""
    if mode in GRAPH_MODES:
        raise UsageError(
            f"--compile-mode {mode} and --parallel {parallel} cannot be combined",
            "What the hooks of a strategy do between CUDA graphs is not covered.",
            "Leave one of them out.",
            code="SM185",
        )
    covered = STRATEGIES[parallel].compiles
    if not covered:
        raise UsageError(
            f"--compile and --parallel {parallel} cannot be combined",
            "What compiled code does under it is not covered; under DDP, and in blocks under FSDP2, it is.",
            "Leave one of them out, or use --parallel ddp, or --parallel fsdp --compile CLASS.",
            code="SM167",
        )
    if WHOLE in compiled and covered == BLOCKS:
        raise UsageError(
            "--compile of the whole model and --parallel fsdp cannot be combined",
            "The hooks of FSDP2 around each block break the compiled graph there, in ways that are not covered.",
            "Compile the blocks: --compile and the name of their class.",
            code="SM167",
        )


def check_optimizer_on_ranks(optimizer: str | None, parallel: str | None) -> None:
    """Raises UsageError where what an optimizer does with divided parameters is not covered."""
    whole = {
        **dict.fromkeys(
            ("muon", *LOW_RANK),
            "It reads whole matrices, and how a library divides its work among GPUs is not covered.",
        ),
        **dict.fromkeys(TORCHAO, "Which blocks of a divided parameter its states have is not covered."),
    }
    facts = facts_of(parallel)
    if optimizer in whole and facts is not None and not facts.keeps_whole:
        raise UsageError(
            f"{optimizer} and --parallel {parallel} cannot be combined",
            whole[optimizer],
            "Use --parallel ddp, or --optimizer adamw.",
            code="SM127",
        )


def check_expert_parallel(ranks: int, parallel: str | None, devices: int | None, others: Mapping[str, bool]) -> None:
    """Raises UsageError where ranks cannot share experts, or what they would do is not covered. `others`: flags that
    are not covered with it, and whether they were given."""
    what = f"--expert-parallel {ranks}"
    facts = facts_of(parallel)
    if facts is None or not facts.experts:
        raise UsageError(
            f"{what} needs --parallel fsdp",
            "Ranks that share experts shard everything else by FSDP2, as in torchtitan.",
            f"Example: --parallel fsdp --devices 8 --expert-parallel {ranks}",
            code="SM109",
        )
    _check_divides(what, ranks, devices, "the experts of all layers", "SM109")
    for flag, asked in others.items():
        if asked and ranks > 1:
            raise UsageError(
                f"{what} and {flag} cannot be combined",
                "What it does to experts on several ranks is not covered.",
                f"Leave {flag} out.",
                code="SM109",
            )


def _check_divides(what: str, ranks: int, devices: int | None, shared: str, code: str) -> None:
    """Raises UsageError where devices are no groups of so many ranks, which have something in common."""
    if ranks < 1 or (devices is not None and devices % ranks):
        raise UsageError(
            f"{what} does not divide --devices {devices}",
            f"The devices are groups of ranks, and the ranks of each group share {shared}.",
            "Give a divisor of the number of devices.",
            code=code,
        )


def check_packed_weights(quantized: Quantized, parallel: str) -> None:
    """Raises UsageError where how a strategy divides packed weights is not covered. Those that divide what is trained
    alone leave them whole."""
    if (WEIGHT_ONLY if quantized.weight_only else quantized.bits) in STRATEGIES[parallel].packed:
        return
    others = "ddp" if quantized.weight_only else "ddp, zero1 or zero2" if quantized.bits == 8 else "ddp, zero2 or fsdp"
    raise UsageError(
        f"--quantize {quantized.name} and --parallel {parallel} cannot be combined",
        "How the strategy divides packed weights and their statistics is not covered.",
        f"Leave one of them out, or use --parallel {others}.",
        code="SM188",
    )


def check_context_parallel(ranks: int, parallel: str | None, devices: int | None, others: Mapping[str, bool]) -> None:
    """Raises UsageError where ranks cannot share the sequence, or what they would do is not covered. `others` as in
    `check_expert_parallel`."""
    what = f"--context-parallel {ranks}"
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(
            f"{what} is out of range",
            f"It is a number of ranks from 1 to {MOST_RANKS:,}.",
            "Example: --context-parallel 4",
            code="SM243",
        )
    facts = facts_of(parallel)
    if facts is not None and not facts.sequences:
        raise UsageError(
            f"{what} and --parallel {parallel} cannot be combined",
            "Context parallelism is covered alone and beside FSDP2, whose shards are divided over its ranks too.",
            f"Example: --parallel fsdp --devices {2 * ranks} --context-parallel {ranks}",
            code="SM243",
        )
    if parallel is None and devices not in (None, ranks):
        raise UsageError(
            f"{what} alone is on {ranks} devices, not {devices}",
            "Beside it nothing is divided over further devices.",
            "Leave --devices out, or add --parallel fsdp.",
            code="SM243",
        )
    if parallel is not None:
        _check_divides(what, ranks, devices, "the sequence of its samples", "SM243")
    for flag, asked in others.items():
        if asked and ranks > 1:
            why = "What they do together is not covered."
            why = "PyTorch divides its fused kernels alone." if flag == "--sdpa math" else why
            raise UsageError(f"{what} and {flag} cannot be combined", why, f"Leave {flag} out.", code="SM243")
