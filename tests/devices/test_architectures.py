"""Which cards a release of PyTorch serves, and which have a type."""

from __future__ import annotations

from pathlib import Path

import pytest

from staticmem.cli.main import main
from staticmem.devices import gpus
from staticmem.devices.architectures import capability, obstacle
from staticmem.report.sizing import Sizing
from staticmem.studies import Study, request_of
from staticmem.studies.sizing import Options, size

BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"
CARDS = gpus.cards()


def test_capabilities() -> None:
    assert [capability(name) for name in ("sm_61", "sm_100", "sm_121", "gfx942")] == [(6, 1), (10, 0), (12, 1), None]


@pytest.mark.parametrize(
    ("slug", "torch", "words"),
    [
        # https://github.com/pytorch/pytorch/issues/172663: CUDA 13.0 is built from Turing on; 12.6 has Pascal
        ("gtx-1080-ti", "2.13", "6.1; its wheel for CUDA 12.6 has"),
        ("v100-16gb", "2.11", "7.0; its wheel for CUDA 12.6 has"),
        ("v100-16gb", "2.10", ""),  # of CUDA 12.8, with Volta
        ("v100-16gb", "2.15", "PyTorch 2.15 from PyPI (CUDA 13.2) has no kernels for compute capability 7.0"),
        ("gtx-1080-ti", "2.7", ""),  # kernels for 6.0 run on 6.1
        ("t4", "2.15", ""),
        ("l4", "2.13", ""),  # 8.6 on 8.9
        ("rtx-5090", "2.6", "12.0"),
        ("rtx-5090", "2.7", "its wheel for CUDA 12.8 has"),
        ("rtx-5090", "2.8", ""),
        ("b300", "2.13", ""),  # 10.0 on 10.3
        ("h100-sxm-80gb", "1.13", "9.0"),
        ("mi300x", "2.13", ""),
    ],
)
def test_a_wheel_has_kernels_for_some_chips(slug: str, torch: str, words: str) -> None:
    found = obstacle(CARDS[slug], torch)
    assert words in found
    assert bool(words) == bool(found)


def test_bfloat16_begins_with_ampere() -> None:
    assert "no arithmetic in bfloat16" in obstacle(CARDS["t4"], "2.13", {"bfloat16", "float32"})
    assert obstacle(CARDS["t4"], "2.13", {"float16", "float32"}) == ""
    assert obstacle(CARDS["a10"], "2.13", {"bfloat16"}) == ""


def sized(**words: object) -> Sizing:
    study = Study.open(BLOCKS, request_of({"batch": 32, "optimizer": "adam", **words}))
    chosen = [CARDS[slug] for slug in ("gtx-1080-ti", "t4", "l4")]
    return size(study, Options(chosen, batches=False))


def test_a_card_that_cannot_run_the_step_is_not_recommended() -> None:
    plain, half = sized(), sized(amp="bf16")
    assert (plain.recommended, half.recommended) == ("t4", "l4")
    assert [bool(row.obstacle) for row in plain.cards] == [True, False, False]
    assert [bool(row.obstacle) for row in half.cards] == [True, True, False]
    assert sized(torch_version="2.7").recommended == "gtx-1080-ti"


def test_analyze_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(BLOCKS), "--batch", "4", "--optimizer", "adam", "--amp", "bf16", "--gpu", "t4"]) == 0
    assert "the Tesla T4 cannot run it: it has no arithmetic in bfloat16" in " ".join(capsys.readouterr().out.split())


def test_compiled_code_needs_triton() -> None:
    pascal, volta = gpus.find("gtx-1080-ti"), gpus.find("v100")
    assert "Triton" in obstacle(pascal, "2.6", compiled=True)
    assert "Triton" not in obstacle(volta, "2.6", compiled=True)
    assert "Triton" not in obstacle(pascal, "2.6")
