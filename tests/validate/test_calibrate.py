"""A profile from readings: what it has of them, that `analyze` uses it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_records import MIB, cuda_record

import staticmem
from staticmem.cli.main import main
from staticmem.devices import gpus, profile
from staticmem.errors import UsageError
from staticmem.validate import calibrate
from staticmem.validate.pytorch.prediction import card_of, gpu_word
from staticmem.validate.records import Record

MODEL = Path(__file__).parents[2] / "models" / "resnet18.pt2"


def _named(*records: Record) -> list[tuple[str, Record]]:
    return [(f"{k}.json", record) for k, record in enumerate(records)]


def _profile(tmp_path: Path, *records: Record) -> profile.Profile:
    return calibrate.check(calibrate.dumps(calibrate.calibrated(_named(*records))), tmp_path / "profile.yaml")


def test_context_and_libraries_are_those_of_the_readings(tmp_path: Path) -> None:
    found = _profile(tmp_path, cuda_record(380, 40), cuda_record(382, 70), cuda_record(384, 100))
    card = gpus.find("rtx-4090")
    assert found.context(card).expected == 382 * MIB
    libraries = found.libraries
    assert (libraries.low, libraries.expected, libraries.high) == (40 * MIB, 70 * MIB, 100 * MIB)
    other = gpus.find("h100-sxm-80gb")
    assert found.context(other) == profile.load().context(other)


def test_workspaces_of_the_version_and_the_architecture(tmp_path: Path) -> None:
    big = 64 * MIB
    records = [cuda_record(cublas=big, lt=0, kept=big)] * 3
    found = _profile(tmp_path, *records)
    architecture = gpus.find("rtx-4090").architecture
    assert found.cublas("2.13").workspace(architecture) == big
    assert found.cublas("2.13").kept
    assert found.cublas("2.13").workspace("sm_90") == profile.load().cublas("2.13").workspace("sm_90")
    assert found.cublas("2.9") == profile.load().cublas("2.9")
    taken = _profile(tmp_path / "..", *[cuda_record(cublas=big, lt=MIB, kept=0)] * 3)
    assert not taken.cublas("2.13").kept
    assert taken.cublas("2.13").lt_nbytes == MIB


def test_analyze_uses_the_profile(tmp_path: Path) -> None:
    text = calibrate.dumps(calibrate.calibrated(_named(*[cuda_record(777, 111)] * 3)))
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    peak = staticmem.analyze(MODEL, batch=2, gpu="rtx-4090", profile=str(path)).peak
    assert peak.context_bytes == (777 + 111) * MIB


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    for k in range(3):
        (folder / f"{k}.json").write_text(cuda_record(380 + k).dumps(), encoding="utf-8")
    target = tmp_path / "profile.yaml"
    assert main(["calibrate", str(folder), "-o", str(target)]) == 0
    assert profile.load(target).context(gpus.find("rtx-4090")).expected == 381 * MIB
    assert main(["calibrate", str(folder), "-o", str(target)]) == 2
    assert "[SM142]" in capsys.readouterr().err
    assert main(["calibrate", str(folder / "0.json")]) == 2
    assert "[SM232]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "code"),
    [
        ([cuda_record()] * 2, "SM232"),
        ([cuda_record(300), cuda_record(380), cuda_record(380)], "SM237"),
        ([cuda_record(cublas=1), cuda_record(cublas=2), cuda_record(cublas=3)], "SM237"),
        ([cuda_record(card="NVIDIA Imaginary 1")] * 3, "SM235"),
        ([cuda_record(card="")] * 3, "SM235"),
    ],
)
def test_refusals(records: list[Record], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        calibrate.calibrated(_named(*records))
    assert caught.value.code == code


def test_a_card_that_is_named_by_hand() -> None:
    found = calibrate.calibrated(_named(*[cuda_record(card="QEMU thing")] * 3), gpu="rtx-4090")
    assert found["context"]["readings"]["rtx-4090"]["mib"] == 380


@pytest.mark.parametrize(
    ("name", "gib", "slug"),
    [
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.6, "rtx-3090-ti"),
        ("NVIDIA GeForce RTX 3090", 23.6, "rtx-3090"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie-80gb"),
        ("Tesla T4", 14.6, "t4"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16gb"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA RTX A6000", 47.5, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx-6000-ada"),
        ("NVIDIA A10G", 22.0, "a10g"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA B200", 178.0, "b200"),
        ("Some other card", 8.0, None),
        ("NVIDIA GeForce RTX 4090", 8.0, None),
    ],
)
def test_cards_by_the_names_that_drivers_give(name: str, gib: float, slug: str | None) -> None:
    total = round(gib * 2**30)
    assert card_of(name, total) == slug
    assert gpus.find(gpu_word(name, total)).usable == pytest.approx(total, rel=0.1)
