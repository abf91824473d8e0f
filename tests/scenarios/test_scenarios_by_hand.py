"""Facts of levers and points that are counted by hand: found missing by scripts/mutants.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staticmem.analysis import Request, Study
from staticmem.scenarios.levers import candidates
from staticmem.scenarios.points import plain

SEED = Path(__file__).parents[2] / "models" / "seed.pt2"


def offered(**words: Any) -> list[dict[str, Any]]:
    """The words of every lever that leaves the step a training step."""
    found = candidates(Study.open(SEED, Request(**{"optimizer": "adam", **words})))
    return [dict(lever.words) for lever in found if lever.words.get("mode") != "infer"]


@pytest.mark.parametrize(
    ("batch", "parts"), [(1, []), (2, []), (3, []), (4, [2]), (6, [2]), (8, [2, 4]), (24, [2, 4, 8])]
)
def test_a_batch_is_divided_into_micro_batches_of_two_and_more(batch: int, parts: list[int]) -> None:
    found = [words for words in offered(batch=batch) if "accumulate" in words]
    wanted = [{"batch": batch // n, "accumulate": n} for n in parts]
    assert found == wanted


def test_what_is_on_already_is_not_offered() -> None:
    assert {"channels_last": True} in offered()
    assert {"channels_last": True} not in offered(channels_last=True)
    assert [words for words in offered() if "freeze" in words]
    assert not [words for words in offered(freeze="0.*") if "freeze" in words]


def test_a_resolution_as_text() -> None:
    assert plain("resolution", (224, 224)) == 224
    assert plain("resolution", (224, 256)) == "224x256"
    assert plain("resolution", (256, 224)) == "256x224"
    assert plain("checkpoint", ()) == "none"
    assert plain("checkpoint", ("a", "b")) == "a,b"
