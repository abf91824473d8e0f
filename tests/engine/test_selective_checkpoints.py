"""Selective checkpoints: what they keep, against steps that PyTorch runs on the CPU, and what is asked of the user."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from blocks import ACTIVATION, chain
from prepared import run_step

from staticmem.engine.step import StepResult
from staticmem.errors import UsageError
from staticmem.liveness import Lifetimes
from staticmem.scenario.checkpointing import Policy
from staticmem.scenario.step import Scenario
from staticmem.studies import Study, request_of

WIDTH, BATCH = 256, 96


def run(blocks: int, *saves: str, **levers: Any) -> StepResult:
    words = {"checkpoint": ("Block",), "checkpoint_save": saves} | levers
    return run_step(chain(blocks), Scenario(mode="train", loss="cross-entropy", **words))


def activations_at_the_end_of_forward(result: StepResult) -> int:
    alive = Lifetimes(result.trace).alive(result.trace.marks["forward_end"] - 1)
    return sum(b.nbytes == ACTIVATION and b.category == "activation" for b in alive)


def test_kept_results_wait_for_the_recomputation() -> None:
    """Three blocks of linear and relu: the checkpoints keep the inputs of two, and the head its own. With `mm` the
    products wait too."""
    assert activations_at_the_end_of_forward(run(3)) == 3
    assert activations_at_the_end_of_forward(run(3, "mm")) == 6


def test_what_was_kept_is_not_computed_again() -> None:
    result = run(3, "mm")
    assert Counter(result.recomputed) == Counter((1, 3, 5))  # the relus
    kernels = [k.name for k in result.trace.kernels if k.phase == "backward"]
    assert kernels.count("aten.relu.default") == 3
    assert kernels.count("aten.mm.default") + 3 == [
        k.name for k in run(3).trace.kernels if k.phase == "backward"
    ].count("aten.mm.default")


def test_every_second_call_of_a_checkpoint() -> None:
    """Counted in each checkpoint anew: one block has one product, two together have two."""
    assert activations_at_the_end_of_forward(run(4, "mm/2")) == 8
    assert activations_at_the_end_of_forward(run(4, "mm/2", checkpoint_every=2)) == 2 + 2


def test_a_policy_sees_kernels() -> None:
    counts: Counter[str] = Counter()
    policy = Policy(("torch.ops.aten.mm.default", "aten::max.dim", "sdpa", "addmm/3"))
    kept = [
        policy.keeps(call, counts) for call in ("mm", "max", "max.dim", "_scaled_dot_product_flash_attention", "relu")
    ]
    assert kept == [True, False, True, True, False]
    assert [policy.keeps("addmm.default", counts) for _ in range(5)] == [True, False, False, True, False]


def test_a_name_that_nothing_has_is_said() -> None:
    notes = [note for note in run(3, "linear", "mm").notes if note.code == "SM208"]
    assert len(notes) == 1
    assert "linear" in notes[0].text
    assert not [note for note in run(3, "mm").notes if note.code == "SM208"]


@pytest.mark.parametrize("words", [{"checkpoint_save": ("mm",)}, {"checkpoint": "Block", "checkpoint_save": ("mm/0",)}])
def test_what_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        request_of({"mode": "train", **words}).scenario()
    assert error.value.code == "SM160"


def test_compiled_blocks_keep_what_the_policy_names() -> None:
    """ViT-B/16, each block a checkpoint inside of compiled code: live memory of Inductor's code in PyTorch 2.15."""
    words = {"batch": 4, "optimizer": "adamw", "loss": "cross-entropy", "outputs": "dropped"}
    words |= {"compile": "EncoderBlock", "checkpoint": "EncoderBlock"}
    vit = str(Path(__file__).parents[1] / "data" / "graphs" / "vit_b_16.pt2")
    full = Study.open(vit, request_of(words)).lifetimes
    kept = Study.open(vit, request_of(words | {"checkpoint_save": ("addmm", "mm", "sdpa")})).lifetimes
    assert kept.phases["forward"].nbytes == 1_346_762_240 + 512
    assert kept.phases["backward"].nbytes == pytest.approx(1_411_389_440, abs=21_504)
    assert kept.peak_bytes == 1_733_762_560 + 512  # the loss, which that loop deletes
    assert full.phases["forward"].nbytes < kept.phases["forward"].nbytes


# -- against PyTorch ---------------------------------------------------------------------------------------------

POLICIES: list[tuple[str, ...]] = [
    (), ("addmm",), ("addmm/2",), ("gelu",), ("native_layer_norm", "addmm"), ("aten.gelu.default", "aten.add.Tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("saves", "measured"), [((), 281_975_808), (("aten.convolution.default",), 305_432_576)])
def test_checkpoints_of_a_model_that_is_compiled_as_a_whole(saves: tuple[str, ...], measured: int) -> None:
    """ResNet-18 of batch 8, `checkpoint_wrapper` around each block: live memory of Inductor's code in PyTorch 2.15."""
    words: dict[str, Any] = {"batch": 8, "optimizer": "adamw", "loss": "cross-entropy", "outputs": "dropped"}
    words |= {"compile": True, "checkpoint": "BasicBlock", "checkpoint_save": saves}
    path = Path(__file__).parents[2] / "models" / "resnet18.pt2"
    assert Study.open(path, request_of(words)).lifetimes.peak_bytes == measured


@pytest.mark.torch
@pytest.mark.parametrize("saves", POLICIES, ids=" ".join)
def test_peaks_are_those_of_pytorch(saves: tuple[str, ...], tmp_path: Path) -> None:
    from measured_checkpoints import export, peaks

    export(tmp_path / "made.pt2", BATCH, WIDTH)
    words = {"batch": BATCH, "optimizer": "sgd", "loss": "mean", "outputs": "dropped", "mode": "train"}
    words |= {"checkpoint": "Block", "checkpoint_save": saves}
    found = Study.open(str(tmp_path / "made.pt2"), request_of(words)).lifetimes
    measured = peaks(BATCH, WIDTH, saves)
    assert {name: found.phases[name].nbytes for name in measured} == pytest.approx(measured, abs=512)
