"""Which cards a release of PyTorch serves, and which have a type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.devices import gpus
from staticmem.devices.architectures import Needs, Standing, capability, standing
from staticmem.report.sizing import Sizing
from staticmem.studies import Study, request_of
from staticmem.studies.sizing import Options, size

BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"
CARDS = gpus.cards()


def test_capabilities() -> None:
    assert [capability(name) for name in ("sm_61", "sm_100", "sm_121", "gfx942")] == [(6, 1), (10, 0), (12, 1), None]


PLAIN = Needs()
HALF = Needs(bfloat16=True)


@pytest.mark.parametrize(
    ("slug", "torch", "condition"),
    [
        # https://github.com/pytorch/pytorch/issues/172663: CUDA 13.0 is built from Turing on; 12.6 has Pascal
        ("gtx-1080-ti", "2.13", "PyTorch 2.13's wheel for CUDA 12.6"),
        ("v100-16gb", "2.11", "PyTorch 2.11's wheel for CUDA 12.6"),
        ("v100-16gb", "2.10", ""),  # of CUDA 12.8, with Volta
        ("v100-16gb", "2.15", "of your own, or a PyTorch before 2.15 with its wheel for CUDA 12.6"),
        ("gtx-1080-ti", "2.7", ""),  # kernels for 6.0 run on 6.1
        ("t4", "2.15", ""),
        ("l4", "2.13", ""),  # 8.6 on 8.9
        ("rtx-5090", "2.6", "of your own, or PyTorch 2.7 with its wheel for CUDA 12.8"),
        ("rtx-5090", "2.7", "PyTorch 2.7's wheel for CUDA 12.8"),
        ("rtx-5090", "2.8", ""),
        ("b300", "2.13", ""),  # 10.0 on 10.3
        ("h100-sxm-80gb", "1.13", "of your own, or PyTorch 2.1 from PyPI"),
        ("jetson-agx-orin-64gb", "2.13", "NVIDIA's build of PyTorch for JetPack"),
        ("mi300x", "2.13", ""),
        ("rtx-3090", "1.12", "of your own"),  # PyPI had CUDA 10.2
        ("rtx-3090", "1.12.1+cu113", ""),
        ("rtx-3090", "1.7.1+cu110", ""),  # kernels for 8.0 run on 8.6
        ("h100-sxm-80gb", "1.12+cu113", "of your own, or PyTorch 2.1 from PyPI"),
    ],
)
def test_a_wheel_has_kernels_for_some_chips(slug: str, torch: str, condition: str) -> None:
    """Another build is a condition: the step runs with it."""
    found = standing(CARDS[slug], torch, PLAIN)
    assert found.obstacle == ""
    assert condition in found.condition
    assert bool(condition) == bool(found.condition) == bool(found.reason)


@pytest.mark.parametrize("slug", CARDS)
@pytest.mark.parametrize("torch", ["1.13", "2.2", "2.6", "2.8", "2.13", "2.15"])
def test_every_card_has_an_answer_for_every_release(slug: str, torch: str) -> None:
    for needs in (PLAIN, HALF, Needs(compiled=True), Needs(True, True, True, True, "fused attention")):
        found = standing(CARDS[slug], torch, needs)
        assert not (found.obstacle and found.condition)


def test_bfloat16_is_emulated_before_ampere() -> None:
    """Sources by release are in `devices.architectures`."""
    assert "slow arithmetic in bfloat16" in standing(CARDS["t4"], "2.13", HALF).condition
    assert "wheel for CUDA 12.6 and slow arithmetic" in standing(CARDS["v100-16gb"], "2.13", HALF).condition
    assert standing(CARDS["t4"], "2.13", PLAIN) == standing(CARDS["a10"], "2.13", HALF) == Standing()
    autocast = Needs(bfloat16=True, autocast=True)
    assert "torch.autocast of PyTorch 2.2 refuses" in standing(CARDS["t4"], "2.2", autocast).obstacle
    assert standing(CARDS["t4"], "2.2", HALF).obstacle == standing(CARDS["t4"], "2.3", autocast).obstacle == ""
    assert "--sdpa math" in standing(CARDS["t4"], "2.13", Needs(True, fused="fused attention")).obstacle
    compiled = Needs(True, compiled=True, compiled_bfloat16=True)
    assert "Triton of PyTorch 2.3" in standing(CARDS["t4"], "2.3", compiled).obstacle
    assert "does not compile code in bfloat16" in standing(CARDS["t4"], "2.13", compiled).obstacle
    assert standing(CARDS["l4"], "2.13", compiled) == Standing()


@pytest.mark.torch
def test_heads_of_attention_that_old_cards_run_in_another_kernel() -> None:
    """Sources are in `ops.attention`."""
    torch = pytest.importorskip("torch")
    import staticmem

    class Heads(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width, self.project = width, torch.nn.Linear(16, 3 * width)

        def forward(self, x: Any) -> Any:
            q, k, v = self.project(x).view(*x.shape[:2], 3, 1, self.width).permute(2, 0, 3, 1, 4)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def obstacle(width: int, gpu: str, **words: Any) -> str:
        report = staticmem.analyze(Heads(width), (torch.empty(2, 8, 16, device="meta"),), gpu=gpu, loss="mean", **words)
        assert report.gpu is not None
        return report.gpu.obstacle

    assert "--sdpa math is what it runs" in obstacle(12, "t4", amp="fp16")
    assert "memory-efficient kernel" in obstacle(12, "gtx-1080-ti", dtype="fp16")
    assert "instead of the math kernel" in obstacle(6, "v100-16gb")
    assert "fused attention in bfloat16" in obstacle(12, "t4", amp="bf16")
    for width, gpu, words in (
        (16, "t4", {"amp": "fp16"}), (12, "a10", {"amp": "fp16"}), (12, "t4", {"amp": "fp16", "sdpa": "math"}),
        (12, "t4", {}), (6, "a10", {}), (6, "t4", {"sdpa": "math"}),
    ):  # fmt: skip
        assert obstacle(width, gpu, **words) == ""
    # compiled code calls the same kernels
    assert "--sdpa math is what it runs" in obstacle(12, "t4", amp="fp16", compile=True)
    assert "instead of the math kernel" in obstacle(6, "v100-16gb", compile=True)
    assert obstacle(12, "a10", amp="fp16", compile=True) == ""
    assert obstacle(6, "t4", compile=True, sdpa="math") == ""


@pytest.mark.parametrize(
    ("length", "width", "turned", "training", "differs"),
    [(64, 64, False, True, False), (72, 64, False, True, True), (72, 64, False, False, False),
     (64, 64, True, True, True), (64, 64, True, False, True)],
)  # fmt: skip
def test_float16_attention_before_ampere_is_the_memory_efficient_one(
    length: int, width: int, turned: bool, training: bool, differs: bool
) -> None:
    """What takes other memory than the kernel that is counted is said, in eager and in compiled code."""
    torch = pytest.importorskip("torch")
    import staticmem

    class Heads(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(16, 3 * 4 * width)

        def forward(self, x: Any) -> Any:
            q, k, v = self.project(x).view(*x.shape[:2], 3, 4, width).unbind(2)
            order = (1, 2, 0, 3) if turned else (0, 2, 1, 3)  # sequences first, as in nn.MultiheadAttention
            attend = torch.nn.functional.scaled_dot_product_attention
            attended = attend(q.permute(order), k.permute(order), v.permute(order))
            return attended.permute(2, 0, 1, 3).reshape(-1, 4 * width) if turned else attended

    shape = (length, 8, 16) if turned else (8, length, 16)
    words: dict[str, Any] = {"loss": "mean", "optimizer": "sgd"} if training else {}

    def analyzed(gpu: str, **more: Any) -> Any:
        return staticmem.analyze(Heads(), (torch.empty(shape, device="meta"),), gpu=gpu, dtype="fp16", **words, **more)

    eager, compiled, efficient = analyzed("t4"), analyzed("t4", compile=True), analyzed("t4", sdpa="efficient")
    assert eager.peak.live_bytes == efficient.peak.live_bytes or differs
    said = "memory-efficient attention" if differs else ""
    assert (eager.gpu.condition, compiled.gpu.condition) == (said, said)
    assert (efficient.gpu.condition, analyzed("a10").gpu.condition) == ("", "")


def sized(**words: object) -> Sizing:
    study = Study.open(BLOCKS, request_of({"batch": 32, "optimizer": "adam", **words}))
    chosen = [CARDS[slug] for slug in ("gtx-1080-ti", "t4", "l4")]
    return size(study, Options(chosen, batches=False))


def test_a_card_without_a_condition_is_recommended_first() -> None:
    plain, half = sized(), sized(amp="bf16")
    assert (plain.recommended, half.recommended) == ("t4", "l4")
    assert [bool(row.condition) for row in plain.cards] == [True, False, False]
    assert [bool(row.condition) for row in half.cards] == [True, True, False]
    assert not any(row.obstacle for row in (*plain.cards, *half.cards))
    assert sized(torch_version="2.7").recommended == "gtx-1080-ti"


def test_analyze_says_the_condition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(BLOCKS), "--batch", "4", "--optimizer", "adam", "--amp", "bf16", "--gpu", "t4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "It runs there only with slow arithmetic in bfloat16." in said
    assert "the Tesla T4 runs it with slow arithmetic in bfloat16: bfloat16 is emulated on it" in said


def test_fused_attention_in_bfloat16_needs_ampere(capsys: pytest.CaptureFixture[str]) -> None:
    """Before it PyTorch takes the math kernel, whose memory is another: nothing is said to fit by the fused one's."""
    path = BLOCKS.parent / "gpt2.pt2"
    words = {"batch": 1, "amp": "bf16", "gpu": "t4"}
    fused, math = (Study.open(path, request_of({**words, **more})).report.gpu for more in ({}, {"sdpa": "math"}))
    assert fused is not None
    assert math is not None
    assert (fused.fit, math.fit) == ("cannot run it", "fits")
    assert "--sdpa math is what it runs" in fused.why


