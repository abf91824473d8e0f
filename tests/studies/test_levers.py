"""Levers: every row is an analysis of its own flags; compute is counted by hand."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.report.formats.levers import verdict
from staticmem.report.json import to_json
from staticmem.report.schema import schema
from staticmem.report.sweep import Levers, cheapest
from staticmem.scenario.request import as_flags
from staticmem.scenario.step import Scenario
from staticmem.studies import Request, Study
from staticmem.studies.checkpoints import last_layer, repeated_blocks
from staticmem.studies.levers import levers
from staticmem.studies.trials import Counter
from staticmem.units import format_bytes

MODELS = Path(__file__).parents[2] / "models"
RESNET = MODELS / "resnet18.pt2"


@pytest.fixture(scope="module")
def found() -> Levers:
    return levers(Study.open(RESNET, Request(batch=16, optimizer="adam")))


def test_commands_of_rows_give_their_numbers(found: Levers, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand: flags of the request that a lever changes are given once."""
    assert len(found.rows) > 10
    for row in found.rows:
        assert predicted(capsys, row.command) == row.live_bytes, row.does
        assert row.saved_bytes == found.base.live_bytes - row.live_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "hf-trainer"},
        {"optimizer": "adam", "torch_version": "1.13"},
        {"optimizer": "sgd", "momentum": 0.9, "zero_grad": "after-forward"},
    ],
)
def test_commands_tell_what_a_preset_would_change(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = staticmem.levers(RESNET, batch=8, **options)
    changed = [row for row in found.rows if not row.flags or row.does.split()[0] in ("zero_grad()", "sgd", "the")]
    assert changed
    for row in changed:
        assert predicted(capsys, row.command) == row.live_bytes, row.does


def predicted(capsys: pytest.CaptureFixture[str], command: str) -> int:
    import json

    program, *words = shlex.split(command)
    assert program == "staticmem"
    assert main([*words, "--no-config", "-f", "json"]) == 0
    peak: int = json.loads(capsys.readouterr().out)["peak"]["live_bytes"]
    return peak


def test_rows_are_ranked_and_have_a_schema(found: Levers) -> None:
    saved = [row.saved_bytes for row in found.rows]
    assert saved == sorted(saved, reverse=True)
    jsonschema.validate(to_json(found), schema("levers"))
    names = {row.flags.split()[0] for row in found.rows}
    assert {"--amp", "--checkpoint", "--optimizer", "--freeze", "--batch"} <= names
    assert "--mode" not in names, "inference is another step, no lever of this one"


def test_optimizers_change_no_compute_and_checkpoints_add_some(found: Levers) -> None:
    rows = {row.flags: row for row in found.rows}
    assert rows["--optimizer sgd"].compute == 0
    assert rows["--amp bf16"].changes == "numerics"
    blocks = rows["--checkpoint BasicBlock"]
    assert 0.2 < blocks.compute < 1 / 3, "less than the forward, which is a third of the step"
    assert blocks.changes == "none"


def test_operations_by_hand() -> None:
    """The stem of ResNet-18: 7 x 7 x 3 products for each of 64 x 112 x 112 results; its input needs no gradient."""
    study = Study.open(RESNET, Request(batch=1, optimizer="sgd"))
    graph = study.result.graph
    counter = Counter(graph, training=True)
    stem = 2 * 64 * 112 * 112 * 7 * 7 * 3
    head = 2 * 512 * 1000
    assert counter.of_op[next(i for i, op in enumerate(graph.ops) if op.base == "aten::conv2d")] == stem
    made = counter.of(Scenario(mode="train"))
    assert made.forward == sum(counter.of_op)
    assert made.backward == 2 * made.forward - stem
    assert made.again == 0
    frozen = counter.of(Scenario(mode="train", freeze=r"^(?!fc\.)"))
    assert frozen.backward == head, "the gradient of the weight alone"
    inference = counter.of(Scenario(mode="infer"))
    assert (inference.backward, inference.again) == (0, 0)
    every = counter.of(Scenario(mode="train", checkpoint=("BasicBlock",)))
    assert every.again == made.forward - stem - head
    nested = counter.of(Scenario(mode="train", checkpoint=("BasicBlock", "layer1.*")))
    assert nested.again > every.again or nested.again == every.again


@pytest.mark.parametrize(
    ("name", "selector", "count", "head"),
    [("resnet18.pt2", "BasicBlock", 8, "fc"), ("mobilenet_v2.onnx", "InvertedResidual", 17, "classifier.1")],
)
def test_blocks_of_a_model(name: str, selector: str, count: int, head: str) -> None:
    graph = Study.open(MODELS / name, Request(batch=1)).graph
    blocks = repeated_blocks(graph)
    assert (blocks[0].selector, len(blocks[0].paths)) == (selector, count)
    assert last_layer(graph) == head


def test_a_model_without_blocks_has_levers_all_the_same() -> None:
    found = levers(Study.open(MODELS / "seed.pt2", Request(batch=4, optimizer="adam")))
    assert any(row.flags == "--amp bf16" for row in found.rows)


def test_dropping_the_outputs_is_a_lever_where_it_pays(found: Levers) -> None:
    """1,000 scores an image are less than a hundredth of ResNet-18's peak; feature maps as outputs are not."""
    seed = MODELS / "seed.pt2"
    row = next(
        row for row in levers(Study.open(seed, Request(optimizer="sgd"))).rows if row.flags == "--outputs dropped"
    )
    peaks = [staticmem.analyze(seed, optimizer="sgd", outputs=word).peak.live_bytes for word in ("held", "dropped")]
    assert row.saved_bytes == peaks[0] - peaks[1] > peaks[0] // 100
    assert "--outputs dropped" not in {row.flags for row in found.rows}


def test_inference_has_no_levers_of_training() -> None:
    found = levers(Study.open(RESNET, Request(batch=4)))
    allowed = {"--amp bf16", "--dtype bf16", "--inplace-activations all", "--compile"}
    assert {row.flags for row in found.rows} <= allowed
    assert found.rows


# -- a budget ----------------------------------------------------------------------------------------------------


def test_the_best_set_reaches_its_budget_and_no_block_can_go() -> None:
    study = Study.open(RESNET, Request(batch=32, optimizer="sgd"))
    base = study.lifetimes.peak_bytes
    every = study.ask(Request(batch=32, optimizer="sgd", checkpoint=("BasicBlock",))).lifetimes.peak_bytes
    budget = (base + every) // 2
    found = levers(study, budget=budget)
    row = next(row for row in found.rows if "for the budget" in row.does)
    chosen = tuple(word for word in shlex.split(row.flags) if word != "--checkpoint")
    assert 1 <= len(chosen) < 8
    assert row.live_bytes <= budget
    assert staticmem.analyze(RESNET, batch=32, optimizer="sgd", checkpoint=chosen).peak.live_bytes == row.live_bytes
    full = next(row for row in found.rows if row.flags == "--checkpoint BasicBlock")
    assert 0 < row.compute < full.compute
    for path in chosen:
        fewer = tuple(other for other in chosen if other != path)
        if fewer:
            less = staticmem.analyze(RESNET, batch=32, optimizer="sgd", checkpoint=fewer)
            assert less.peak.live_bytes > budget, f"{path} need not be checkpointed"


def test_a_budget_that_is_kept_or_out_of_reach() -> None:
    study = Study.open(RESNET, Request(batch=8, optimizer="sgd"))
    kept = levers(study, budget=1 << 40)
    assert not any("for the budget" in row.does for row in kept.rows)
    assert "without a change. The budget was compared with live tensors alone; --gpu NAME" in verdict(kept)
    assert verdict(levers(study, "l4", budget=1 << 40)).endswith("without a change.")
    beyond = levers(study, budget=1 << 20)
    assert cheapest(beyond) is None
    assert "No lever alone" in verdict(beyond)


def test_the_cheapest_changes_least() -> None:
    study = Study.open(RESNET, Request(batch=32, optimizer="adam"))
    found = levers(study, budget=study.lifetimes.peak_bytes - (50 << 20))
    best = cheapest(found)
    assert best is not None
    assert best.changes == "none"
    assert best.compute == 0
    assert best.live_bytes <= (found.budget_bytes or 0)


def test_on_a_card_device_memory_is_what_counts() -> None:
    study = Study.open(RESNET, Request(batch=64, optimizer="adam"))
    found = levers(study, "1900MiB")
    assert found.base.fit == "does not fit"
    assert found.budget_bytes == found.usable_bytes == 1900 << 20
    for row in found.rows:
        assert row.device_bytes is not None
        assert found.base.device_bytes is not None
        assert row.saved_bytes == found.base.device_bytes - row.device_bytes
    best = cheapest(found)
    assert best is not None
    report = staticmem.analyze(RESNET, gpu="1900MiB", **_words(best.flags))  # type: ignore[arg-type]
    assert report.peak.device_bytes == best.device_bytes
    assert report.gpu is not None
    assert report.gpu.fit == best.fit != "does not fit"


def test_what_crosses_the_bus_is_counted() -> None:
    """Saved tensors as the step's note has them, there and back; gradients out and parameters in."""
    study = Study.open(RESNET, Request(batch=64, optimizer="adam"))
    rows = {row.flags: row for row in levers(study).rows}
    saved = study.ask(Request(batch=64, optimizer="adam", offload_activations="pinned"))
    note = next(note.text for note in saved.result.notes if note.code == "SM339")
    moved = rows["--offload-activations pinned"].moved_bytes
    assert format_bytes(moved // 2) in note
    trained = study.report.parameters.trainable_count * 4
    assert rows["--offload-optimizer"].moved_bytes == 2 * trained
    both = rows["--offload-activations pinned --checkpoint BasicBlock"].moved_bytes
    assert 0 < both < moved
    assert all(row.moved_bytes == 0 for flags, row in rows.items() if "offload" not in flags)
    one = Request(batch=16, optimizer="adam", offload_activations="pinned")
    assert study.ask(replace(one, accumulate=4)).result.moved == 4 * study.ask(one).result.moved


def _words(flags: str) -> dict[str, object]:
    words: dict[str, object] = {"batch": 64, "optimizer": "adam"}
    parts = shlex.split(flags)
    for flag, value in zip(parts[::2], parts[1::2], strict=True):
        words[flag[2:].replace("-", "_")] = int(value) if value.isdigit() else value
    return words


# -- as a user types it ------------------------------------------------------------------------------------------


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["levers", str(RESNET), "--no-config", "--batch", "16", "--optimizer", "adam"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[lines.index("") + 1].split() == ["saves", "compute", "moves", "peak", "changes", "do"]
    assert "checkpoint every BasicBlock" in captured.out
    assert lines[lines.index("") - 1].endswith(".")
    assert main([*words, "--budget", "300 MiB", "-q"]) == 0
    assert "The cheapest way to 300 MiB: " in capsys.readouterr().out
    target = tmp_path / "levers.json"
    assert main([*words, "-o", str(target)]) == 0
    assert capsys.readouterr().err == f"Wrote {target}\n"
    assert main([*words, "--budget", "much"]) == 2
    assert "--budget 'much' is not a size" in capsys.readouterr().err


def test_flags_are_quoted() -> None:
    words = {"freeze": "^(?!a b)", "dims": {"x[0]": 2}, "resolution": (2, 3), "set_to_none": False, "nesterov": True}
    assert as_flags(words) == "--freeze '^(?!a b)' --dim 'x[0]=2' --resolution 2x3 --no-set-to-none --nesterov"
    assert as_flags({"amp": None, "optimizer_impl": "foreach"}) == ""


def test_from_python() -> None:
    found = staticmem.levers(MODELS / "seed.pt2", batch=4, optimizer="adam", budget="1GiB")
    assert found.budget_bytes == 1 << 30
    assert found.rows
    with pytest.raises(staticmem.StaticmemError, match="budget is 'much'"):
        staticmem.levers(MODELS / "seed.pt2", budget="much")


def test_a_compiled_step_can_have_a_budget() -> None:
    """Saved less, computed again more: what `activation_memory_budget` of torch._functorch.config does."""
    study = Study.open(RESNET, Request(batch=4, optimizer="sgd", compile=True))
    rows = {row.does: row for row in levers(study).rows}
    half = rows["an activation memory budget of 50% for the compiler"]
    assert half.saved_bytes > 0
    assert half.compute > 0
    assert half.flags == "--activation-memory-budget 0.5"
    with pytest.raises(UsageError, match="needs --compile"):
        _ = study.ask(Request(batch=4, optimizer="sgd", activation_memory_budget=0.5)).scenario


@pytest.mark.parametrize(("card", "words"), [("t4", {"fp16"}), ("l4", {"bf16"})])
def test_half_precision_is_that_of_the_card(card: str, words: set[str]) -> None:
    """A T4 has no arithmetic in bfloat16."""
    for asked in ({"optimizer": "adam"}, {"mode": "infer"}):
        rows = levers(Study.open(RESNET, Request(batch=16, gpu=card, **asked)), gpu=card).rows  # type: ignore[arg-type]
        flags = [row.flags.split() for row in rows]
        named = {one[at + 1] for one in flags for at, word in enumerate(one) if word in ("--amp", "--dtype")}
        assert named == words


def test_the_last_layer_is_one_that_is_trained() -> None:
    study = Study.open(RESNET, Request(batch=16, optimizer="adam", freeze="^fc"))
    assert last_layer(study.result.graph) == "layer4.1.bn2"


def test_processes_give_the_rows_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study.open(RESNET, Request(batch=64, optimizer="adam"))
    seen: list[tuple[int, int]] = []
    alone = levers(study, "l4")
    monkeypatch.setattr("staticmem.studies.levers.WORTH_PROCESSES", 0.0)
    together = levers(study, "l4", progress=lambda done, total: seen.append((done, total)), jobs=2)
    assert together == alone
    assert seen[-1][0] == seen[-1][1] > 10
