"""`staticmem sweep`, `init`, configs and `--max-batch` as a user types them."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import cli_files as files
import jsonschema
import pytest

from staticmem.cli.main import main
from staticmem.cli.output import Progress
from staticmem.config.root import schema as config_schema
from staticmem.report.schema import schema

SEED = str(files.SEED)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert main(list(words)) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_init_then_sweep_then_analyze(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = said(capsys, "init", SEED)
    assert out == ""
    assert err == "Wrote staticmem.yaml and staticmem.schema.json\n"
    assert json.loads((tmp_path / "staticmem.schema.json").read_text()) == config_schema()
    assert (tmp_path / "staticmem.yaml").read_text().startswith("# yaml-language-server: $schema=./staticmem.schema")
    before = (tmp_path / "staticmem.yaml").read_text()
    _, err = said(capsys, "init", code=2)
    assert "staticmem.yaml exists" in err
    assert (tmp_path / "staticmem.yaml").read_text() == before
    said(capsys, "init", SEED, "--force")
    out, err = said(capsys, "sweep", "staticmem.yaml", "-j", "1")
    assert err == ""
    assert out.startswith("6 configurations; 4 fit h100-sxm-80gb")
    out, err = said(capsys, "analyze", "--batch", "2")
    assert err == "Using staticmem.yaml\n"
    assert out.startswith("Fits an H100 ")
    assert "batch 2, Adam" in out.split("\n\n")[1]
    out, err = said(capsys, "analyze", "--no-config", code=2)
    assert "no model to analyse" in err


def test_init_to_another_folder_and_to_stdout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "m.pt2").write_bytes(files.SEED.read_bytes())
    said(capsys, "init", "m.pt2", "-o", "sub/c.yaml")
    assert "model: ../m.pt2" in (tmp_path / "sub" / "c.yaml").read_text()
    out, _ = said(capsys, "init", "-o", "-")
    assert out.startswith("# yaml-language-server")
    (tmp_path / "staticmem.schema.json").write_text("mine")
    _, err = said(capsys, "init", code=2)
    assert "staticmem.schema.json exists" in err
    assert not (tmp_path / "staticmem.yaml").exists()
    assert (tmp_path / "staticmem.schema.json").read_text() == "mine"


def test_config_errors_have_three_lines_and_a_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("version: 1\ntrain:\n  optimizer: adamm\n")
    for words in (["sweep", "c.yaml"], ["analyze", SEED, "--config", "c.yaml"]):
        out, err = said(capsys, *words, code=2)
        assert out == ""
        assert (
            err.splitlines()
            == [
                "error: c.yaml:3:14: optimizer is 'adamm' [SM195]",
                "  It is one of sgd, adam, adamw, rmsprop, adagrad.",
                "  Did you mean 'adam'?",
            ]
            or "Did you mean 'adam'?" in err.splitlines()[2]
        )
        assert err.startswith("error: c.yaml:3:14: optimizer is 'adamm' [SM195]\n")


def test_flags_over_environment_over_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(f"version: 1\nmodel: {SEED}\ntrain: {{optimizer: sgd, batch: 2, momentum: 0.9}}\n")
    out, _ = said(capsys, "analyze", "--config", "c.yaml", "-q")
    assert "batch 2, SGD with momentum 0.9" in out
    monkeypatch.setenv("STATICMEM_BATCH", "3")
    out, _ = said(capsys, "analyze", "--config", "c.yaml", "-q", "--optimizer", "adam")
    assert "batch 3, Adam" in out
    out, _ = said(capsys, "analyze", "--config", "c.yaml", "-q", "--batch", "4", "--mode", "infer")
    assert "inference of seed.pt2, batch 4" in out
    monkeypatch.setenv("STATICMEM_CONFIG", "c.yaml")
    out, err = said(capsys, "analyze")
    assert "batch 3, SGD" in out
    assert err == "Using c.yaml\n"


def test_sweep_formats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["sweep", SEED, "--no-config", "--what-if", "batch=1,2,3", "--what-if", "optimizer=none,adam"]
    out, err = said(capsys, *words)
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("6 configurations, live peaks from ")
    assert lines[2].split() == ["#", "batch", "optimizer", "live", "phase"]
    assert len(lines) == 2 + 1 + 6
    out, _ = said(capsys, *words, "-f", "csv")
    table = list(csv.DictReader(io.StringIO(out)))
    assert [row["batch"] for row in table] == ["1", "1", "2", "2", "3", "3"]
    out, _ = said(capsys, *words, "-f", "json")
    document = json.loads(out)
    jsonschema.validate(document, schema("sweep"))
    assert [row["live_bytes"] for row in document["rows"]] == [int(row["live_bytes"]) for row in table]
    alone, _ = said(capsys, "analyze", SEED, "--no-config", "--batch", "3", "--optimizer", "adam", "-f", "json")
    assert document["rows"][-1]["live_bytes"] == json.loads(alone)["peak"]["live_bytes"]
    target = tmp_path / "sweep.csv"
    out, err = said(capsys, *words, "-o", str(target))
    assert (out, err) == ("", f"Wrote {target}\n")
    assert len(target.read_text().splitlines()) == 7
    said(capsys, *words, "-o", str(target), code=2)
    out, _ = said(capsys, *words, "-q")
    assert len(out.splitlines()) == 1


def test_sweep_with_cards(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", SEED, "--no-config", "--what-if", "batch=1,64", "-j", "1"]
    out, _ = said(capsys, *words, "--gpu", "1340MiB", "--gpu", "l4")
    last = out.split("\n\n")[0].replace("\n", " ")
    assert last.startswith("2 configurations; none fits 1340mib, 1 is tight (the upper estimate is the whole card); ")
    assert "1 fits l4" in last or "2 fit l4" in last
    out, _ = said(capsys, *words, "--gpu", "2GiB", "--meter", "live")
    assert "may fit" in out
    out, err = said(capsys, *words, "--gpu", "2GiB", "--max-batch")
    assert "sizes of batch are not used: --max-batch looks for it [SM302]" in err
    assert "max batch" in out.split("\n\n")[1].splitlines()[0]
    _, err = said(capsys, *words, "--max-batch", code=2)
    assert "needs a GPU" in err


def test_sweep_failures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, err = said(capsys, "sweep", str(tmp_path / "no.pt2"), "--no-config", "--what-if", "batch=1,2", code=2)
    assert out == ""
    assert "does not exist" in err
    words = ["sweep", SEED, "--no-config", "--optimizer-impl", "fused", "--what-if", "optimizer=adam,rmsprop"]
    out, err = said(capsys, *words)
    assert err == "warning: 1 of 2 configurations could not be analysed\n"
    assert "rmsprop has no fused implementation" in out
    (tmp_path / "c.yaml").write_text("version: 1\n")
    _, err = said(capsys, "sweep", str(tmp_path / "c.yaml"), code=2)
    assert "no model to analyse" in err
    _, err = said(capsys, "sweep", str(tmp_path / "c.yaml"), "--config", "d.yaml", code=2)
    assert "two configs" in err


def test_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", SEED, "--no-config", "--optimizer", "adam", "--max-batch"]
    out, _ = said(capsys, *words, "--gpu", "3GiB", "-f", "json")
    report = json.loads(out)
    found = report["max_batch"]
    assert report["scenario"]["batch"] == found["batch"] > 0
    assert report["peak"]["device_bytes"] == found["device_bytes"] <= 3 << 30 < found["next_device_bytes"]
    out, _ = said(capsys, *words, "--gpu", "3GiB", "--batch", "1", "-q")
    assert f"The largest batch that fits is {found['batch']} (" in out
    assert "batch 1," in out
    out, _ = said(capsys, *words, "--gpu", "64MiB", "-q")
    assert "No batch fits." in out
    _, err = said(capsys, *words, code=2)
    assert err.splitlines()[0] == "error: --max-batch needs a GPU [SM199]"


@pytest.mark.parametrize("kind", ["report", "config", "sweep"])
def test_schema(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, "schema", kind)
    assert out == (files.ROOT / "schemas" / f"{kind}-1.schema.json").read_text(encoding="utf-8")


def test_schema_of_what(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = said(capsys, "schema", "configs", code=2)
    assert "Did you mean 'config'?" in err


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_waits_and_goes_away() -> None:
    screen = Screen()
    with Progress("configurations", stream=screen) as bar:
        bar.update(1, 4)
        assert screen.getvalue() == ""
        assert bar.first is not None
        bar.start, bar.first = bar.start - 60, (bar.first[0] - 1.2, 1)
        bar.update(2, 4)
        assert screen.getvalue() == f"\r\x1b[2Kconfigurations [{'#' * 15}{'.' * 15}] 2 of 4, about 3 s left"
    assert screen.getvalue().endswith("\r\x1b[2K")
    for quiet, stream in ((True, Screen()), (False, io.StringIO())):
        with Progress("x", quiet, stream=stream) as bar:
            bar.start -= 1
            bar.update(1, 2)
        assert stream.getvalue() == ""


def test_progress_says_what_is_done_where_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staticmem.cli.output.TICK", 0.01)
    screen, silent = Screen(), io.StringIO()
    with Progress("levers", doing="reading a\x1b[31mfile", stream=screen) as bar, Progress("x", stream=silent):
        _wait_for(screen, "reading a")
        assert "\x1b[31m" not in screen.getvalue()
        bar.start -= 60
        bar.update(1, 4)
        _wait_for(screen, "levers [")
        bar.begin("the page", "pages")
        _wait_for(screen, "the page, 60 s")
        bar.update(1, 2, "L4: fits")
        assert "\r\x1b[2KL4: fits\n\r\x1b[2Kpages [" in screen.getvalue()
    drawn = screen.getvalue()
    assert drawn.endswith("\r\x1b[2K")
    time.sleep(0.05)
    assert screen.getvalue() == drawn
    assert silent.getvalue() == ""


def _wait_for(screen: Screen, text: str) -> None:
    end = time.monotonic() + 20
    while text not in screen.getvalue():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_check_that_cannot_be_made_is_an_error_with_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", SEED, "--no-config", "--budget", "live=1GiB", "--batch", "1", "--dim", "nobody=3"]
    out, err = said(capsys, *words, code=2)
    assert out.splitlines()[0] == "1 of 1 budget could not be checked."
    assert err.splitlines()[0] == "error: 1 configuration could not be analysed [SM111]"
    assert "unknown dimension 'nobody'" in err.splitlines()[1]
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize("size", ["40", "4096", "1000000"])
def test_a_limit_without_a_unit(
    size: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`limit: 40` is not 40 bytes."""
    _, err = said(capsys, "check", SEED, "--no-config", "--budget", f"live={size}", code=2)
    assert "a size with a unit" in err
    monkeypatch.chdir(tmp_path)
    Path("staticmem.yaml").write_text(f"version: 1\nbudgets:\n  - {{metric: live, limit: {size}}}\n")
    _, err = said(capsys, "check", SEED, code=2)
    assert "staticmem.yaml:3:" in err
    assert "It is a size with a unit" in err
    Path("staticmem.yaml").write_text("version: 1\nbudgets: [{metric: live, limit: 40 B}]\n")
    said(capsys, "check", SEED, code=1)


