"""Ranks of context parallelism against PyTorch's own memory, what the ring holds, and what is refused.

Figures are peaks of the second step of AdamW (of one forward, in inference) in PyTorch 2.14.1 on fake CUDA tensors of
an sm_90 device and a fake process group: `tests/data/context/README.md`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled

import staticmem
from staticmem.cli.main import main
from staticmem.errors import StaticmemError
from staticmem.liveness import Lifetimes
from staticmem.ops.ring_attention import GATHER
from staticmem.parallel.rank import on_one_device, on_rank, strategy_of
from staticmem.parallel.strategies.context import parts
from staticmem.studies import Study, request_of

CONTEXT = Path(__file__).parents[1] / "data" / "context"
MLP = CONTEXT.parent / "graphs" / "mlp_blocks.pt2"
SEQUENCE = {"decoder": "axis1", "llama": "seq"}  # the dimension's name
BLOCK = {"decoder": "Block", "llama": "LlamaDecoderLayer"}
MEASURED: list[dict[str, Any]] = json.loads((CONTEXT / "peaks.json").read_text(encoding="utf-8"))


def study(ranks: int = 4, model: str = "decoder", seq: int = 1024, **words: Any) -> Study:
    asked: dict[str, Any] = {"batch": 2, "optimizer": "adamw", "outputs": "dropped", **words}
    asked |= {"dims": {SEQUENCE[model]: seq}} | ({"context_parallel": ranks} if ranks > 1 else {})
    return Study.open(CONTEXT / f"{model}.pt2", request_of(asked))


def name_of(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items() if key != "peaks")


def study_of(case: dict[str, Any]) -> Study:
    words = {key: value for key, value in case.items() if key not in ("peaks", "checkpoint")}
    words |= {"checkpoint": BLOCK[words.get("model", "decoder")]} if case.get("checkpoint") else {}
    return study(**words, torch_version="2.14")


def peak_of_rank(found: Study, rank: int) -> int:
    one = parts(on_one_device(found.request), found.model, found.binding)[0]
    assert one.context is not None
    one = replace(one, context=replace(one.context, rank=rank))
    strategy = replace(strategy_of(found.request), context=one.context)
    return Lifetimes(on_rank(found.ask(one).result, strategy).trace).peak_bytes


@pytest.mark.parametrize("case", sampled(MEASURED, 3), ids=name_of)
def test_peaks_are_those_of_pytorch(case: dict[str, Any]) -> None:
    found = study_of(case)
    assert {rank: peak_of_rank(found, int(rank)) for rank in case["peaks"]} == case["peaks"]


@pytest.mark.parametrize("case", sampled([c for c in MEASURED if len(c["peaks"]) == c["ranks"]], 2), ids=name_of)
def test_the_report_is_of_the_rank_that_needs_the_most(case: dict[str, Any]) -> None:
    assert study_of(case).lifetimes.peak_bytes == max(case["peaks"].values())


@pytest.mark.torch
def test_the_recording_is_of_that_model() -> None:
    from context_models import factory

    model, inputs = factory()
    words = {"optimizer": "adamw", "outputs": "dropped", "batch": 2, "dims": {"axis1": 1024}, "context_parallel": 4}
    again = Study.open(model, request_of(words), inputs)
    assert again.lifetimes.peak_bytes == study().lifetimes.peak_bytes


def collectives(found: Study) -> list[tuple[str, int]]:
    """Kernels and bytes of what collectives fill, in order."""
    trace = found.result.trace
    return [(trace.kernels[b.kernel].name, b.nbytes) for b in trace.buffers if b.category == "communication"]


# keys and values of a rank of four: 2 samples x 4 heads x 256 tokens x 32 elements, twice
KEYS_AND_VALUES = 2 * 4 * 256 * 32 * 2


def test_an_all_gather_has_the_keys_and_values_of_all_ranks() -> None:
    """Once in the forward and once in the backward of each of 3 layers; gradients in float32 go around 4 times."""
    found = collectives(study(dtype="bf16"))
    assert [size for name, size in found if name == GATHER] == [KEYS_AND_VALUES * 2 * 4] * 6
    assert [size for name, size in found if name != GATHER] == [KEYS_AND_VALUES * 4] * 12


def test_all_to_all_has_those_of_one_rank_at_a_time() -> None:
    """3 times in the forward and 3 times in the backward of 3 layers, beside the gradients."""
    found = collectives(study(dtype="bf16", rotate_method="alltoall"))
    assert sorted(size for _, size in found) == [KEYS_AND_VALUES * 2] * 18 + [KEYS_AND_VALUES * 4] * 12


def test_autograd_saves_what_one_device_does() -> None:
    """In the sizes of a part: at the end of the forward a rank of 4 holds what one device does of a quarter. Inputs and
    targets are whole, 2 x 4 times the 4 KiB of a part, and three parts are beside them. The first rank merges halves
    last, so that the result comes with its heads apart: each layer copies it (2 x 256 x 128 bfloat16)."""
    words: dict[str, Any] = {"dtype": "bf16"}
    kept = [found.report.phases.forward_end_bytes for found in (study(**words), study(1, seq=256, **words))]
    assert kept[0] - kept[1] == (2 * 4 + 3 - 2) * 4096 + 3 * 2 * 256 * 128 * 2


def test_inputs_and_targets_stay_whole() -> None:
    trace = study().result.trace
    inputs = {b.name: b.nbytes for b in trace.buffers if b.category == "input" and not b.name.startswith("part")}
    assert inputs == {"ids": 2 * 1024 * 8, "target": 2 * 1024 * 8}


def test_shards_of_fsdp_are_divided_over_the_ranks_too() -> None:
    """8 devices in 2 groups of 4: each has 1/8 of every parameter, as without context parallelism."""
    words: dict[str, Any] = {"parallel": "fsdp", "devices": 8}
    of_fsdp, of_both = (study(n, **words).result.trace for n in (1, 4))
    shards = [
        sorted(b.nbytes for b in trace.buffers if b.category == "parameter" and b.died is None)
        for trace in (of_fsdp, of_both)
    ]
    assert shards[0] == shards[1]


def test_one_rank_is_one_device() -> None:
    assert study(1, context_parallel=1).lifetimes.peak_bytes == study(1).lifetimes.peak_bytes


def test_more_ranks_take_longer_sequences() -> None:
    """On a card of 4 GiB, where parameters and their state take 9 MiB; lengths are multiples of 64 times the ranks."""
    words: dict[str, Any] = {"batch": 1, "optimizer": "adamw", "amp": "bf16"}
    path, found = str(CONTEXT / "decoder.pt2"), {}
    for ranks in (2, 4):
        found[ranks] = staticmem.max_dim(path, "4GiB", "axis1", context_parallel=ranks, **words)
        assert found[ranks].size % (64 * ranks) == 0
    assert 1.8 < found[4].size / found[2].size < 2.2


def test_notes_and_terminal_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--batch", "2", "--dim", "axis1=1024", "--context-parallel", "4", "--optimizer", "adamw")
    assert main(["analyze", str(CONTEXT / "decoder.pt2"), *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "sequence over 4 ranks" in out
    assert "SM242" in out
    assert "int64[2, 1024]" in out  # the sizes that were asked for
    report = study().report
    assert report.scenario.context_parallel == report.scenario.devices == 4
    text = next(note.text for note in report.assumptions if note.code == "SM242")
    assert "256 of 1,024 tokens" in text
    assert "3 layers of attention" in text


def refusal(path: Path = CONTEXT / "decoder.pt2", **words: Any) -> StaticmemError:
    asked: dict[str, Any] = {"batch": 2, "optimizer": "adamw", "context_parallel": 4, **words}
    with pytest.raises(StaticmemError) as error:
        _ = Study.open(path, request_of(asked)).result
    assert error.value.code == "SM243"
    return error.value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"parallel": "pp", "devices": 4}, "--parallel pp"),
        ({"parallel": "fsdp", "devices": 6}, "divide --devices 6"),
        ({"devices": 8}, "alone is on 4 devices"),
        ({"compile": True}, "--compile"),
        ({"sdpa": "math"}, "--sdpa math"),
        ({"checkpoint": "Block", "checkpoint_save": "mm"}, "--checkpoint-save"),
        ({"offload_activations": "save-on-cpu"}, "--offload-activations"),
        ({"context_parallel": 0}, "out of range"),
        ({"context_parallel": None, "rotate_method": "alltoall"}, "needs --context-parallel"),
        ({"dims": {"axis1": 1028}}, "1,028 tokens"),  # no multiple of 2 x 4
        ({"dims": {"axis1": 1032}}, "1,032 tokens"),  # a multiple, whose log-sum-exp would be padded
    ],
)
def test_what_is_refused(words: dict[str, Any], said: str) -> None:
    assert said in refusal(**words).what


def test_a_half_type_takes_any_two_parts() -> None:
    """Only the memory-efficient kernel pads its log-sum-exp."""
    assert study(seq=1032, amp="bf16").lifetimes.peak_bytes > 0


def test_a_fixed_sequence_is_refused() -> None:
    assert "none is open" in refusal(MLP).why


@pytest.mark.torch
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"is_causal": False}, "not causal"),
        ({"masked": True}, "with a mask"),
        ({"written_out": True}, "no scaled_dot_product_attention"),
        ({"keys": 2}, "attention of 16 queries with 32 keys"),
        ({"width": 6}, "math kernel"),
    ],
)
def test_attention_that_pytorch_does_not_divide(words: dict[str, Any], said: str) -> None:
    import torch
    from torch.nn import functional

    width = words.get("width", 8)

    class Attention(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.project(x).unsqueeze(1)
            k = torch.cat([q] * words.get("keys", 1), 2)
            if words.get("written_out"):
                return torch.softmax(q @ k.transpose(-2, -1), -1) @ k
            mask = q @ k.transpose(-2, -1) > 0 if words.get("masked") else None
            causal = words.get("is_causal", mask is None)
            return functional.scaled_dot_product_attention(q, k, k, mask, is_causal=causal)

    with torch.device("meta"):
        model, inputs = Attention().train(), (torch.zeros((2, 64, width)),)
    asked = {"batch": 2, "dims": {"axis1": 64}, "context_parallel": 4, "mode": "train"}
    with pytest.raises(StaticmemError) as error:
        _ = Study.open(model, request_of(asked), inputs).result
    assert error.value.code == "SM243"
    assert said in error.value.why


def test_sizing_is_of_one_of_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--batch", "2", "--dim", "axis1=4096", "--context-parallel", "4", "--optimizer", "adamw")
    few = ("--no-batches", "--max-memory", "12GB", "--vendor", "NVIDIA")
    assert main(["size", str(CONTEXT / "decoder.pt2"), *words, *few]) == 0
    assert "each sequence over 4 of them" in " ".join(capsys.readouterr().out.split())
    assert main(["fit", str(CONTEXT / "decoder.pt2"), *words, "--gpu", "24GB"]) == 2
    assert "[SM295]" in capsys.readouterr().err
