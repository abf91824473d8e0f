"""What a call in Python gives is checked as a config is: a wrong type is an error with what, why and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import staticmem

# callers whose types nobody checked
LEVERS: Any = staticmem.levers
FIT: Any = staticmem.fit
MAX_BATCH: Any = staticmem.max_batch
MAX_DIM: Any = staticmem.max_dim
SWEEP: Any = staticmem.sweep
SEED = str(Path(__file__).parents[2] / "models" / "seed.pt2")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 8.0}, "batch is 8.0"),
        ({"batch": "8"}, "batch is '8'"),
        ({"batch": True}, "batch is true"),
        ({"batch": [1, 2]}, "batch is a list"),
        ({"batch": object()}, "batch is of type object"),
        ({"batch": 0}, "at least 1"),
        ({"resolution": "wide"}, "height and width"),
        ({"resolution": 224.5}, "height and width"),
        ({"dims": "seq=3"}, "mapping of names"),
        ({"dims": {"seq": "3"}}, "whole number"),
        ({"dtype": 5}, "dtype is 5"),
        ({"optimizer": 3}, "optimizer is 3"),
        ({"optimizer": "sgd", "momentum": "0.9"}, "momentum is '0.9'"),
        ({"tf32": "no"}, "tf32 is 'no'"),
        ({"top": "x"}, "top is 'x'"),
        ({"loss": 3}, "loss is 3"),
        ({"optimiser": "adam"}, "Did you mean 'optimizer'?"),
        ({"bacth": 8}, "Did you mean 'batch'?"),
        ({"frobnicate": 8}, "docs/api.md"),
    ],
)
def test_a_wrong_option_of_analyze_is_an_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(staticmem.StaticmemError) as caught:
        staticmem.analyze(SEED, **options)
    assert said in str(caught.value)
    assert caught.value.code in ("SM194", "SM195")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: LEVERS(SEED, 1.5), "budget is 1.5"),
        (lambda: LEVERS(SEED, -5), "budget is -5"),
        (lambda: FIT(SEED, "l4", global_batch="3", optimizer="adam"), "global_batch is '3'"),
        (lambda: FIT(SEED, "l4", allow=3, optimizer="adam"), "unknown allow '3'"),
        (lambda: MAX_BATCH(SEED, 3), "unknown GPU '3'"),
        (lambda: MAX_DIM(SEED, "l4", 3), "is not a name"),
        (lambda: SWEEP(SEED, "batch"), "what_if is of type str"),
        (lambda: SWEEP(SEED, {"batch": 3}), "'batch' is not a list"),
        (lambda: SWEEP(SEED, {"batch": ["3"]}), "batch is '3'"),
        (lambda: SWEEP(SEED, batches=3), "Did you mean 'batch'?"),
        (lambda: SWEEP(SEED, {"batch": [1]}, gpus=[object()]), "gpus is of type object"),
    ],
)
def test_a_wrong_argument_of_the_other_functions_is_an_error(call: Callable[[], object], said: str) -> None:
    with pytest.raises(staticmem.StaticmemError) as caught:
        call()
    assert said in str(caught.value)


def test_numbers_of_numpy_and_paths_stand_for_plain_values() -> None:
    plain = staticmem.analyze(SEED, batch=4)
    given: dict[str, Any] = {"batch": np.int64(4), "torch_version": 2.13}
    assert staticmem.analyze(Path(SEED), **given).peak == plain.peak


@pytest.mark.torch
def test_types_and_optimizers_of_pytorch_stand_for_their_names() -> None:
    torch = pytest.importorskip("torch")
    by_name = staticmem.analyze(SEED, batch=4, optimizer="adamw", dtype="bf16")
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW, "dtype": torch.bfloat16}
    by_class = staticmem.analyze(SEED, batch=4, **given)
    assert by_class.peak == by_name.peak


@pytest.mark.torch
def test_inputs_that_do_not_fit_the_forward_are_counted() -> None:
    torch = pytest.importorskip("torch")
    two = (torch.empty(1, 2, device="meta"), torch.empty(1, 2, device="meta"))
    with pytest.raises(staticmem.StaticmemError, match="cannot be called with 2 inputs") as caught:
        staticmem.analyze(torch.nn.Linear(2, 2, device="meta"), two)
    assert caught.value.why == "Its forward takes (input)."
    with pytest.raises(staticmem.StaticmemError, match="cannot be called with 0 inputs"):
        staticmem.analyze(torch.nn.Linear(2, 2, device="meta"), ())


def test_a_result_has_a_short_repr() -> None:
    report = staticmem.analyze(SEED, batch=4, optimizer="adam")
    swept = staticmem.sweep(SEED, {"batch": [1, 2]})
    levers = staticmem.levers(SEED, batch=4, optimizer="adam")
    for result in (report, swept, levers):
        text = repr(result)
        assert text.startswith(f"<{type(result).__name__}: ")
        assert len(text) < 200
        assert "\n" not in text
