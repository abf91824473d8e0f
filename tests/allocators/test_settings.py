"""The parser of PYTORCH_CUDA_ALLOC_CONF; where torch is installed, against PyTorch's own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from staticmem.allocators.settings import WITHOUT_EFFECT, Settings, parse_settings, roundup_power2_next_division
from staticmem.errors import UsageError

MIB = 2**20

GOOD = [
    "",
    "backend:native",
    "expandable_segments:True",
    "max_split_size_mb:40,garbage_collection_threshold:0.5",
    " max_split_size_mb : 40 , expandable_segments : False ,",
    "large_segment_size_mb:40",
    "max_non_split_rounding_mb:64,large_segment_size_mb:64",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[64:8,128:2,256:4,>:1]",
    "roundup_power2_divisions:[64:0,>:4]",
    "per_process_memory_fraction:1.0",
    "pinned_use_background_threads:True,expandable_segments:True",
]
BAD = [
    "max_split_size_mb",
    "max_split_size_mb:10",
    "max_split_size_mb:abc",
    "max_split_size_mb:40,large_segment_size_mb:64",
    "expandable_segments:true",
    "garbage_collection_threshold:1.5",
    "garbage_collection_threshold:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[3:4]",
    "roundup_power2_divisions:[64:8",
    "large_segment_size_mb:10",
    "max_non_split_rounding_mb:1",
]


def test_defaults_are_those_of_pytorch() -> None:
    assert parse_settings(None) == parse_settings("") == Settings()
    assert Settings().max_non_split_rounding_size == Settings().large_segment_size == 20 * MIB


def test_values() -> None:
    found = parse_settings("expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8")
    assert found == Settings(128 * MIB, garbage_collection_threshold=0.8, expandable_segments=True)


def test_options_without_effect_are_taken() -> None:
    assert parse_settings(",".join(f"{name}:True" for name in WITHOUT_EFFECT)) == Settings()


@pytest.mark.parametrize("text", GOOD)
def test_good(text: str) -> None:
    parse_settings(text)


@pytest.mark.parametrize("text", [*BAD, "no_such_option:1", "backend:cudaMallocAsync", "per_process_memory_fraction:2"])
def test_bad(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(text)
    assert len(str(caught.value).splitlines()) == 3
    assert caught.value.code == "SM144"


def test_a_misspelt_option_is_named() -> None:
    with pytest.raises(UsageError, match="expandable_segments"):
        parse_settings("expandable_segment:True")


def test_intervals_of_roundups() -> None:
    """The example of c10/test/core/AllocatorConfig_test.cpp."""
    found = parse_settings("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]").roundup_power2_divisions
    assert found == (8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1)


def test_rounding_to_divisions() -> None:
    assert roundup_power2_next_division(1200, 4) == 1280  # the example in the source's comment
    settings = parse_settings("roundup_power2_divisions:4")
    assert settings.round_size(1200) == 1536  # not more than 512 * divisions: to 512 as ever
    assert settings.round_size(5 * MIB + 1) == 6 * MIB
    assert settings.round_size(8 * MIB) == 8 * MIB


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_pytorch_takes_and_refuses_the_same() -> None:
    """Each string in a process of its own: PyTorch's settings stay from one call to the next."""
    lines = [
        "import os, sys, torch",
        "set_ = getattr(torch._C, '_accelerator_setAllocatorSettings', None)",
        "assert set_ is not None or sys.exit(9)",
        "for text in sys.stdin.read().split('\\n'):",
        "    pid = os.fork()",
        "    if pid == 0:",
        "        try: set_(text)",
        "        except (ValueError, RuntimeError): os._exit(1)",
        "        os._exit(0)",
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    ]
    texts = [text for text in (*GOOD, *BAD) if text]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], input="\n".join(texts), capture_output=True, text=True, check=False
    )
    if done.returncode == 9:
        pytest.skip("this version of torch has no such function")
    theirs = dict(zip(texts, done.stdout.split(), strict=True))
    assert theirs == {text: "1" if text in BAD else "0" for text in texts}