@pytest.mark.parametrize("verb", ["check", "sweep", "levers", "fit", "size"])
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--optimizer sgd --amsgrad", 2, "--amsgrad"),
        ("--optimizer sgd --checkpoint-every 2", 2, "--checkpoint-every needs --checkpoint"),
        ("--optimizer sgd --dampening 0.1", 0, "--dampening is not used"),
        ("--optimizer adam --method textbook", 0, "--method textbook is not used"),
        ("--optimizer sgd --inplace-activations all", 0, "--inplace-activations is not used"),
        ("--optimizer sgd --sdpa math", 0, "--sdpa is not used: the model has no fused attention"),
    ],
)
def test_flags_without_effect_are_errors_or_said(
    verb: str, flags: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `analyze` has them, whether the request alone or the graph tells."""
    own = {"check": ["--budget", "live=9GiB"], "sweep": ["-j", "1"], "levers": [], "size": ["--gpu", "l4"]}
    more = own.get(verb, ["--gpu", "l4", "--batch", "1"])
    assert main([verb, SEED, "--no-config", *flags.split(), *more]) == code
    assert says in " ".join("".join(capsys.readouterr()).split())


def test_a_flag_of_an_optimizer_that_no_configuration_has(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", SEED, "--no-config", "--amsgrad", "-j", "1", "--what-if"]
    assert main([*words, "optimizer=sgd,rmsprop"]) == 0
    assert "--amsgrad is not used: it is of adam and adamw" in capsys.readouterr().err
    assert main([*words, "optimizer=sgd,adam"]) == 0
    assert capsys.readouterr().err == ""


def test_init_of_a_model_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, err = said(capsys, "init", "nope.pt2", code=2)
    assert "nope.pt2 does not exist [SM101]" in err
    assert list(tmp_path.iterdir()) == []


def test_the_progress_of_a_sizing_counts_its_cards() -> None:
    from staticmem.devices import gpus
    from staticmem.scenario.request import Request
    from staticmem.studies import Study
    from staticmem.studies.sizing import Options
    from staticmem.studies.sizing import size as sizing

    seen: list[tuple[int, int]] = []
    cards = [gpus.find(name) for name in ("l4", "t4")]

    def told(done: int, total: int, row: object = None) -> None:
        seen.append((done, total))

    report = sizing(Study.open(SEED, Request()), Options(cards, progress=told))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert len(report.cards) == 2


def test_check_fails_where_the_card_cannot_run_or_hold_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the limit; what failed comes first, and a condition is said of what passes."""
    cards = ["--gpu", "v100", "--gpu", "100MiB", "--gpu", "gtx-1080-ti"]
    words = ["check", SEED, "--no-config", "--batch", "1", *cards, "--compile", "--budget", "device=900GiB", "-j", "1"]
    assert main([*words, "-f", "json"]) == 1
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    stands = {one["gpu"]: (one["fit"], one["passed"]) for one in outcomes}
    assert stands == {
        "gtx-1080-ti": ("cannot run it", False), "100mib": ("does not fit", False), "v100-16gb": ("fits", True),
    }  # fmt: skip
    assert [one["passed"] for one in outcomes] == [False, False, True]
    assert "wheel for CUDA 12.6" in outcomes[-1]["condition"]
    assert main(words) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("2 of 3 budgets not kept")
    assert "gtx-1080-ti: cannot run it, torch.compile writes kernels in Triton" in said
    live = [
        "check",
        SEED,
        "--no-config",
        "--batch",
        "1",
        "--gpu",
        "gtx-1080-ti",
        "--compile",
        "--budget",
        "live=900GiB",
    ]
    assert main([*live, "-q", "-j", "1"]) == 1  # with budgets of live memory alone too
    assert main([*words, "-f", "github"]) == 1
    assert "the GPU: cannot run it" in capsys.readouterr().out
