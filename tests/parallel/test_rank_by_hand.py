"""Facts of ranks that are counted by hand: found missing by scripts/faults/mutants.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staticmem.engine.step import StepResult
from staticmem.liveness import Lifetimes
from staticmem.parallel.blocks import forward_ends
from staticmem.parallel.division import Strategy, ZeroConfig
from staticmem.parallel.rank import on_rank
from staticmem.studies import Study, request_of

BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"
WIDTH, HIDDEN, LENGTH = 64, 200, 16


def step(**words: Any) -> StepResult:
    return Study.open(BLOCKS, request_of({"batch": 2, "optimizer": "adamw", **words})).result


def gathered(prefetch: int) -> int:
    """Most parameters that are whole at one time in ZeRO-3 which lets go of them after each use."""
    config = ZeroConfig(1, prefetch, 0, 10**9, 0, 10**9)
    trace = on_rank(step(), Strategy("zero3", 8, zero=config)).trace
    lives = [
        (b.born, b.died) for b in trace.buffers if b.category == "parameter" and not b.name.startswith("partition")
    ]
    assert all(died is not None for _, died in lives)
    return max(sum(born <= at < (died or 0) for born, died in lives) for at, _ in lives)


def test_zero3_fetches_ahead_as_far_as_its_bucket_reaches() -> None:
    """Of 0 elements nothing; of 1 what is used next; of all of them everything."""
    assert gathered(0) < gathered(1) < gathered(10**9)
    assert gathered(1) <= gathered(0) + 4  # a linear and a norm, weights and biases


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_of_linears_by_columns_are_parts_and_those_by_rows_are_whole(ranks: int) -> None:
    one = step()
    made = on_rank(one, Strategy("tp", ranks))

    def sizes(result: StepResult, name: str, phase: str) -> list[int]:
        """Bytes of what an op makes that the graph calls by this name."""
        numbers = {i for i, op in enumerate(one.graph.ops) if op.modules and op.modules[-1].path.endswith(name)}
        trace = result.trace
        calls = [(trace.kernels[b.kernel], b) for b in trace.buffers if b.kernel is not None]
        return [b.nbytes for k, b in calls if k.op in numbers and k.phase == phase and b.category == "activation"]

    whole = 4 * 2 * LENGTH
    assert sizes(one, ".up", "forward") == [whole * HIDDEN] * 4
    assert sizes(made, ".up", "forward") == [whole * HIDDEN // ranks] * 4
    assert sizes(made, ".down", "forward") == sizes(one, ".down", "forward") == [whole * WIDTH] * 4


def test_mixed_precision_of_a_model_in_float32_changes_nothing() -> None:
    """No parameter is in 16 bits, so there is nothing that the policy casts back."""
    found = [Lifetimes(on_rank(step(), Strategy("fsdp", 4, mixed)).trace).peak_bytes for mixed in (False, True)]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["zero3", "fsdp"])
def test_notes_say_what_is_not_counted(name: str) -> None:
    texts = [note.text for note in on_rank(step(), Strategy(name, 4)).notes]
    assert any("stream" in text for text in texts)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_forward_ends_with_the_first_allocation_of_the_loss(parts: int) -> None:
    result = step(accumulate=parts)
    trace, ends = result.trace, forward_ends(result.trace)
    names = [name for name, _ in trace.phases]
    assert [names[segment] for segment in ends] == ["forward"] * names.count("forward")
    for segment, tick in ends.items():
        start = trace.phases[segment][1]
        stop = trace.phases[segment + 1][1]
        inside = [b for b in trace.buffers if start <= b.born < stop]
        assert all(trace.kernels[b.kernel].op >= 0 for b in inside if b.born < tick)
        after = [b for b in inside if b.born >= tick]
        assert after
        assert all(trace.kernels[b.kernel].op < 0 for b in after)
