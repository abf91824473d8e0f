"""Options that cannot act in a step are errors, or the report says that they are not used."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.errors import StaticmemError, UsageError
from staticmem.report.model import Report
from staticmem.scenario.request import OPTIONS, request_of

BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"

STEPS: dict[str, dict[str, Any]] = {
    "inference": {"mode": "infer"},
    "without an optimizer": {"mode": "train"},
    "training": {"optimizer": "adam"},
    "without a backward": {"mode": "train", "backward": False},
}
# A value of each option that is not its default; of those that act on nothing but files, the card and the output: None.
VALUES: dict[str, Any] = {name: not one.default for name, one in OPTIONS.items() if one.kind == "switch"} | {
    "batch": 8, "resolution": 224, "dims": {"seq": 3}, "mode": "train", "prompt": 4, "new_tokens": 4, "cache": "static",
    "engine": "vllm", "utilization": 0.5, "max_len": 64, "max_seqs": 8, "max_batched_tokens": 64, "kv_dtype": "fp8",
    "load_as": "fp8",
    "lengths": "lognormal(6, 1)",
    "sampling": "sample", "preset": "hf-trainer", "optimizer": "sgd", "optimizer_impl": "for-loop",
    "optim_target_modules": "all-linear", "optim_args": "rank=8", "momentum": 0.9, "loss": "mse", "target_length": 5,
    "dtype": "bf16", "amp": "bf16", "sdpa": "math", "compile": True, "compile_mode": "reduce-overhead",
    "lora": "r=4,alpha=8,targets=all-linear", "quantize": "nf4",
    "inplace_activations": "all", "method": None, "checkpoint": ("Block",), "checkpoint_every": 2,
    "checkpoint_save": ("mm",), "checkpoint_segments": "sqrt", "checkpoint_sequential": "layers", "accumulate": 4,
    "freeze": "0", "let_go": "x", "weight_decay": 0.1, "dampening": 0.1,
    "offload_activations": "pinned",
    "zero_grad": "after-forward", "input_grad": "all",
    "activation_memory_budget": 0.5,
    "outputs": "dropped", "parallel": "zero3", "devices": 8, "replicas": 2, "expert_parallel": 2,
    "context_parallel": 2, "rotate_method": "alltoall", "gpu": "l4", "gpus_file": None,
    "alloc_conf": "expandable_segments:True", "torch_version": None, "module_loading": "eager",
    "channels_last": None, "cudnn": None, "profile": None, "top": None,
    "workers": 2, "prefetch": 4, "loading": "torch-load", "saving": "gathered", "confidence": 0.9,
}  # fmt: skip
# what acts, and changes no figure of this model's step: where, and why
ACTS = {
    ("training", "mode"): "an optimizer makes it training already",
    ("without a backward", "mode"): "it is that",
    ("without an optimizer", "mode"): "it is that",
    ("inference", "mode"): "it makes it a training step",
    ("training", "clip_grad_norm"): "its norms are smaller than what lives at the peak",
    ("without an optimizer", "input_grad"): "the gradient of a small input is not at the peak",
    ("training", "input_grad"): "the same",
    ("without a backward", "input_grad"): "nothing is computed with it",
    ("inference", "backward"): "an inference has none",
    ("without a backward", "backward"): "it is that",
}
ECHO = ("scenario", "assumptions", "warnings", "device", "gpu")


@cache
def report_of(step: str) -> Report:
    return staticmem.analyze(BLOCKS, **{"batch": 4, **STEPS[step]})


def figures(report: Report) -> dict[str, Any]:
    """All that a report has but what it was asked."""
    found: dict[str, Any] = json.loads(report.to_json())
    return {name: value for name, value in found.items() if name not in ECHO}


def test_every_option_has_a_value() -> None:
    assert set(VALUES) == set(OPTIONS)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [name for name, value in VALUES.items() if value is not None])
def test_no_option_is_ignored_in_silence(step: str, name: str) -> None:
    plain = report_of(step)
    try:
        asked = staticmem.analyze(BLOCKS, **{"batch": 4, **STEPS[step], name: VALUES[name]})
    except StaticmemError:
        return
    before = {note.text for note in (*plain.assumptions, *plain.warnings)}
    new = [note.text for note in (*asked.assumptions, *asked.warnings) if note.text not in before]
    said = any("not used" in text or OPTIONS[name].flag in text for text in new)
    acts = figures(asked) != figures(plain) or asked.gpu != plain.gpu or (step, name) in ACTS
    assert said or acts


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ({"devices": 8, "optimizer": "adam"}, "--devices is not used: it needs --parallel"),
        ({"accumulate": 4}, "--accumulate is not used: it needs a training step"),
        ({"checkpoint": "Block"}, "--checkpoint is not used"),
        ({"weight_decay": 0.1, "mode": "train"}, "--weight-decay is not used: it needs an optimizer"),
        ({"retain_graph": True, "mode": "train", "backward": False}, "--retain-graph is not used: it needs a backward"),
        ({"loss": "mse", "mode": "infer", "optimizer": "adam"}, "the loss (mse) is not used"),
    ],
)
def test_what_an_idle_option_needs_is_said(words: dict[str, Any], needs: str) -> None:
    report = staticmem.analyze(BLOCKS, batch=4, **words)
    assert any(needs in note.text and note.code == "SM302" for note in report.warnings)


IDLE: list[tuple[list[str], str]] = [
    (["--devices", "8"], "--devices is not used: it needs --parallel"),
    (["--mode", "infer", "--optimizer", "adam"], "the optimizer (adam) is not used"),
    (["--accumulate", "4"], "--accumulate is not used: it needs a training step"),
    (["--cudnn-benchmark"], "--cudnn-benchmark is not used: the model has no convolution"),
    (["--unfold-batchnorm"], "--unfold-batchnorm is not used: no convolution"),
    (["--inplace-activations", "all"], "--inplace-activations is not used: the file says"),
    (["--method", "textbook"], "--method textbook is not used"),
]


@pytest.mark.parametrize(
    "verb", ["analyze", "levers", "sweep --gpu l4 -j 1", "check --gpu l4 -j 1", "size --gpu l4 --no-batches"]
)
def test_every_verb_says_what_has_no_effect(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    word, *more = verb.split()
    for flags, text in IDLE:
        if word == "analyze" and "textbook" in flags:  # it shows the estimate
            continue
        assert main([word, str(BLOCKS), "--no-config", "--batch", "4", *more, *flags, "-f", "json"]) == 0
        printed = capsys.readouterr()
        assert text in printed.out + printed.err, (verb, flags)


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("levers --mode infer --budget 1GiB", 0, "--budget is not used: it looks for checkpoints"),
        (
            "sweep --optimizer adam --gpu l4 --max-batch --meter live",
            2,
            "--max-batch and --meter live cannot be combined",
        ),
        (
            "sweep --optimizer adam --gpu l4 --max-dim x --meter live",
            2,
            "--max-dim and --meter live cannot be combined",
        ),
        (
            "analyze --explain-peak -f snapshot -o FOLDER/step.pickle",
            0,
            "--explain-peak is not used: --format snapshot",
        ),
    ],
)
def test_flags_of_a_verb_that_cannot_act_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, code: int, text: str
) -> None:
    word, *flags = command.replace("FOLDER", str(tmp_path)).split()
    assert main([word, str(BLOCKS), "--no-config", "--batch", "4", *flags]) == code
    printed = capsys.readouterr()
    assert text in printed.out + printed.err


def test_what_a_preset_sets_is_no_idle_option() -> None:
    report = staticmem.analyze(BLOCKS, batch=4, preset="hf-trainer", mode="infer")
    assert [note.text for note in report.warnings if note.code == "SM302"] == [
        "the preset (hf-trainer) is not used: inference was asked for"
    ]


def test_a_scaler_over_gradients_in_float16_is_refused() -> None:
    options = {"optimizer": "adam", "dtype": "fp16", "grad_scaler": True}
    with pytest.raises(UsageError, match="cannot unscale gradients in float16") as caught:
        request_of(options).scenario()
    assert caught.value.code == "SM230"
    request_of({**options, "optimizer_impl": "fused"}).scenario()  # its own kernel divides them
    with pytest.raises(UsageError, match="cannot unscale"):
        request_of({**options, "optimizer_impl": "fused", "clip_grad_norm": True}).scenario()
