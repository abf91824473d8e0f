"""What does not go together: every row of the table can be asked for, and is refused where it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from staticmem.cli.explain import entries
from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.scenario.combinations import FIT, LARGEST, RANKS, SIZE, Combination, Side, Table
from staticmem.scenario.request import COMBINATIONS, OPTIONS, Request, request_of

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = str(ROOT / "tests" / "data" / "graphs" / "mlp_blocks.pt2")
DECODER = str(ROOT / "tests" / "data" / "generation" / "llama.pt2")

# words that verbs have besides, and a verb that has them
WORDS = {"global_batch": "fit", "max_dim": "size", "no_batches": "size", "max_batch": "analyze", "meter": "sweep"}
STEPS: tuple[dict[str, Any], ...] = (
    {"mode": "infer"},
    {"mode": "train"},
    {"optimizer": "adam"},
    {"optimizer": "sgd"},
    {"mode": "generate"},
    {"mode": "generate", "prompt": 4, "new_tokens": 4},
    {"mode": "serve"},
    {"optimizer": "adam", "compile": "Block"},
    {"optimizer": "adam", "parallel": "fsdp"},
)
TRIED: dict[str, tuple[Any, ...]] = {  # values of options that have no choices
    "devices": (8, 1), "expert_parallel": (2, 3), "context_parallel": (2, 3), "replicas": (2, 3),
    "prompt": (4,), "new_tokens": (4,),
    "sampling": ("sample",), "loss": ("ctc", "a=mse"), "momentum": (0.9,), "target_length": (5,),
    "compile": (True, "Block"),
    "lora": ("r=4,dora=true,targets=all-linear", "r=4,targets=all-linear"), "checkpoint": ("Block",),
    "checkpoint_every": (2,), "checkpoint_save": ("mm",), "checkpoint_segments": ("sqrt",), "accumulate": (4,),
    "checkpoint_sequential": ("layers",), "dampening": (0.1,), "activation_memory_budget": (0.5,),
    "optim_target_modules": ("all-linear",), "optim_args": ("rank=8",), "let_go": ("x", "batch@loop"),
}  # fmt: skip


def sides(row: Combination) -> list[Side]:
    """All sides of a row."""
    listed = [one if isinstance(one, tuple) else (one,) for one in (row.one, row.other)]
    return [*itertools.chain(*listed), *row.also]


def requests(row: Combination) -> Iterator[dict[str, Any]]:
    """Requests with values of the options that a row names."""
    names = sorted({side.option for side in sides(row)} - {"mode"})
    values = []
    for name in names:
        one = OPTIONS[name]
        words = TRIED.get(name, (not one.default,) if one.kind == "switch" else one.choices)
        values.append([None, *words])
    for step in STEPS:
        for chosen in itertools.product(*values):
            yield {**step, **{name: value for name, value in zip(names, chosen, strict=True) if value is not None}}


def refusal(asked: dict[str, Any]) -> UsageError | None:
    """The error of a request."""
    try:
        request_of(asked).scenario()
    except UsageError as error:
        return error
    return None


def first_found(given: dict[str, Any]) -> Combination | None:
    """The row that refuses these options."""
    return next((row for row in COMBINATIONS if row.match(given) is not None), None)


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: "-".join(side.option for side in sides(row)))
def test_every_row_refuses_a_request(row: Combination) -> None:
    asked = next(asked for asked in requests(row) if first_found(Request(**asked).given()) is row)
    error = refusal(asked)
    assert error is not None
    assert error.code == row.code
    assert "{" not in str(error)


@pytest.mark.parametrize(
    ("table", "command", "why"),
    [
        (RANKS, f"analyze {BLOCKS} --optimizer adam --parallel zero3", "What a device holds depends on"),
        (FIT, f"fit {BLOCKS} --gpu l4 --optimizer adam --parallel zero3", "What a device holds depends on"),
        (FIT, f"fit {BLOCKS} --gpu l4 --optimizer adam --global-batch 64 --batch 4", "the micro-batch and their"),
        (SIZE, f"size {BLOCKS} --optimizer adam --max-dim x --no-batches", "The search makes the dimension larger"),
        (SIZE, f"size {BLOCKS} --optimizer adam --global-batch 64 --devices 8", "is shared out in every way"),
        (SIZE, f"size {BLOCKS} --global-batch 64", "It is the samples of a step of the optimizer."),
        (SIZE, f"size {BLOCKS} --context-parallel 2 --parallel fsdp", "where ranks share no sequence"),
        (SIZE, f"size {BLOCKS} --replicas 2 --parallel fsdp", "has one group of them"),
        (SIZE, f"size {BLOCKS} --offload-parameters --parallel fsdp", "has all on the GPU"),
        (LARGEST, f"analyze {BLOCKS} --max-batch --max-dim x", "One search makes one size larger"),
        (LARGEST, f"sweep {BLOCKS} --gpu l4 --max-batch --meter live", "is found by replays of the allocator"),
        (
            LARGEST,
            f"analyze {DECODER} --mode generate --prompt 4 --new-tokens 4 --gpu l4 --max-dim x",
            "In generation the lengths are those of the prompt",
        ),
    ],
)
def test_rows_of_verbs_refuse_a_command(
    table: Table, command: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    (row,) = [row for row, (reason, _) in table.items() if why in reason]
    assert why in said
    assert row.code in said


def test_sides_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    named = {side.option for table in (COMBINATIONS, RANKS, FIT, SIZE, LARGEST) for row in table for side in sides(row)}
    assert named - set(OPTIONS) == set(WORDS)
    for word, verb in WORDS.items():
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert f"--{word.replace('_', '-')}" in capsys.readouterr().out


def test_codes_are_explained() -> None:
    assert {row.code for table in (COMBINATIONS, RANKS, FIT, SIZE, LARGEST) for row in table} <= set(entries())


def test_what_does_not_act_is_said_and_not_refused() -> None:
    """A lever of a training step is none of an inference, whatever it does not go with."""
    _, notes = request_of({"context_parallel": 2, "offload_activations": "pinned"}).scenario()
    assert any("--offload-activations is not used" in note.text for note in notes)