def test_compiled_code_needs_triton() -> None:
    pascal, volta, compiled = gpus.find("gtx-1080-ti"), gpus.find("v100"), Needs(compiled=True)
    assert "Triton" in standing(pascal, "2.6", compiled).obstacle
    assert standing(volta, "2.6", compiled).obstacle == standing(pascal, "2.6", PLAIN).obstacle == ""


@pytest.mark.parametrize(
    ("optimizer", "card", "obstacle"),
    [
        # torchao compiles the update of each parameter, whatever is asked
        ("torchao-adamw-8bit", "gtx-1080-ti", "Triton, which needs compute capability 7.0"),
        ("torchao-adamw-fp8", "t4", "float8_e4m3fn from compute capability 8.9 on"),
        ("torchao-adamw-fp8", "a100-sxm-40gb", "float8_e4m3fn from compute capability 8.9 on"),
        ("torchao-adamw-fp8", "l4", ""),
        ("torchao-adamw-8bit", "t4", ""),
    ],
)
def test_optimizers_that_compile_their_update(optimizer: str, card: str, obstacle: str) -> None:
    report = staticmem.analyze(BLOCKS, batch=2, optimizer=optimizer, gpu=card)
    assert report.gpu is not None
    assert obstacle in report.gpu.why
    assert (report.gpu.fit == "cannot run it") == bool(obstacle)
