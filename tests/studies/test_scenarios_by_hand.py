"""Facts of levers and points that are counted by hand: found missing by scripts/faults/mutants.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staticmem.studies import Request, Study
from staticmem.studies.levers import candidates
from staticmem.studies.points import plain

SEED = Path(__file__).parents[2] / "models" / "seed.pt2"
BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"


def offered(path: Path = SEED, **words: Any) -> list[dict[str, Any]]:
    """The words of every lever that leaves the step a training step."""
    found = candidates(Study.open(path, Request(**{"optimizer": "adam", **words})))
    return [dict(lever.options) for lever in found if lever.options.get("mode") != "infer"]


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


@pytest.mark.parametrize(
    ("given", "both"), [({}, True), ({"amp": "none"}, True), ({"amp": "bf16"}, False), ({"dtype": "bf16"}, False)]
)
def test_a_precision_beside_checkpoints_is_offered_where_there_is_none(given: dict[str, Any], both: bool) -> None:
    found = [set(words) for words in offered(BLOCKS, batch=2, **given)]
    assert {"checkpoint"} in found
    assert ({"amp", "checkpoint"} in found) is both


@pytest.mark.parametrize(
    ("optimizer", "momentum", "left"), [("sgd", 0.9, True), ("sgd", 0.0, False), ("rmsprop", 0.9, False)]
)
def test_sgd_is_offered_without_its_momentum(optimizer: str, momentum: float, left: bool) -> None:
    """Other optimizers with a momentum are offered SGD in their place."""
    found = offered(optimizer=optimizer, momentum=momentum)
    assert any(words.get("momentum") == 0 and "optimizer" not in words for words in found) is left
    assert any(words.get("optimizer") == "sgd" for words in found) is (optimizer != "sgd")
