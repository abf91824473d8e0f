"""An unknown flag or key is answered with what it means here, not with what is spelled a little alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from staticmem.cli.main import main
from staticmem.errors import described

SEED = str(Path(__file__).parents[2] / "models" / "seed.pt2")


@pytest.mark.parametrize(
    ("verb", "flag", "hint"),
    [
        ("analyze", "--seq", "'--dim NAME=N'"),
        ("analyze", "--batch-size", "'--batch N'"),
        ("analyze", "--img_size", "'--resolution N|HxW'"),
        ("analyze", "--fp16", "'--amp TYPE'"),
        ("analyze", "--optimiser", "'--optimizer NAME'"),
        ("analyze", "--lr", "does not depend on it"),
        ("size", "--budget", "'--max-memory SIZE'"),
        ("size", "--max-price", "'--prices FILE|gpuhunt'"),
        ("analyze", "--tensor-model-parallel-size", "--parallel tp --devices N"),
        ("analyze", "--data_parallel_shard_degree", "--parallel fsdp --devices N"),
        ("analyze", "--expert-parallel-degree", "'--expert-parallel N'"),
        ("analyze", "--max-model-len", "'--max-len N'"),
        ("analyze", "--gpu-memory-utilization", "'--utilization SHARE'"),
        ("analyze", "--frobnicate", "staticmem analyze --help"),
    ],
)
def test_an_unknown_flag_has_a_hint_of_its_meaning(
    verb: str, flag: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, SEED, flag, "3"]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {batch: [4, 8], optimizer: adam}", "Values to try are in what_if"),
        ("train:\n\tbatch: 4", "replace the tab"),
        ("device: !!python/object/apply:os.system [ls]", "nothing in it makes an object"),
        ("batch: 4", "write it under train"),
        ("gpu: l4", "Write `gpus: [NAME]`."),
        ("train: {batch_size: 4}", "Did you mean 'batch'?"),
        ("train: {pipeline_parallel_degree: 4}", "`parallel: pp` and `devices: N`"),
        ("train: {lr: 0.1}", "does not depend on it"),
        ("train: {gradient_checkpointing: true}", "Did you mean 'checkpoint'?"),
    ],
)
def test_natural_mistakes_in_a_config(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"version: 1\nmodel: {SEED}\n{text}\n", encoding="utf-8")
    assert main(["analyze", "--config", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_the_cause_behind_a_wrapped_exception_is_shown() -> None:
    """transformers wraps what an import raises in "Could not import module", which hides the reason."""
    try:
        try:
            raise RuntimeError("operator torchvision::nms does not exist\nmore lines")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'.") from error
    except ModuleNotFoundError as error:
        text = described(error)
    assert text == (
        "ModuleNotFoundError: Could not import module 'LlamaConfig'; the cause: "
        "RuntimeError: operator torchvision::nms does not exist"
    )
    assert described(ValueError("plain")) == "ValueError: plain"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("sweep {} --batch 8,16", "staticmem sweep --what-if batch=8,16"),
        ("sweep {} --batch 8 16", "--what-if batch=8,16"),
        ("size {} --gpu l4,t4", "--gpu l4 --gpu t4"),
    ],
)
def test_several_values_are_written_otherwise(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.format(Path(__file__).parents[2] / "models" / "seed.pt2").split(), "--no-config"]) == 2
    assert hint in capsys.readouterr().err
