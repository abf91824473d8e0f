"""How a step fits a card: what is told is what `analyze` says of the flags that are named, and no larger is safe."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import staticmem
from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.parallel.rank import sent_bytes
from staticmem.report.fit import Fit, Settings, Way
from staticmem.report.formats.fit import answer
from staticmem.report.json import to_json
from staticmem.report.schema import dumps, schema
from staticmem.report.sweep import NUMERICS, TRAINING
from staticmem.scenario.request import request_of
from staticmem.scenario.strategies import STRATEGIES
from staticmem.studies.fit_settings import replicas_of

ROOT = Path(__file__).parents[2]
MODELS, BLOCKS = ROOT / "models", ROOT / "tests" / "data" / "graphs" / "mlp_blocks.pt2"
LIBRARIES = ["pytorch", "transformers", "accelerate", "deepspeed"]


def analysed(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    """What the command that a result names prints."""
    words = shlex.split(command)
    assert words[0] == "staticmem"
    assert main([*words[1:], "--no-config", "-f", "json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def figures(one: Way | Settings) -> tuple[int, int, int, int, str]:
    return one.live_bytes, one.device_low_bytes, one.device_bytes, one.device_high_bytes, one.fit


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("resnet18.pt2", "3GiB", {"optimizer": "adam", "global_batch": 256}),
    ("resnet18.onnx", "3GiB", {"optimizer": "sgd", "momentum": 0.9, "batch": 32, "accumulate": 2}),
    ("mobilenet_v2.pt2", "4GiB", {"preset": "hf-trainer"}),
    ("vgg16.pt2", "l4", {"optimizer": "adamw", "batch": 64, "devices": 4, "parallel": "fsdp"}),
    ("vgg16.pt2", "l4", {"optimizer": "adamw", "batch": 8, "devices": 4, "parallel": "fsdp", "replicas": 2}),
    ("seed.pt2", "t4", {"optimizer": "adam", "batch": 4, "amp": "fp16", "grad_scaler": True}),
    ("blocks", "4GiB", {"optimizer": "adamw", "batch": 8, "accumulate": 2, "devices": 4, "parallel": "ddp"}),
    ("blocks", "l4", {"optimizer": "adamw", "global_batch": 16, "devices": 4, "parallel": "zero3", "amp": "bf16"}),
    ("blocks", "l4", {"optimizer": "adamw", "batch": 8, "lora": "r=4,targets=up+down", "checkpoint": "Block"}),
]


@pytest.mark.parametrize(("model", "gpu", "asked"), CASES)
def test_what_is_told_is_what_analyze_says(
    model: str, gpu: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = staticmem.fit(BLOCKS if model == "blocks" else MODELS / model, gpu, **asked)
    assert result.fits
    assert result.way.fit == "fits"
    assert result.settings
    described: list[Way | Settings] = [result.way, *result.settings]
    for one in described:
        report = analysed(capsys, one.analyze)
        band = report["peak"]["bands"]["device"]
        told = report["peak"]["live_bytes"], band["low"], report["peak"]["device_bytes"], band["high"]
        assert figures(one) == (*told, report["gpu"]["fit"])
    words = shlex.split(result.way.check)
    assert main([*words[1:], "--no-config", "-q"]) == 0
    jsonschema.validate(to_json(result), schema("fit"))


def test_the_largest_micro_batch_that_is_safe_is_taken() -> None:
    path = MODELS / "resnet18.pt2"
    asked: dict[str, Any] = {"optimizer": "adam"}
    result = staticmem.fit(path, "3GiB", 256, **asked)
    assert result.samples == result.way.batch * result.way.accumulate == 256
    assert [one.changes for one in result.way.concessions] == [TRAINING]  # batch norms see fewer samples
    assert "micro-batches" in result.way.concessions[0].what
    larger: dict[str, Any] = {"batch": 2 * result.way.batch, "accumulate": result.way.accumulate // 2}
    fits = staticmem.analyze(path, gpu="3GiB", **asked, **larger).gpu
    assert fits is not None
    assert fits.fit != "fits"


def test_nothing_is_given_up_where_the_step_is_safe() -> None:
    result = staticmem.fit(MODELS / "resnet18.pt2", "l4", optimizer="adam", batch=32, allow=["precision", "optimizer"])
    assert (result.way.concessions, result.way.batch, result.way.accumulate) == ((), 32, 1)
    assert "--amp" not in result.way.flags
    assert result.cost.again_operations == result.cost.sent_bytes == 0


def test_without_a_batch_it_is_the_largest_safe_one() -> None:
    path = MODELS / "resnet18.pt2"
    result = staticmem.fit(path, "3GiB", optimizer="adam")
    assert result.way.batch == staticmem.max_batch(path, "3GiB", optimizer="adam").safe_batch
    assert result.way.concessions == ()
    assert not any("the batch is the file's" in text for text in result.assumed)


def test_the_batch_of_a_file_that_fixes_it_is_said(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    path = tmp_path / "fixed.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(8, 4),)), path)
    result = staticmem.fit(path, "24GB", optimizer="adam")
    assert any("the batch is the file's (8), which is fixed" in text for text in result.assumed)


def blocks_on(gpu: str, **asked: Any) -> Fit:
    """A step of blocks whose parts differ in what they need."""
    return staticmem.fit(BLOCKS, gpu, optimizer="adamw", **asked)


def test_checkpoints_come_before_changes_of_training() -> None:
    """A card that ends between a step of one sample with and without checkpoints."""
    path = MODELS / "resnet50_hw.pt2"
    asked: dict[str, Any] = {"optimizer": "adamw", "batch": 1, "resolution": (768, 768)}
    high = [
        staticmem.analyze(path, gpu="80GB", checkpoint=checkpoint, **asked).peak.bands["device"].high
        for checkpoint in ((), ("Bottleneck",))
    ]
    assert high[1] < high[0]
    gpu = f"{int(sum(high) / 2 / 0.95) >> 20}MiB"
    result = staticmem.fit(path, gpu, allow=("precision", "optimizer", "adapters"), **asked)
    assert result.fits
    assert [one.what for one in result.way.concessions] == ["checkpoint every Bottleneck"]
    assert 0 < result.cost.again_operations < result.cost.operations
    for one in result.settings:
        assert ("CHECKPOINTED" in one.text) == (one.library == "pytorch")
        assert ("--checkpoint" in " ".join(one.notes)) == (one.library == "accelerate")


def test_changes_of_training_are_made_where_they_are_allowed() -> None:
    path = MODELS / "resnet18.pt2"
    asked: dict[str, Any] = {"optimizer": "adamw"}
    least = staticmem.analyze(path, batch=1, checkpoint="BasicBlock", gpu="80GB", **asked).peak.bands["device"].high
    gpu = f"{(int(least / 0.95) >> 20) - 20}MiB"
    refused = staticmem.fit(path, gpu, 8, **asked)
    assert not refused.fits
    assert refused.settings == ()
    assert refused.way.missing_bytes > 0
    assert refused.would_fit
    allowed = staticmem.fit(path, gpu, 8, refused.would_fit, **asked)
    assert allowed.fits
    assert {one.changes for one in allowed.way.concessions} & {NUMERICS, TRAINING}
    assert allowed.allowed == refused.would_fit


def test_sharding_and_strategies() -> None:
    asked: dict[str, Any] = {"global_batch": 32, "devices": 4}
    result = blocks_on("l4", **asked)
    assert (result.way.parallel, result.way.devices, result.way.batch) == ("ddp", 4, 8)
    assert [one.library for one in result.settings] == LIBRARIES[:3]
    zero = blocks_on("l4", library="deepspeed", **asked)
    assert zero.way.parallel == "zero2"
    assert [one.library for one in zero.settings] == ["deepspeed"]
    assert [one.library for one in blocks_on("l4", parallel="zero2", **asked).settings] == LIBRARIES[1:]
    sharded = blocks_on("l4", parallel="fsdp", **asked)
    parameters = staticmem.analyze(BLOCKS, optimizer="adamw").parameters.bytes
    assert sharded.cost.sent_bytes == round(0.75 * 3 * parameters)


def test_groups_that_have_the_whole_model_each() -> None:
    """Those of fewest shards first, and all shards last; a library whose file cannot say so is not asked for it."""
    several = request_of({"devices": 24})
    assert replicas_of(several, "fsdp", None) == (12, 6, 3, None)
    assert replicas_of(several, "ddp", None) == replicas_of(several, "fsdp", "transformers") == (None,)
    assert replicas_of(request_of({"devices": 8, "parallel": "fsdp", "replicas": 2}), "fsdp", None) == (2,)
    asked: dict[str, Any] = {"global_batch": 32, "devices": 4, "parallel": "fsdp", "replicas": 2}
    result = blocks_on("l4", **asked)
    assert "--replicas 2" in result.way.flags
    text = result.settings[0].text
    assert 'mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))' in text
    assert text.count(", mesh=mesh)") == 2  # of blocks, and of the model
    compile(text, "train_step.py", "exec")
    assert any("--replicas 2" in note for note in result.settings[1].notes)
    parameters = staticmem.analyze(BLOCKS, optimizer="adamw").parameters.bytes
    assert result.cost.sent_bytes == round(0.5 * 3 * parameters + 2 * 0.5 * parameters / 2)
    with pytest.raises(UsageError, match="hybrid sharding in transformers"):
        blocks_on("l4", library="transformers", **asked)


def test_the_most_groups_that_are_safe_are_taken(tmp_path: Path) -> None:
    """Four GiB of parameters: two devices share them on 16 GiB, four on 12 GiB. A rank of two sends half of them three
    times, and 3/4 of its half twice among four; one of four 3/4 three times, and half of its quarter twice."""

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8192, 8192, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layer(x)

    with torch.device("meta"):
        model, x = torch.nn.Sequential(*[Block() for _ in range(16)]).train(), torch.zeros(2, 8192)
    path = tmp_path / "wide.pt2"
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=shapes, strict=False), path)
    for gpu, replicas, sent in (("16GiB", 4, 9 << 30), ("12GiB", 2, 10 << 30)):
        result = staticmem.fit(path, gpu, 64, optimizer="adam", devices=8)
        assert f"--replicas {replicas}" in result.way.flags
        assert result.way.concessions[0].what.endswith(f"in {replicas} groups that have the whole model each")
        assert result.cost.sent_bytes == sent


def test_bytes_that_a_rank_sends_by_hand() -> None:
    """Rings over 4 ranks send 3/4 of the bytes; 100 gathered, 40 summed, 30 updated, two micro-batches."""
    sent = {name: sent_bytes(name, 4, 100, 40, 30, 2) for name in STRATEGIES if name not in ("tp", "pp")}
    assert sent == {"ddp": 60, "zero1": 52, "zero2": 82, "zero3": 360, "fsdp": 360}
    assert sent_bytes(None, 1, 100, 40, 30, 2) == sent_bytes("fsdp", 1, 100, 40, 30, 2) == 0
    with pytest.raises(ValueError, match="pp"):
        sent_bytes("pp", 4, 1, 1, 1, 1)


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", str(MODELS / "resnet18.pt2"), "--no-config", "--optimizer", "adam", "--global-batch", "8"]
    assert main([*words, "--gpu", "600MiB"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Does not fit a GPU of 600MiB: batch 8 ")
    assert "MiB short" in " ".join(out.split())
    assert main([*words, "--gpu", "600MiB", "-f", "pytorch"]) == 1
    assert "def train_step" not in capsys.readouterr().out
    assert main([*words, "--gpu", "600MiB", "-f", "json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["fits"], result["settings"]) == (False, [])


def test_a_card_without_bfloat16_gets_float16() -> None:
    """A Tesla T4 (Turing) computes in float16, and scales the loss."""
    path, allow = MODELS / "vgg16.pt2", ("precision",)
    alone = staticmem.fit(path, "t4", optimizer="adamw", batch=1, devices=None)
    assert alone.fits
    from staticmem.studies import Request, Study
    from staticmem.studies.fit import _Search
    from staticmem.studies.fit_settings import Options

    search = _Search(Study.open(path, Request(optimizer="adamw", batch=1)), Options("t4", None, allow))
    changed = [change.options for change in search._changes(allow)]
    assert changed == [{}, {"amp": "fp16", "grad_scaler": True}]


BAD: list[tuple[str, str]] = [
    ("--gpu l4", "SM294"), ("--optimizer adam", "SM297"), ("--optimizer muon --gpu l4", "SM295"),
    ("--optimizer adam --gpu l4 --global-batch 10 --devices 4", "SM296"),
    ("--optimizer adam --gpu l4 --global-batch 10 --batch 2", "SM135"),
    ("--optimizer adam --gpu l4 --global-batch 10 --accumulate 2", "SM135"),
    ("--optimizer adam --gpu l4 --batch 2 -f deepspeed", "SM295"),
    ("--optimizer adam --gpu l4 --batch 2 --parallel pp --devices 4", "SM295"),
    ("--optimizer adam --gpu l4 --batch 2 --parallel fsdp", "SM180"),
    ("--optimizer adam --gpu l4 --batch 2 --parallel fsdp --devices 4 -f deepspeed", "SM295"),
    ("--optimizer adam --gpu l4 --batch 2 --allow precisions", "SM134"),
    ("--optimizer adam --gpu l4 --batch 2 --checkpoint Nothing", "SM163"),
    ("--optimizer adam --gpu l4 --global-batch 0", "SM110"),
    ("--optimizer adam --gpu nothing", "SM402"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "code"), BAD)
def test_what_is_refused(flags: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(MODELS / "resnet18.pt2"), "--no-config", *flags.split()]) == 2
    assert f"[{code}]" in capsys.readouterr().err.splitlines()[0]


def test_a_library_is_checked_in_python() -> None:
    with pytest.raises(UsageError, match="unknown library"):
        staticmem.fit(BLOCKS, "l4", optimizer="adam", library="keras")


def test_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    words = ["fit", str(BLOCKS), "--no-config", "--optimizer", "adam", "--batch", "2", "--gpu", "l4"]
    words += ["--write", str(folder)]
    assert main(words) == 0
    names = ["accelerate.yaml", "train_step.py", "training_arguments.py"]
    assert sorted(path.name for path in folder.iterdir()) == names
    (folder / names[0]).write_text("mine", encoding="utf-8")
    assert main(words) == 2
    assert "[SM142]" in capsys.readouterr().err
    assert (folder / names[0]).read_text(encoding="utf-8") == "mine"
    assert main([*words, "--force"]) == 0
    assert (folder / names[0]).read_text(encoding="utf-8") != "mine"
    assert main([*words[:-1], str(folder / names[0])]) == 2


def test_commands_hold_beside_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its preset drops the outputs; accelerate's loop holds them, which is no flag."""
    monkeypatch.chdir(tmp_path)
    Path("staticmem.yaml").write_text(f"version: 1\nmodel: {BLOCKS}\ntrain: {{preset: hf-trainer, batch: 64}}\n")
    assert main(["fit", "--gpu", "l4", "-f", "json", "-q"]) == 0
    result = json.loads(capsys.readouterr().out)
    live = {one["library"]: one["live_bytes"] for one in result["settings"]}
    assert live["accelerate"] > live["transformers"]
    for one in result["settings"]:
        assert main([*shlex.split(one["analyze"])[1:], "-f", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["peak"]["live_bytes"] == one["live_bytes"]


def test_the_answer_is_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", str(BLOCKS), "--no-config", "--optimizer", "adam", "--global-batch", "8", "--gpu", "l4"]
    assert main([*words, "-q"]) == 0
    quiet = capsys.readouterr().out
    assert quiet.count("\n") == 1
    assert main([*words, "-f", "md"]) == 0
    assert capsys.readouterr().out.startswith(f"**{quiet.strip()}**")
    result = staticmem.fit(BLOCKS, "l4", 8, optimizer="adam")
    assert answer(result) == quiet.strip()
    assert "Settings" in str(result)


def test_schema_is_fresh() -> None:
    """Write it again with: staticmem schema fit > schemas/fit-1.schema.json"""
    kept = (ROOT / "schemas" / "fit-1.schema.json").read_text(encoding="utf-8")
    assert kept == dumps(schema("fit"))


def test_a_card_that_cannot_run_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """It is an answer, as of a step that does not fit."""
    words = [
        "fit",
        str(ROOT / "models" / "resnet18.pt2"),
        "--optimizer",
        "adam",
        "--gpu",
        "gtx-1080-ti",
        "--batch",
        "2",
        "--compile",
    ]
    assert main([*words, "-q"]) == 1
    assert "Cannot run on a GeForce GTX 1080 Ti: torch.compile writes kernels in Triton" in capsys.readouterr().out


def test_a_global_batch_goes_before_the_batch_of_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init` writes `batch: 32`, and nobody typed it; a flag that contradicts the other stays an error."""
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    asked = ["fit", str(BLOCKS), "--gpu", "l4", "--global-batch", "16"]
    assert main([*asked, "-q"]) == 0
    said = capsys.readouterr()
    assert "batch 16" in said.out
    assert "Not used of the config, as --global-batch is shared out" in said.err
    assert main([*asked, "--batch", "4"]) == 2
    assert main(["size", str(BLOCKS), "--gpu", "l4", "--global-batch", "16", "--no-batches", "-q"]) == 0
