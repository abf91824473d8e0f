"""Ranks of expert parallelism against PyTorch's own memory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.parallel.strategies.fsdp import shard_numel
from staticmem.studies import Study, request_of

DATA = Path(__file__).parents[1] / "data"
EXPERTS = DATA / "experts" / "moe_blocks.pt2"
QWEN = DATA / "experts" / "qwen3_moe.pt2"

# What `expert_models.peak` measures with torch 2.13.0: ranks that share experts, devices, and words of the step.
MEASURED: list[tuple[int, int, dict[str, Any], int]] = [
    (1, 1, {}, 8250368), (1, 1, {"impl": "foreach"}, 10210816), (1, 1, {"batch": 8}, 11462144),
    (2, 2, {}, 5174784), (2, 2, {"worst": True}, 5717504), (2, 2, {"mixed": True}, 4770816),
    (2, 2, {"accumulate": 2}, 6014464), (2, 4, {}, 3793408), (2, 4, {"worst": True}, 4423680),
    (2, 4, {"mixed": True}, 2904576), (2, 4, {"batch": 8, "outputs": "held"}, 7676928),
    (2, 4, {"impl": "foreach"}, 3782144), (2, 4, {"mixed": True, "accumulate": 2}, 3267584),
    (2, 4, {"worst": True, "accumulate": 3, "batch": 4}, 6712320), (4, 4, {}, 3153408),
    (4, 4, {"worst": True}, 5511168),
    (4, 4, {"mixed": True}, 2518016), (4, 8, {}, 2528256), (4, 8, {"worst": True}, 4896768),
    (4, 8, {"mixed": True}, 1740800), (4, 8, {"accumulate": 2}, 2784256), (8, 8, {}, 2391552),
    (8, 8, {"worst": True}, 4651008), (8, 8, {"mixed": True}, 1602048), (2, 16, {}, 2655744),
    (2, 16, {"mixed": True}, 1709568), (4, 16, {}, 2179584), (8, 16, {"worst": True}, 4347904),
    (8, 16, {"accumulate": 2}, 2139648), (8, 64, {}, 1726976), (8, 64, {"worst": True}, 4086784),
    (8, 64, {"mixed": True}, 937472), (8, 64, {"batch": 8, "outputs": "held"}, 6248448),
]  # fmt: skip


def study(ranks: int = 1, devices: int = 1, path: Path = EXPERTS, **words: Any) -> Study:
    asked: dict[str, Any] = {"batch": 2, "optimizer": "adamw", "outputs": "dropped", **words}
    asked |= {"parallel": "fsdp", "devices": devices} if devices > 1 else {}
    asked |= {"expert_parallel": ranks} if ranks > 1 else {}
    return Study.open(path, request_of(asked))


@pytest.mark.parametrize(("ranks", "devices", "words", "measured"), MEASURED)
def test_peaks_are_those_of_pytorch(ranks: int, devices: int, words: dict[str, Any], measured: int) -> None:
    asked = {"optimizer_impl": words.get("impl", "fused"), "amp": "bf16" if words.get("mixed") else None}
    asked |= {key: words[key] for key in ("batch", "accumulate", "outputs") if key in words}
    found = study(ranks, devices, **asked)
    if words.get("worst"):
        assert found.live_band == (found.lifetimes.peak_bytes, measured)
    else:
        assert found.lifetimes.peak_bytes == measured


@pytest.mark.torch
@pytest.mark.parametrize(("ranks", "devices", "words", "measured"), MEASURED[::4])
def test_pytorch_still_measures_that(ranks: int, devices: int, words: dict[str, Any], measured: int) -> None:
    from expert_models import peak

    assert peak(ranks, devices, **words) == measured


@pytest.mark.torch
def test_the_recording_is_of_that_model() -> None:
    from expert_models import factory

    model, inputs = factory()
    words: dict[str, Any] = {"optimizer": "adamw", "outputs": "dropped", "batch": 2}
    again = Study.open(model, request_of(words), inputs)
    assert again.lifetimes.peak_bytes == study().lifetimes.peak_bytes


def test_a_rank_has_its_share_of_experts() -> None:
    """96 x 64 weights three times for each of 8 experts in 3 layers, divided by 4 ranks and then by 2 devices."""
    trace = study(4, 8).result.trace
    shards = [b for b in trace.buffers if ".experts." in b.name and b.category == "parameter" and b.died is None]
    assert sum(b.nbytes for b in shards) == 3 * 3 * 8 * 96 * 64 * 4 // 8
    gathered = [b for b in trace.buffers if b.name == "layers.0.moe.experts.up" and b.died is not None]
    assert {b.nbytes for b in gathered} == {2 * 96 * 64 * 4}


def kernel(found: Any, buffer: Any) -> str:
    name: str = found.result.trace.kernels[buffer.kernel].name
    return name


def exchanged(found: Any) -> set[int]:
    """The numbers of rows that all-to-alls of a step give."""
    buffers = found.result.trace.buffers
    return {b.shape[0] for b in buffers if len(b.shape) == 2 and "all_to_all" in kernel(found, b)}


def test_rows_that_arrive_follow_the_load() -> None:
    """64 tokens of 2 choices on each of 4 ranks with 2 experts each: balanced 128 rows, at worst 64 x 2 x 4."""
    found = study(4, 4)
    assert exchanged(found) == {128}
    assert found.band.heaviest is not None
    assert exchanged(found.band.heaviest) == {128, 512}
    of_ranks = {
        b.category for b in found.result.trace.buffers if b.shape == (128, 64) and "all_to_all" in kernel(found, b)
    }
    assert of_ranks == {"communication"}


def test_one_expert_of_a_token_is_on_a_rank_at_most_once() -> None:
    """8 ranks with one expert each: a token of 2 choices comes once."""
    heaviest = study(8, 8).band.heaviest
    assert heaviest is not None
    assert exchanged(heaviest) == {128, 8 * 64}


def test_shards_of_the_second_dimension_are_even() -> None:
    assert shard_numel((1, 96, 64), 8, 1) == 96 * 64 // 8
    with pytest.raises(UsageError, match="evenly") as error:
        _ = study(2, 128).result
    assert error.value.code == "SM109"


def test_one_rank_of_experts_is_fsdp() -> None:
    alone = study(1, 4).lifetimes.peak_bytes
    assert (
        staticmem.analyze(
            EXPERTS, batch=2, optimizer="adamw", outputs="dropped", parallel="fsdp", devices=4, expert_parallel=1
        ).peak.live_bytes
        == alone
    )


def test_inference_exchanges_rows_too() -> None:
    found = study(4, 4, optimizer=None)
    assert exchanged(found) == {128}
    assert found.live_band is not None


def test_notes_say_both_loads() -> None:
    found = study(4, 8).report
    texts = [note.text for note in found.assumptions if note.code == "SM241"]
    assert len(texts) == 1
    assert "2 of 8 experts of 3 layers" in texts[0]
    assert "balanced" in texts[0]


def test_the_terminal_says_what_the_band_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--parallel", "fsdp", "--devices", "8", "--expert-parallel", "4", "--optimizer", "adamw")
    assert main(["analyze", str(EXPERTS), "--batch", "2", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "one of 8 devices, experts over 4 ranks" in out
    assert "by the tokens that go to a rank's experts" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--expert-parallel", "2"), "--parallel fsdp"),
        (("--parallel", "ddp", "--devices", "4", "--expert-parallel", "2"), "--parallel fsdp"),
        (("--parallel", "fsdp", "--devices", "4", "--expert-parallel", "3"), "divisor"),
        (("--parallel", "fsdp", "--devices", "16", "--expert-parallel", "16"), "8 experts"),
        (("--parallel", "fsdp", "--devices", "4", "--expert-parallel", "2", "--clip-grad-norm"), "--clip-grad-norm"),
        (("--parallel", "fsdp", "--devices", "4", "--expert-parallel", "2", "--compile", "Block"), "--compile"),
    ],
)  # fmt: skip
def test_bad_words(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    code = main(["analyze", str(EXPERTS), "--batch", "2", "--optimizer", "adamw", *words])
    out = capsys.readouterr()
    assert (code, out.out) == (2, "")
    assert "[SM109]" in out.err
    assert said in out.err


def test_a_model_without_experts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--parallel", "fsdp", "--devices", "4", "--expert-parallel", "2", "--optimizer", "adamw")
    assert main(["analyze", str(DATA / "graphs" / "mlp_blocks.pt2"), *words]) == 2
    err = capsys.readouterr().err
    assert "[SM109]" in err
    assert "no experts" in err


# Qwen3-MoE of `tests/data/experts/README.md`, batch 2 x 128, AdamW in float32 unless said: peaks of PyTorch 2.14.1 and
# transformers 5.24 on fake CUDA tensors of an sm_90 device, every storage rounded up to 512 bytes.
OF_TRANSFORMERS = [
    ({}, 80133632), ({"dtype": "bf16"}, 40077312), ({"amp": "bf16"}, 80133632),
    ({"batch": 8, "seq": 256}, 231895552), ({"batch": 8, "seq": 256, "dtype": "bf16"}, 128636928),
    ({"batch": 8, "seq": 256, "amp": "bf16"}, 210519040),
]  # fmt: skip


@pytest.mark.parametrize(("words", "measured"), OF_TRANSFORMERS)
def test_experts_of_transformers_on_one_device(words: dict[str, Any], measured: int) -> None:
    asked: dict[str, Any] = {"batch": 2, **words}
    assert study(path=QWEN, dims={"seq": asked.pop("seq", 128)}, **asked).lifetimes.peak_bytes == measured


# The same model, batch 2 x 64, attention by its math kernel, on a fake process group of PyTorch 2.13.0, on the CPU.
# Experts are `grouped_mm_experts_forward` of transformers 5.24 with `expert_models.there` in front of the products, and
# `back` behind them.
RANKS_OF_TRANSFORMERS = [
    (1, 4, {}, 40266240), (2, 2, {}, 45403136), (2, 2, {"worst": True}, 46980096), (2, 4, {"mixed": True}, 25952256),
    (4, 8, {}, 25560064), (4, 8, {"worst": True}, 33703936), (4, 8, {"mixed": True, "accumulate": 2}, 19514368),
    (4, 8, {"checkpoint": True}, 21697536), (4, 8, {"checkpoint": True, "worst": True, "batch": 8}, 49737216),
    (8, 8, {"mixed": True}, 16920576), (8, 32, {}, 20325376), (8, 32, {"worst": True}, 28469248),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "devices", "words", "measured"), RANKS_OF_TRANSFORMERS)
def test_experts_of_transformers_on_ranks(ranks: int, devices: int, words: dict[str, Any], measured: int) -> None:
    asked: dict[str, Any] = {"optimizer_impl": "fused", "sdpa": "math", "dims": {"seq": 64}}
    asked |= {"amp": "bf16"} if words.get("mixed") else {}
    asked |= {"checkpoint": "Qwen3MoeDecoderLayer"} if words.get("checkpoint") else {}
    asked |= {key: words[key] for key in ("batch", "accumulate") if key in words}
    found = study(ranks, devices, QWEN, **asked)
    if words.get("worst"):
        assert found.live_band == (found.lifetimes.peak_bytes, measured)
    else:
        assert found.lifetimes.peak_bytes == measured
