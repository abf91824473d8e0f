"""Plans: what an instant leaves for the next, verdicts, changes, errors of configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import staticmem
from staticmem.allocators.from_trace import Builder, process_of_trace
from staticmem.allocators.run import Run
from staticmem.cli.main import main
from staticmem.config.config import of_node
from staticmem.devices.kernels import KernelWorkspaces
from staticmem.documents import of_plain
from staticmem.errors import StaticmemError
from staticmem.report.formats.run_html import render as html
from staticmem.report.run import RunReport
from staticmem.studies import Request, Study
from staticmem.studies.plan import study_of_config

ROOT = Path(__file__).parents[2]
RESNET, MOBILENET = str(ROOT / "models" / "resnet18.pt2"), str(ROOT / "models" / "mobilenet_v2.pt2")
MIB = 2**20
PARAMETERS = 11_689_512 * 4  # bytes of ResNet-18's


def run_of(*instants: Any, **more: Any) -> RunReport:
    config = {"version": 1, "model": RESNET, "train": {"batch": 8, "optimizer": "adam"}, "infer": {"batch": 8}}
    return staticmem.plan({**config, **more, "plan": {"instants": list(instants)}})


SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "adam"},
    {"optimizer": "sgd", "momentum": 0.9, "zero_grad": "after-forward"},
    {"optimizer": "adagrad", "set_to_none": False},
    {"optimizer": "adamw", "amp": "bf16", "accumulate": 2, "outputs": "dropped"},
    {},
    {"outputs": "dropped"},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_run_of_three_steps_has_the_calls_of_the_step(options: dict[str, Any]) -> None:
    study = Study.open(RESNET, Request(batch=4, **options))
    trace = study.result.trace
    workspaces = KernelWorkspaces(trace, study.device.setup)
    alone, builder = process_of_trace(trace, workspaces), Builder(trace, workspaces)
    run = Run(builder)
    for _ in range(3):
        run.step(builder, "model", "loop")
    joined = run.joined()
    assert (joined.calls, joined.sizes, joined.marks) == (alone.calls, alone.sizes, alone.marks)
    assert max(run.live()) == study.lifetimes.peak_bytes


def test_a_plan_of_one_step_is_the_step() -> None:
    report = run_of("step", gpus=["l4"])
    alone = staticmem.analyze(RESNET, batch=8, optimizer="adam", gpu="l4")
    peak = alone.peak
    assert report.live_bytes == peak.live_bytes
    assert (report.allocated_bytes, report.reserved_bytes) == (peak.allocated_bytes, peak.reserved_bytes)
    assert (report.device_bytes, report.context_bytes) == (peak.device_bytes, peak.context_bytes)
    assert report.gpu is not None
    assert alone.gpu is not None
    assert (report.gpu.fit, report.gpu.usable_bytes) == (alone.gpu.fit, alone.gpu.usable_bytes)


def test_an_evaluation_between_steps_has_gradients_and_state() -> None:
    report = run_of("step", "evaluate")
    alone = run_of("evaluate")
    batch = 8 * 3 * 224 * 224 * 4
    outputs = 8 * 1000 * 4 + (-8 * 1000 * 4) % 512
    # beside its own peak: gradients and both moments of Adam, the batch with its labels, outputs and loss of the loop
    more = report.instants[1].live_bytes - alone.instants[0].live_bytes
    rounded = 62 * 512  # each of ResNet-18's 62 parameters is whole blocks
    assert 0 <= more - (3 * PARAMETERS + batch + outputs + 512 + 512) < 3 * rounded + 512


def test_gathered_outputs_grow_with_every_batch() -> None:
    plain, listed = run_of("evaluate"), run_of({"evaluate": {"gather": "list", "times": 5}})
    outputs = 32_256  # 8 x 1000 x 4 bytes in whole blocks
    assert plain.instants[0].times == 3
    assert listed.live_bytes - plain.live_bytes == 3 * outputs  # of 4 batches one was held anyway
    named = run_of({"evaluate": {"gather": "concat", "times": 4, "gathered": "64 MiB"}})
    # the new list of all batches is made beside the one of those before
    assert named.live_bytes >= (4 + 3) * 64 * MIB


def test_what_is_gathered_goes_to_the_cpu_after_some_batches() -> None:
    def peak(**own: Any) -> int:
        return run_of({"evaluate": {"gather": "list", "gathered": "64 MiB", **own}}).live_bytes

    assert peak(times=6) - peak(times=2) == 4 * 64 * MIB
    assert peak(times=6, accumulation_steps=2) == peak(times=2)


def test_a_loop_may_gather_predictions_or_the_loss_alone() -> None:
    def more(**own: Any) -> int:
        """Bytes that seven batches more take."""
        few, many = (run_of({"evaluate": {"gather": "list", "times": times, **own}}).live_bytes for times in (3, 10))
        return many - few

    assert more() == 7 * 32_256  # 8 x 1000 x 4 bytes in whole blocks
    assert more(keep="predictions") == 7 * 512  # eight numbers
    assert more(keep="predictions", labels=True) == 7 * 3 * 512  # with the labels, and the loss of each sample
    assert more(keep="loss") == 7 * 512


def test_a_loss_that_no_evaluation_computes_is_said() -> None:
    runs = [run_of({"evaluate": {"gather": "list", "labels": labels}}) for labels in (True, False)]
    assert ["computes no loss" in " ".join(run.assumed) for run in runs] == [True, False]
    assert ["computes no loss" in html(run) for run in runs] == [True, False], "the page has it too"


def test_a_report_says_after_how_many_batches_the_gpu_is_full() -> None:
    kept = {"evaluate": {"gather": "list", "gathered": "100 MiB"}}
    report = run_of(kept, gpus=["8GiB"])
    (one,) = report.instants
    # the model with a batch and the context take less than 1 GiB, and a block of 100 MiB wastes nothing
    assert 70 <= one.full_after <= 80
    assert f"full after about {one.full_after} batches" in str(report)
    assert (
        run_of({"evaluate": {**kept["evaluate"], "accumulation_steps": 9}}, gpus=["8GiB"]).instants[0].full_after == 0
    )
    assert run_of(kept).instants[0].full_after == 0  # no GPU is named
    longer = run_of({"evaluate": {**kept["evaluate"], "times": 100}}, gpus=["8GiB"])
    assert longer.instants[0].runs_out
    assert longer.instants[0].ran == one.full_after
    steps = one.full_after // 2
    assert f"accumulation_steps: {steps} in 'evaluate'" in [change.does for change in longer.changes]


def test_without_a_variable_there_are_no_outputs_to_gather() -> None:
    with pytest.raises(StaticmemError) as caught:
        run_of({"evaluate": {"gather": "list", "outputs": "dropped"}})
    assert caught.value.code == "SM448"


def test_a_copy_of_the_model_is_gone_after_the_save_unless_it_stays() -> None:
    report = run_of("step", {"save": {"copies": "model"}}, {"save": {"copies": "model", "stays": True}})
    step, gone, stays = report.instants
    assert gone.left_bytes == step.left_bytes
    assert PARAMETERS < stays.left_bytes - step.left_bytes < PARAMETERS + 2**17  # with statistics, in whole blocks
    assert run_of("step", "save").instants[1].live_bytes == step.left_bytes


FULL: list[tuple[int, dict[str, Any], int, int]] = [
    (4, {}, 9_437_184, 0),
    (4, {"offload": False}, 46_758_048, 0),
    (4, {"offload": False, "stays": True}, 46_758_048, 46_758_048),
    (4, {"full": "all", "offload": False}, 46_758_048 + 93_516_096, 0),
    (3, {}, 9_455_616, 0),
    (3, {"offload": False}, 46_929_456, 0),
    (3, {"full": "all"}, 9_455_616, 0),
    (3, {"full": "all", "offload": False}, 46_929_456 + 93_858_912, 0),
]


@pytest.mark.parametrize(("ranks", "own", "peak", "left"), FULL, ids=str)
def test_a_full_state_dict_takes_what_pytorch_gathers(ranks: int, own: dict[str, Any], peak: int, left: int) -> None:
    """Bytes that were requested in `get_model_state_dict` and `get_optimizer_state_dict` of PyTorch 2.14.1, with
    full_state_dict and with and without cpu_offload, after `fully_shard` of ResNet-18 in a fake group of ranks."""
    step = {"step": {"optimizer": "adamw", "batch": 2, "parallel": "fsdp", "devices": ranks}}
    node = {"version": 1, "model": RESNET, "plan": {"instants": [step, {"save": {"full": "model", **own}}]}}
    study = study_of_config(of_node(of_plain(node, "test", ""), ""), None)
    played = study.play(study.plan.instants)
    process, moment = played.process, played.moments[1]
    alive = [0]
    for call in process.calls[moment.start : moment.end]:
        alive.append(alive[-1] + (process.sizes[call] if call >= 0 else -process.sizes[~call]))
    assert (max(alive), alive[-1]) == (peak, left)


@pytest.mark.parametrize(
    "options", [{}, {"parallel": "ddp", "devices": 4}, {"parallel": "zero3", "devices": 4}], ids=str
)
def test_a_full_state_dict_is_that_of_shards_of_fsdp(options: dict[str, Any]) -> None:
    with pytest.raises(StaticmemError) as caught:
        run_of({"step": options}, {"save": {"full": "model"}})
    assert caught.value.code == "SM451"


def test_a_model_that_sleeps_takes_its_gradients_along_and_wakes_for_its_step() -> None:
    asleep = run_of("step", "sleep", "step").instants
    assert asleep[0].left_bytes - asleep[1].left_bytes > 2 * PARAMETERS
    assert asleep[2].live_bytes == asleep[0].live_bytes
    everything = run_of("step", {"sleep": {"parts": "all"}}).instants[1]
    assert everything.left_bytes < asleep[1].left_bytes - 2 * PARAMETERS


def test_repeated_instants_are_written_out() -> None:
    report = run_of({"repeat": {"times": 2, "instants": ["step", "evaluate"]}})
    assert [one.name for one in report.instants] == ["step 1", "evaluate 1", "step 2", "evaluate 2"]
    assert report.instants[2].live_bytes == report.instants[0].live_bytes


def test_several_models_keep_their_own_parameters() -> None:
    plan = {
        "models": {"a": RESNET, "b": RESNET},
        "instants": [{"load": "a"}, {"load": "b"}, {"step": {"model": "a", "batch": 2, "optimizer": "sgd"}}],
    }
    first, second, step = staticmem.plan({"version": 1, "plan": plan}).instants
    assert second.left_bytes == 2 * first.left_bytes
    alone = staticmem.analyze(RESNET, batch=2, optimizer="sgd").peak.live_bytes
    assert step.live_bytes == alone + first.left_bytes


def test_what_does_not_fit_says_where_and_what_makes_it_fit() -> None:
    instants = ["step", {"evaluate": {"batch": 512, "times": 4, "name": "validation"}}]
    report = run_of(*instants, gpus=["3GiB"])
    assert report.gpu is not None
    assert report.gpu.fit == "does not fit"
    assert [one.runs_out for one in report.instants] == [False, True]
    assert report.instants[1].ran == 0
    assert "'validation'" in str(report)
    assert [change.does for change in report.changes] == ["batch 256 in 'validation'"]
    assert report.changes[0].device_bytes < 3 * 1024 * MIB
    smaller = run_of("step", {"evaluate": {"batch": 256, "times": 4}}, gpus=["3GiB"])
    assert report.changes[0].device_bytes == smaller.device_bytes


def test_an_evaluation_whose_blocks_no_step_can_use_is_the_cause() -> None:
    """Steps alone fit, and beside a list of 20 x 40 MiB, which stays, they do not."""
    kept = {"evaluate": {"times": 20, "gather": "list", "gathered": "40 MiB", "function": False}}
    step = {"step": {"batch": 24}}
    assert run_of(step, gpus=["2GiB"]).cause == ""
    report = run_of(step, kept, step, "evaluate", gpus=["2GiB"])
    assert [one.name for one in report.instants] == ["step", "evaluate", "step 2", "evaluate 2"]
    assert [one.runs_out for one in report.instants] == [False, False, True, False]
    assert report.cause == "evaluate"
    assert "It runs out of memory in 'step 2', which took less before 'evaluate'." in str(report)
    assert str(report).count("not reached") == 1
    assert "On the host" in str(report._rendered("html"))


ERRORS: list[tuple[Any, str]] = [
    ({"instants": [{"stop": {}}]}, "SM194"),
    ({"instants": [{"step": {"optimiser": "adam"}}]}, "SM194"),
    ({"instants": [{"step": {"model": "other"}}]}, "SM194"),
    ({"instants": [{"save": {"copies": "some"}}]}, "SM195"),
    ({"instants": [{"evaluate": {"gathered": "4 MiB"}}]}, "SM195"),
    ({"instants": [{"evaluate": {"accumulation_steps": 4}}]}, "SM195"),
    ({"instants": [{"evaluate": {"gather": "list", "gathered": "4 MiB", "keep": "predictions"}}]}, "SM195"),
    ({"instants": [{"evaluate": {"gather": "list", "keep": "loss", "labels": True}}]}, "SM195"),
    ({"instants": ["step", {"save": {"full": "model", "copies": "model"}}]}, "SM195"),
    ({"instants": ["step", {"save": {"offload": False}}]}, "SM195"),
    ({"instants": ["step", {"save": {"stays": True}}]}, "SM195"),
    ({"instants": [{"repeat": {"times": 20_000, "instants": ["step"]}}]}, "SM195"),
    ({"instants": ["empty_cache"]}, "SM440"),
    ({}, "SM194"),
]


@pytest.mark.parametrize(("plan", "code"), ERRORS, ids=str)
def test_errors_name_what_is_wrong(plan: Any, code: str) -> None:
    with pytest.raises(StaticmemError) as caught:
        staticmem.plan({"version": 1, "model": RESNET, "plan": plan})
    assert caught.value.code == code
    assert caught.value.hint


def test_a_config_without_a_plan_is_an_error() -> None:
    with pytest.raises(StaticmemError) as caught:
        staticmem.plan({"version": 1, "model": RESNET})
    assert caught.value.code == "SM442"


def test_cuda_graphs_are_refused() -> None:
    step = {"step": {"compile": True, "compile_mode": "reduce-overhead"}}
    with pytest.raises(StaticmemError) as caught:
        run_of(step)
    assert caught.value.code == "SM441"


PLAN = f"""\
version: 1
model: {RESNET}
gpus: [8GiB]
train: {{batch: 8, optimizer: adam}}
infer: {{batch: 256}}
plan: {{instants: [step, evaluate]}}
budgets: [{{metric: device, limit: LIMIT}}]
"""


@pytest.mark.parametrize(("limit", "code"), [("8 GiB", 0), ("1 GiB", 1)])
def test_check_takes_the_run_of_a_plan(
    limit: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "staticmem.yaml"
    path.write_text(PLAN.replace("LIMIT", limit))
    assert main(["check", "--config", str(path), "-f", "json"]) == code
    outcome = json.loads(capsys.readouterr().out)["outcomes"][0]
    run = staticmem.plan(str(path))
    assert (outcome["configuration"], outcome["bytes"]) == ("the run", run.device_bytes)
    assert outcome["high_bytes"] == run.device.high
    path.write_text(PLAN.replace("LIMIT", limit).replace("gpus: [8GiB]\n", ""))  # then an H100 is assumed
    assert main(["check", "--config", str(path), "-q"]) == code
    assert main(["check", "--config", str(path), "--batch", "4"]) == 2
    assert "[SM444]" in capsys.readouterr().err


def test_other_verbs_take_the_training_step_of_a_config_with_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "staticmem.yaml"
    path.write_text(PLAN.replace("LIMIT", "8 GiB"))
    assert main(["analyze", "--config", str(path), "-f", "json"]) == 0
    scenario = json.loads(capsys.readouterr().out)["scenario"]
    assert (scenario["mode"], scenario["batch"], scenario["optimizer"]) == ("train", 8, "adam")


def test_init_writes_a_plan_of_a_model_by_name(tmp_path: Path) -> None:
    assert main(["init", "models:resnet50", "--plan", "-o", str(tmp_path / "staticmem.yaml")]) == 0
    assert 'model: "models:resnet50"' in (tmp_path / "staticmem.yaml").read_text()


@pytest.mark.parametrize(("full", "times"), [("model", 1), ("all", 3)])
def test_the_host_has_the_full_state_dict_that_moves_there(full: str, times: int) -> None:
    step = {"step": {"optimizer": "adamw", "batch": 2, "parallel": "fsdp", "devices": 4}}
    host = run_of(step, {"save": {"full": full}}).host
    plain = run_of(step, {"save": {"full": full, "offload": False}}).host
    assert host is not None
    assert plain is not None
    # besides 9,600 means and variances and 20 counters of batches in blocks of 512 bytes
    assert times * PARAMETERS < host.parts["checkpoint"] < times * PARAMETERS + 2**17
    assert plain.parts.get("checkpoint", 0) < PARAMETERS
