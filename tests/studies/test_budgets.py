"""`staticmem check`: outcomes by derivation from the reports, exit codes, formats."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from staticmem import analyze
from staticmem.cli.main import main
from staticmem.config.config import Budget
from staticmem.report.formats import check as check_text
from staticmem.report.markdown import escape
from staticmem.report.sweep import Check, ErrorInfo, Outcome
from staticmem.studies.budgets import check
from staticmem.studies.sweep import sweep

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "resnet18.pt2"


@pytest.fixture(scope="module")
def peak() -> int:
    return analyze(MODEL, batch=4, optimizer="adam").peak.live_bytes


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["check", *words])
    return code, capsys.readouterr().out


WORDS = (str(MODEL), "--no-config", "--batch", "4", "--optimizer", "adam")


@pytest.mark.parametrize(("over", "code"), [(0, 0), (-1, 1), (1, 0)])
def test_a_limit_is_the_most_that_is_allowed(
    peak: int, over: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, *WORDS, "--budget", f"live={peak + over}")[0] == code
    assert run(capsys, *WORDS, "--budget", f"live={peak + over}", "--exit-zero")[0] == 0


def test_outcomes_are_those_of_the_reports() -> None:
    budgets = [Budget("live", 10**9), Budget("device", 10**9, "warning"), Budget("reserved", 10**12)]
    found = check(sweep(MODEL, {"batch": [1, 4]}, gpus=["l4", "t4"], optimizer="adam"), budgets)
    assert len(found.outcomes) == 2 * (1 + 2 + 2)
    for o in found.outcomes:
        batch = int(o.configuration.partition("batch=")[2].partition(",")[0])
        report = analyze(MODEL, batch=batch, optimizer="adam", gpu=o.gpu)
        assert o.bytes == getattr(report.peak, f"{o.metric}_bytes")
        assert o.bytes is not None
        assert o.margin_bytes == o.limit_bytes - o.bytes
        assert o.passed == (o.bytes <= o.limit_bytes)
    assert not found.failed  # what is exceeded is a warning


@pytest.mark.parametrize(
    ("gpu", "code", "words"), [("l4", 0, ""), ("400MiB", 1, "does not fit"), ("no-such-card", 2, "")]
)
def test_without_a_budget_the_gpu_is_the_limit(
    gpu: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, text = run(capsys, *WORDS, "--gpu", gpu)
    assert found == code
    assert words in text


@pytest.mark.parametrize(("batch", "gpu"), [(32, "v100-16gb"), (64, "2900MiB"), (64, "2700MiB")])
def test_a_budget_of_live_memory_has_the_verdict_on_a_card_that_is_named(
    batch: int, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a condition, tight, and too small by what the allocator holds beside live memory."""
    words = (str(MODEL), "--no-config", "--batch", str(batch), "--optimizer", "adam", "--gpu", gpu)
    report = analyze(MODEL, batch=batch, optimizer="adam", gpu=gpu)
    assert report.gpu is not None
    code, out = run(capsys, *words, "--budget", "live=1TiB", "-f", "json")
    (outcome,) = json.loads(out)["outcomes"]
    said = report.gpu
    assert (outcome["fit"], outcome["why"], outcome["condition"]) == (said.fit, said.why, said.condition)
    assert (outcome["passed"], code) == ((True, 0) if said.fit != "does not fit" else (False, 1))
    assert outcome["gpu"] is not None
    assert run(capsys, *words[:-2], "--budget", "live=1TiB")[0] == 0


def config(tmp_path: Path, **more: object) -> str:
    path = tmp_path / "ci.yaml"
    document = {"version": 1, "model": str(MODEL), "train": {"optimizer": "adam", "batch": 4}, **more}
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_levels_and_scenarios_of_a_config(tmp_path: Path, peak: int, capsys: pytest.CaptureFixture[str]) -> None:
    mild = config(tmp_path, budgets=[{"metric": "live", "limit": "1 MiB", "level": "warning"}])
    code, out = run(capsys, mild)
    assert code == 0
    assert "warn" in out
    scenarios = [{"name": "small", "batch": 1}, {"name": "large", "batch": 64}]
    both = config(tmp_path, scenarios=scenarios, budgets=[{"metric": "live", "limit": f"{peak} B"}])
    code, out = run(capsys, both, "-f", "json")
    assert code == 1
    assert [(o["configuration"], o["passed"]) for o in json.loads(out)["outcomes"]] == [
        ("large", False),
        ("small", True),
    ]
    assert run(capsys, both, "-q")[1].startswith("1 of 2 budgets exceeded, by ")


