"""Generation: peaks of real `model.generate`, the cache by hand, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.errors import DimensionError, UsageError
from staticmem.scenario.request import Request
from staticmem.studies.study import Study

FOLDER = Path(__file__).parent.parent / "data" / "generation"
PEAKS = json.loads((FOLDER / "peaks.json").read_text())["rows"]
SAMPLED = json.loads((FOLDER / "peaks.json").read_text())["sampled"]


def _study(
    model: str, cache: str = "dynamic", batch: int = 1, prompt: int = 128, new: int = 8, sampling: str = "greedy"
) -> Study:
    request = Request(mode="generate", batch=batch, prompt=prompt, new_tokens=new, cache=cache, sampling=sampling)
    return Study.open(FOLDER / f"{model}.pt2", request)


@pytest.mark.parametrize(("model", "cache", "batch", "prompt", "new", "peak", "phase"), PEAKS)
def test_peak_is_that_of_generate(
    model: str, cache: str, batch: int, prompt: int, new: int, peak: int, phase: str
) -> None:
    report = _study(model, cache, batch, prompt, new).report
    assert (report.peak.live_bytes, report.peak.phase) == (peak, phase)


@pytest.mark.parametrize(("model", "cache", "batch", "prompt", "new", "sampling", "peak"), SAMPLED)
def test_peak_is_that_of_sampling(
    model: str, cache: str, batch: int, prompt: int, new: int, sampling: str, peak: int
) -> None:
    assert _study(model, cache, batch, prompt, new, sampling).report.peak.live_bytes == peak


@pytest.mark.parametrize(
    "text", ["top-k", "top-k=-1", "top-k=1.5", "top-p=0", "top-p=1.1", "beams=2", "sample,top-k=3", ""]
)
def test_sampling_that_is_not_understood(text: str) -> None:
    with pytest.raises(UsageError) as error:
        Request(mode="generate", prompt=8, new_tokens=2, sampling=text).scenario()
    assert error.value.code == "SM123"


def test_sampling_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["analyze", str(FOLDER / "gpt2_eager.pt2"), "--mode", "generate", "--prompt", "16", "--new-tokens", "4"]
    assert main([*asked, "--sampling", "top-k=0,top-p=0.9"]) == 0
    assert "do_sample=True, top_k=0, top_p=0.9" in " ".join(capsys.readouterr().out.split())
    assert main([*asked, "--sampling", "beams"]) == 2
    assert "SM123" in capsys.readouterr().err


def test_sampling_is_told() -> None:
    notes = _study("gpt2", new=2, sampling="top-p=0.5").report.assumptions
    assert "do_sample=True, top_k=50, top_p=0.5" in next(note.text for note in notes if note.code == "SM278")


def test_cache_of_grouped_heads() -> None:
    """4 layers of 8 heads of 64 elements in 2 bytes, keys and values: 8 KiB a token."""
    asked = _study("llama", batch=3, prompt=100, new=29).report.generation
    assert asked is not None
    assert (asked.layers, asked.token_bytes, asked.cached_tokens) == (4, 8192, 128)
    assert (asked.sequence_bytes, asked.cache_bytes) == (128 * 8192, 3 * 128 * 8192)


@pytest.mark.parametrize(("cache", "tokens"), [("dynamic", 1024), ("static", 1024)])
def test_window_bounds_the_cache(cache: str, tokens: int) -> None:
    """4 layers of 4 heads of 64: 4 KiB a token; the window is 1,024 tokens, in the last step with the new one."""
    asked = _study("mistral", cache, prompt=1500, new=40).report.generation
    assert asked is not None
    assert asked.sequence_bytes == tokens * 4096


def test_one_token_needs_no_decode_step() -> None:
    report = _study("llama", new=1).report
    assert report.phases.decode is None
    assert report.peak.phase == "prefill"


def test_steps_between_do_not_matter_to_a_static_cache_of_one_size() -> None:
    shorter, longer = (_study("gpt2", "static", prompt=128 - n, new=n).report.phases.decode for n in (2, 64))
    assert shorter is not None
    assert longer is not None
    assert abs(shorter.peak_bytes - longer.peak_bytes) < 8192  # ids and positions of the prompt


def test_longer_caches_need_more() -> None:
    peaks = [_study("llama", prompt=16, new=n).report.phases.decode for n in (2, 3, 64, 512)]
    found = [p.peak_bytes for p in peaks if p is not None]
    assert found == sorted(found)
    assert len(set(found)) == 4


def test_python_and_text() -> None:
    path = str(FOLDER / "llama.pt2")
    report = staticmem.analyze(path, mode="generate", prompt=64, new_tokens=16, batch=2)
    assert report.scenario.mode == "generate"
    assert {note.code for note in report.assumptions} >= {"SM278", "SM279"}


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "generate"},
        {"mode": "generate", "prompt": 8},
        {"mode": "infer", "prompt": 8},
        {"mode": "infer", "cache": "static"},
        {"mode": "infer", "sampling": "sample"},
        {"mode": "generate", "prompt": 8, "new_tokens": 1 << 40},
        {"mode": "generate", "prompt": 8, "new_tokens": 2, "compile": True},
        {"mode": "generate", "prompt": 8, "new_tokens": 2, "parallel": "tp", "devices": 2},
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        Request(**options).scenario()
    assert error.value.code == "SM124"


def test_an_image_model_does_not_generate() -> None:
    path = Path(__file__).parent.parent.parent / "models" / "resnet18.pt2"
    with pytest.raises(DimensionError) as error:
        _ = Study.open(path, Request(mode="generate", prompt=8, new_tokens=2)).graph
    assert error.value.code == "SM125"


@pytest.mark.parametrize(("model", "rotated"), [("deepseek_v3", 64), ("minicpm3", 32)])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_latents_are_cached(model: str, rotated: int, cache: str) -> None:
    """3 layers, each with latents of 256 elements and a rotated part that all heads share, in 2 bytes."""
    asked = _study(model, cache, batch=2, prompt=100, new=29).report.generation
    assert asked is not None
    assert asked.token_bytes == 3 * (256 + rotated) * 2
    assert asked.cache_bytes == 2 * 128 * asked.token_bytes


def test_the_longest_prompt_fits_and_the_next_does_not() -> None:
    options: dict[str, Any] = {"mode": "generate", "batch": 2, "prompt": 64, "new_tokens": 8}
    path = str(FOLDER / "llama.pt2")
    found = staticmem.max_dim(path, "4GiB", "prompt", **options)
    needs = []
    for prompt in (found.size, found.next_size):
        report = staticmem.analyze(path, **{**options, "prompt": prompt, "gpu": "4GiB"})
        assert report.gpu is not None
        needs.append((report.peak.device_bytes or 0, report.gpu.usable_bytes))
    (here, usable), (behind, _) = needs
    assert (here, behind) == (found.device_bytes, found.next_device_bytes)
    assert here <= usable < behind
    assert 2 < found.safe_size <= found.size < found.next_size == found.size + 1


def test_lengths_of_generation_are_that_of_the_prompt() -> None:
    with pytest.raises(UsageError, match="with --mode generate") as error:
        staticmem.max_dim(str(FOLDER / "llama.pt2"), "1GiB", "seq", mode="generate", prompt=64, new_tokens=8)
    assert "--max-dim prompt" in error.value.hint


@pytest.mark.parametrize("quantize", ["nf4", "nf4-dq", "int8"])
def test_packed_weights_generate(quantize: str) -> None:
    """Linear layers but the head are packed in prefill and decode step; one row a product reads them as they are."""

    def study(**more: Any) -> Study:
        words = {"mode": "generate", "batch": 1, "prompt": 128, "new_tokens": 8, "dtype": "bf16", **more}
        return Study.open(FOLDER / "llama.pt2", Request(**words))

    whole, packed = study(), study(quantize=quantize)
    taken = [dict(one.report.peak.by_category)["parameter"] for one in (whole, packed)]
    count = sum(note.count for note in packed.report.assumptions if note.code == "SM276")
    names = [p.fqn for p in whole.graph.parameters if "_proj" in p.fqn]
    numbers = sum(p.value.numel for p in whole.graph.parameters if p.fqn in names)
    assert count == len(names)
    assert taken[0] - taken[1] == numbers * (1 if quantize == "int8" else 1.5)
    assert any(op.target.startswith("bitsandbytes::linear") for op in packed.graph.ops)
