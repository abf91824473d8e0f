"""Sweeps: the configurations that lists mean, and where they are worked out."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import staticmem
from staticmem.config.config import Config, of_node
from staticmem.documents import parse_yaml
from staticmem.errors import StaticmemError, UsageError
from staticmem.frontends import recent
from staticmem.ir.graph import Graph
from staticmem.ir.model_file import Binding, ModelFile
from staticmem.passes import pipeline
from staticmem.report.formats import Formats
from staticmem.report.json import dumps
from staticmem.report.schema import schema
from staticmem.report.sweep import Sweep
from staticmem.report.text import PLAIN
from staticmem.scenario.request import Request
from staticmem.studies.points import parse_axes, points, settings_of
from staticmem.studies.sizing_search import GrownSize
from staticmem.studies.sweep import with_largest

CSV = Formats("sweep")["csv"]
MODELS = Path(__file__).parents[2] / "models"
SEED, RESNET = str(MODELS / "seed.pt2"), str(MODELS / "resnet18.pt2")


def test_the_cross_product_in_its_order() -> None:
    config = Config(model="m.pt2", options={"mode": "train", "optimizer": "sgd", "momentum": 0.9})
    made = points(config, None, {}, {"batch": (1, 2), "optimizer": ("sgd", "adam"), "dims.seq": (8,)})
    assert [(p.request.batch, p.request.optimizer, p.request.momentum) for p in made] == [
        (1, "sgd", 0.9), (1, "adam", 0.0), (2, "sgd", 0.9), (2, "adam", 0.0),
    ]  # fmt: skip
    assert made[0].request.dims == {"seq": 8}
    assert settings_of(made[0].request) == {
        "batch": 1, "dims.seq": 8, "mode": "train", "optimizer": "sgd", "momentum": 0.9,
    }  # fmt: skip


def test_flags_replace_lists_of_the_config() -> None:
    config = Config(model="m.pt2", axes={"batch": (1, 2), "optimizer": ("sgd", "adam")})
    made = points(config, None, {"batch": 7}, {"optimizer": ("adagrad",)})
    assert [(p.request.batch, p.request.optimizer) for p in made] == [(7, "adagrad")]


def test_scenarios_one_by_one() -> None:
    text = "version: 1\nmodel: m.pt2\ntrain: {optimizer: adam}\n"
    text += "scenarios:\n- {name: a, batch: 2}\n- {batch: 3, amp: bf16}\n"
    made = points(of_node(parse_yaml(text, "c.yaml"), ""), None, {}, {})
    assert [(p.name, p.request.batch, p.request.amp, p.request.optimizer) for p in made] == [
        ("a", 2, None, "adam"), (None, 3, "bf16", "adam"),
    ]  # fmt: skip


def test_scenarios_times_lists() -> None:
    config = Config(model="m.pt2", scenarios=({"name": "a", "amp": "bf16"}, {"name": "b"}))
    made = points(config, None, {}, {"batch": (1, 2)})
    assert [(p.name, p.request.batch, p.request.amp) for p in made] == [
        ("a", 1, "bf16"), ("a", 2, "bf16"), ("b", 1, None), ("b", 2, None),
    ]  # fmt: skip


def test_words_that_exclude_each_other_are_an_error_of_their_row() -> None:
    found = staticmem.sweep(SEED, {"optimizer": ["adam", "rmsprop"]}, optimizer_impl="fused", batch=2)
    assert [row.error.code if row.error else None for row in found.rows] == [None, "SM133"]
    assert found.rows[1].settings["optimizer"] == "rmsprop"
    assert found.rows[0].live_bytes


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["batch"], "is not NAME=A,B"),
        (["batch="], "is not NAME=A,B"),
        (["batch=1,,2"], "is not NAME=A,B"),
        (["optimiser=adam"], "is not known"),
        (["batch=1", "batch=2"], "given twice"),
        (["batch=1,x"], "batch\\[1\\] is 'x'"),
        (["optimizer=adamm"], "'adamm'"),
    ],
)
def test_what_if_on_the_command_line(words: list[str], what: str) -> None:
    with pytest.raises(StaticmemError, match=what):
        parse_axes(words)


def test_what_if_values() -> None:
    assert parse_axes(["batch=1,2", "amp=none,bf16", "resolution=224,96x128", "seq=5", "dims.n=6,7"]) == {
        "batch": (1, 2), "amp": ("none", "bf16"), "resolution": ((224, 224), (96, 128)), "dims.seq": (5,),
        "dims.n": (6, 7),
    }  # fmt: skip
    assert parse_axes(["torch_version=2.9,2.10"]) == {"torch_version": ("2.9", "2.10")}  # text, not the number 2.1
    assert parse_axes(["checkpoint=none,BasicBlock", "nesterov=true,false"]) == {
        "checkpoint": ((), ("BasicBlock",)), "nesterov": (True, False),
    }  # fmt: skip


def test_too_many() -> None:
    many = tuple(range(1, 1001))
    with pytest.raises(UsageError, match="1,000,000 configurations"):
        points(Config(model="m.pt2"), None, {}, {"batch": many, "accumulate": many})


def test_no_model() -> None:
    with pytest.raises(UsageError, match="no model"):
        points(Config(), None, {}, {})


def test_rows_on_cards_are_those_of_analyze() -> None:
    found = staticmem.sweep(SEED, {"batch": [2, 5]}, gpus=["l4", "24GB"], optimizer="adam")
    assert (found.meters, found.gpus) == (("live", "allocated", "reserved", "device"), ("l4", "24gb"))
    for row in found.rows:
        for card, gpu in zip(row.cards, ("l4", "24GB"), strict=True):
            report = staticmem.analyze(SEED, batch=int(row.settings["batch"] or 0), optimizer="adam", gpu=gpu)
            assert (row.live_bytes, card.device_bytes, card.reserved_bytes, card.allocated_bytes) == (
                report.peak.live_bytes, report.peak.device_bytes, report.peak.reserved_bytes,
                report.peak.allocated_bytes,
            )  # fmt: skip
            assert report.gpu is not None
            assert (card.fit, card.headroom_bytes) == (report.gpu.fit, report.gpu.headroom_bytes)


def test_a_batch_of_all_optimizers_is_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recent.models.clear()
    sizes: list[int] = []
    bound = pipeline._bound

    def counted(model: ModelFile, binding: Binding) -> Graph:
        sizes.append(next(iter(binding.shapes.values()))[0])
        return bound(model, binding)

    monkeypatch.setattr(pipeline, "_bound", counted)
    what_if: dict[str, list[Any]] = {"batch": list(range(1, 10)), "optimizer": ["sgd", "adam", "rmsprop"]}
    sweep = staticmem.sweep(SEED, what_if, gpus="l4")
    assert sizes, "the sweep bound nothing"
    assert len(sizes) == len(set(sizes)) < 9  # batches on a line are not bound at all
    row = sweep.rows[-1]
    report = staticmem.analyze(SEED, batch=9, optimizer="rmsprop", gpu="l4")
    assert row.cards[0].device_bytes == report.peak.device_bytes


def test_a_card_that_cannot_run_a_configuration_does_not_fit() -> None:
    swept = staticmem.sweep(SEED, {"amp": ["none", "bf16"]}, gpus=["t4", "l4"], torch_version="2.2")
    turing, ada = zip(*(row.cards for row in swept.rows), strict=True)
    assert [card.fit for card in turing] == ["fits", "cannot run it"]
    assert "bfloat16" in turing[1].obstacle
    assert [card.obstacle for card in ada] == ["", ""]
    alone = with_largest(points(Config(), SEED, {"amp": "bf16", "torch_version": "2.2"}, {}), ("t4",), GrownSize())
    assert alone.rows[0].cards[0].largest is None
    said = Formats("sweep").default.render(alone, PLAIN)
    assert "t4 cannot run 1 of them (torch.autocast of PyTorch 2.2 refuses" in said


@pytest.mark.parametrize(
    ("card", "options"),
    [
        ("t4", {"optimizer": "torchao-adamw-fp8"}),  # Triton has E4M3 from 8.9 on
        ("a100-pcie-40gb", {"optimizer": "torchao-adamw-fp8"}),
        ("p100", {"optimizer": "torchao-adamw-8bit"}),  # and runs from 7.0 on
        ("t4", {"optimizer": "torchao-adamw-8bit", "dtype": "bf16"}),
        ("t4", {"optimizer": "adamw", "compile_optimizer": True, "dtype": "bf16"}),
        ("t4", {"optimizer": "adamw", "compile_optimizer": True, "amp": "bf16"}),
    ],
)
def test_live_memory_says_what_a_card_cannot_run_as_a_run_does(card: str, options: dict[str, Any]) -> None:
    said = [
        staticmem.sweep(SEED, {"batch": [2]}, gpus=[card], meter=meter, **options).rows[0].cards[0].obstacle
        for meter in ("live", "device")
    ]
    assert said[0] == said[1]
    assert bool(said[0]) == ("amp" not in options)


def test_live_memory_alone_rules_out_and_never_in() -> None:
    found = staticmem.sweep(SEED, {"batch": [1, 64]}, gpus=["2GiB"], meter="live")
    assert [row.cards[0].fit for row in found.rows] == ["may fit", "does not fit"]
    assert found.rows[1].cards[0].missing_bytes > 0


def plain(found: Sweep) -> Any:
    return json.loads(dumps(found))


WHAT_IF: dict[str, list[Any]] = {
    "batch": [1, 2, 3, 4, 5],
    "resolution": [64, 96],
    "optimizer": ["sgd", "adam"],
    "model": [SEED, RESNET],
}


def test_threads_and_processes_find_the_same() -> None:
    here = staticmem.sweep(SEED, WHAT_IF)
    seen: list[tuple[int, int]] = []
    with ThreadPoolExecutor(2) as threads:
        there = staticmem.sweep(SEED, WHAT_IF, executor=threads, progress=lambda done, of: seen.append((done, of)))
    assert plain(there) == plain(here)
    assert seen[-1] == (40, 40)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        assert plain(staticmem.sweep(SEED, WHAT_IF, executor=processes)) == plain(here)
    assert plain(staticmem.sweep(SEED, WHAT_IF, jobs=2)) == plain(here)


@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="pip install 'staticmem[dask]'")
@pytest.mark.filterwarnings("default")  # of distributed and its event loop
def test_a_real_local_cluster(tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    here = staticmem.sweep(SEED, WHAT_IF)
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path)
        ) as cluster,
        Client(cluster) as client,
    ):
        executor = client.get_executor(pure=False)
        first: Future[Any] = executor.submit(sum, [1, 2])
        assert first.result() == 3
        assert plain(staticmem.sweep(SEED, WHAT_IF, executor=executor)) == plain(here)


def killing(path: str, requests: Sequence[Request], *rest: Any) -> Any:
    """What a worker does; at batch 3 its process is killed, at batch 5 it is killed once."""
    from staticmem.studies.sweep import measure

    batches = [request.batch for request in requests]
    once = Path(os.environ["TEST_SWEEP_ONCE"])
    if 3 in batches:
        os.kill(os.getpid(), signal.SIGKILL)
    if 5 in batches and not once.exists():
        once.write_text("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(path, requests, *rest)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_killed_process_is_an_error_of_its_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_SWEEP_ONCE", str(tmp_path / "once"))
    monkeypatch.setattr(staticmem.studies.sweep, "measure", killing)
    monkeypatch.setattr(staticmem.studies.sweep, "CHUNK", 2)
    found = staticmem.sweep(SEED, {"batch": [1, 2, 3, 4, 5, 6]}, gpus="l4", jobs=2)
    codes = [row.error and row.error.code for row in found.rows]
    assert codes == [None, None, "SM189", None, None, None]
    assert (tmp_path / "once").exists()


@pytest.mark.parametrize("meter", ["live", "device"])
def test_whatever_a_configuration_raises_is_its_error(meter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = staticmem.studies.Study.ask

    def asks(study: Any, request: Any) -> Any:
        if request.batch in (2, 3):
            raise {2: AssertionError("of a rule"), 3: MemoryError()}[request.batch]
        return ask(study, request)

    monkeypatch.setattr(staticmem.studies.Study, "ask", asks)
    found = staticmem.sweep(SEED, {"batch": [1, 2, 3, 4]}, gpus=("l4",), meter=meter)
    assert [row.error and row.error.code for row in found.rows] == [None, "SM190", "SM191", None]
    error = found.rows[1].error
    assert error is not None
    assert error.what == "internal error: AssertionError: of a rule"


def test_errors_of_a_file_are_in_all_its_rows(tmp_path: Path) -> None:
    found = staticmem.sweep(SEED, {"model": [SEED, str(tmp_path / "missing.pt2")], "batch": [1, 2]})
    assert [row.error is None for row in found.rows] == [True, True, False, False]


def test_unknown_cards_and_meters_are_told_before_any_work() -> None:
    with pytest.raises(UsageError, match="unknown GPU"):
        staticmem.sweep("missing.pt2", {"batch": [1]}, gpus=["h100-sxm-80"])
    with pytest.raises(UsageError, match="unknown meter"):
        staticmem.sweep(SEED, {"batch": [1]}, meter="lively")
    with pytest.raises(UsageError, match="is not known"):
        staticmem.sweep(SEED, {"batches": [1]})


def test_json_has_its_schema_and_csv_a_row_each() -> None:
    found = staticmem.sweep(
        SEED, {"batch": [1, 2], "optimizer": ["adam", "rmsprop"]}, optimizer_impl="fused", gpus="l4"
    )
    jsonschema.validate(plain(found), schema("sweep"))
    lines = str(CSV.render(found, PLAIN)).splitlines()
    assert len(lines) == 1 + len(found.rows)
    assert len(lines[0].split(",")) == len(set(lines[0].split(",")))
    assert "device_bytes[l4]" in lines[0]
    assert "rmsprop has no fused implementation" in lines[2]


def test_csv_is_safe_in_a_spreadsheet() -> None:
    config = Config(model=SEED, scenarios=({"name": "=cmd|' /C calc'!A0", "batch": 1},))
    assert ",'=cmd" in str(CSV.render(staticmem.sweep(config), PLAIN))