def test_what_cannot_be_analysed_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenarios = [{"name": "good"}, {"name": "bad", "resolution": 32, "dims": {"none": 3}}]
    path = config(tmp_path, scenarios=scenarios, budgets=[{"metric": "live", "limit": "100 GiB"}])
    code, out = run(capsys, path)
    assert code == 2
    assert "could not be checked" in out


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([*WORDS], [*WORDS, "--budget", "live"], [*WORDS, "--budget", "life=1GiB"], [config(tmp_path)]):
        assert main(["check", *words]) == 2
        assert "[SM210]" in capsys.readouterr().err


def made(*outcomes: tuple[str, int | None, str]) -> Check:
    limit = 2**30
    error = ErrorInfo("SM1", "what", "why", "hint")
    rows = []
    for name, n, level in outcomes:
        margin = None if n is None else limit - n
        kept = margin is not None and margin >= 0
        rows.append(Outcome(name, "m.pt2", None, "live", level, limit, n, margin, kept, error if n is None else None))
    return Check("s", any(not o.passed for o in rows), any(o.error for o in rows), tuple(rows))


HOSTILE = "a\n::error::pwned|<x>%0A`b`\x1b[31m"


def test_annotations_are_one_line_each() -> None:
    found = made(
        *[(HOSTILE, 2**30 + i, "error") for i in range(1, 15)], ("mild", 2**31, "warning"), ("none", None, "error")
    )
    lines = check_text.render_github(found).splitlines()
    assert len(lines) == check_text.ANNOTATIONS + 2
    assert lines[0].startswith("::error title=GPU memory%3A live::m.pt2: none: what: why")
    assert sum(line.startswith("::") for line in lines) == check_text.ANNOTATIONS
    assert "and 6 more" in lines


def test_junit_counts() -> None:
    found = made(("fine", 1, "error"), (HOSTILE, 2**31, "error"), ("mild", 2**31, "warning"), ("none", None, "error"))
    suite = ElementTree.fromstring(check_text.render_junit(found))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "1")
    assert [case.find("failure") is not None for case in suite] == [False, True, False, False]


def test_markdown_begins_with_the_headline() -> None:
    found = made(("fine", 1, "error"), (HOSTILE, 2**31, "error"))
    text = check_text.render_markdown(found)
    assert text.startswith(f"**{escape(check_text.headline(found))}**")
    assert "\x1b" not in text
    assert all(line.replace("\\|", "").count("|") == 7 for line in text.splitlines() if line.startswith("|"))


def test_headlines() -> None:
    assert check_text.headline(made(("a", 2**29, "error"))) == "1 budget kept; the tightest leaves 512 MiB."
    over = made(("a", 2**31, "error"), ("b", 1, "error"), ("c", 3 * 2**30, "warning"))
    assert check_text.headline(over) == "2 of 3 budgets exceeded (1 of them warnings), the worst by 2.00 GiB."


def test_what_nobody_said_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, str(MODEL), "--budget", "device=60GiB")
    assert code == 0
    lines = [line.strip() for line in out.splitlines() if "assumed:" in line]
    assert lines == [
        "assumed: batch 1: none is given (--batch)",
        "assumed: h100-sxm-80gb: no GPU is named (--gpu)",
        "assumed: inference: no optimizer is named (--optimizer)",
    ]
    named = ("--batch", "2", "--gpu", "l4", "--optimizer", "adam", "--budget", "device=60GiB")
    assert "assumed:" not in run(capsys, str(MODEL), *named)[1]


def test_a_kept_budget_that_the_upper_estimate_exceeds_is_said() -> None:
    limit = 2**30
    kept = Outcome(
        "a", "m.pt2", "l4", "device", "error", limit, limit - 1, 1, True, None, "fits", "", "", 0, limit + 2**29
    )
    text = check_text.render(Check("s", False, False, (kept,)))
    assert "l4: the upper estimate is 512 MiB above 1.00 GiB" in text


def test_the_action_and_the_hook_run_check() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    steps = " ".join(step["run"] for step in action["runs"]["steps"] if "run" in step)
    assert "${{" not in steps  # inputs reach the shell as variables, never as text of the script
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    for line in [*steps.splitlines(), *(hook["entry"] for hook in hooks)]:
        words = line.split()
        if words[:1] == ["staticmem"]:
            assert words[1] == "check"
