"""Which variables are worth letting go of: the peak that is promised is that of the code which does so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from test_holders import document_of  # noqa: E402

import staticmem  # noqa: E402
from staticmem.errors import UsageError  # noqa: E402
from staticmem.frontends.recorded import RecordedModel  # noqa: E402
from staticmem.recording.record import record  # noqa: E402
from staticmem.report.formats.report import render  # noqa: E402
from staticmem.report.text import View  # noqa: E402
from staticmem.scenario.request import request_of  # noqa: E402
from staticmem.studies import let_go  # noqa: E402
from staticmem.studies.levers import levers  # noqa: E402
from staticmem.studies.owners import with_owners  # noqa: E402
from staticmem.studies.study import Study  # noqa: E402

pytestmark = pytest.mark.torch
BLOCKS = Path(__file__).parents[1] / "data" / "graphs" / "mlp_blocks.pt2"


def study(document: Any, **options: Any) -> Study:
    return Study(RecordedModel("<m>", document, "pt2"), request_of(options))


@pytest.mark.parametrize(("name", "does"), [
    ("UNet", "del conv3 after line"),
    ("Listed", "let go of items of skips in line"),
    ("Attention", "del k, q after line"),
])  # fmt: skip
def test_the_promised_peak_is_that_of_code_which_lets_go(name: str, does: str) -> None:
    as_written = study(document_of(name))
    freed = study(document_of(f"{name}Freed")).lifetimes.peak_bytes
    rows = let_go.worth_letting_go(as_written)
    assert rows[0].live_bytes == freed < as_written.lifetimes.peak_bytes == freed + rows[0].saved_bytes
    assert rows[0].does.startswith(does)
    asked = rows[0].flags.replace("--let-go ", "").split()
    assert study(document_of(name), let_go=asked).lifetimes.peak_bytes == freed
    assert not let_go.worth_letting_go(study(document_of(name), let_go="all"))
    assert rows[0].does in {row.does for row in levers(as_written).rows}


def test_what_autograd_holds_anyway_is_not_told() -> None:
    assert not let_go.worth_letting_go(study(document_of("UNet"), optimizer="sgd", loss="mean"))


def test_few_are_tried_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(let_go, "MOST", 1)
    rows = let_go.worth_letting_go(study(document_of("Attention")))
    assert [row.note for row in rows] == ["the largest 1 of 2 were tried"]


class Turns(torch.nn.Module):  # type: ignore[misc]
    """What it holds from one turn of its loop to the next, and from one call to the next."""

    state: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)])
        self.register_buffer("state", torch.zeros(8, 64), persistent=False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            wide = torch.cat([x] * 64, 1)
            x = layer(x) + wide[:, :64] + self.state
        self.state = x * 2
        return torch.cat([x] * 80, 1)


def test_loops_and_what_the_next_call_reads() -> None:
    document = record(Turns(), (torch.zeros(8, 64),))
    rows = let_go.worth_letting_go(study(document, batch=8, outputs="dropped"))
    line = Turns.forward.__code__.co_firstlineno + 3
    assert [row.does for row in rows] == [f"wide = None after line {line} of test_let_go.py"]
    with pytest.raises(UsageError, match=r"no variable 'self\.state'"):
        _ = study(document, batch=8, let_go="self.state").lifetimes


@pytest.mark.parametrize(("options", "what"), [
    ({"let_go": "conv4"}, "Did you mean 'conv"), ({"let_go": "conv3", "compile": True}, "cannot be combined"),
])  # fmt: skip
def test_names_that_hold_nothing_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as refused:
        _ = study(document_of("UNet"), **options).lifetimes
    assert refused.value.code == "SM287"


def test_a_graph_alone_does_not_know_its_variables() -> None:
    with pytest.raises(UsageError, match="needs a recording"):
        staticmem.analyze(BLOCKS, batch=4, let_go="x")
    report = staticmem.analyze(BLOCKS, batch=4, explain_peak=True)
    assert [note.code for note in report.notes].count("SM288") == 1


class Leaf(torch.nn.Module):  # type: ignore[misc]
    """A frozen part with the peak of the step, whose result is made a leaf: the graph of the loss has that, and its
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)
        self.stem.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        x = torch.cat([x] * 16, 1)[:, :256] + x
        return self.head(torch.tanh(x.requires_grad_()))


@pytest.mark.parametrize(("module", "does", "flags", "saved"), [
    # Adam's temporaries are larger
    (torch.nn.Linear(2048, 256), "del x, target before backward()", "--let-go batch@loop", 64 * 2048 * 4 + 512),
    (Leaf(), "del loss, outputs after backward()", "--let-go loss@loop", 2 * 64 * 256 * 4 + 512 + 64 * 8 * 4),
])  # fmt: skip
def test_variables_of_the_loop(module: Any, does: str, flags: str, saved: int) -> None:
    x = torch.zeros(64, 2048 if isinstance(module, torch.nn.Linear) else 64)
    rows = let_go.worth_letting_go(study(record(module, (x,)), batch=64, optimizer="adam"))
    assert [(row.does, row.flags, row.saved_bytes) for row in rows] == [(does.replace("x,", "input,"), flags, saved)]


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"let_go": "loss@loop"}])
def test_leaves_end_with_the_graph_of_their_loss(options: dict[str, Any]) -> None:
    """Those of a micro-batch when the next has its loss, those of a loss that the loop deletes right away."""
    trace = study(record(Leaf(), (torch.zeros(64, 64),)), batch=64, optimizer="adam", **options).lifetimes.trace
    *_, end = [start for name, start in trace.phases if name in ("backward", "optimizer")]
    *_, last = [start for name, start in trace.phases if name == "forward"]
    first = last if "accumulate" in options else end
    made = [b for b in trace.buffers if b.category == "activation" and b.born < first and b.nbytes == 64 * 256 * 4]
    assert made
    assert all(b.died is not None and b.died < end for b in made)


def test_a_graph_alone_knows_the_variables_of_its_loop() -> None:
    with pytest.raises(UsageError, match="needs a recording"):
        staticmem.analyze(BLOCKS, batch=4, optimizer="adam", let_go=("loss@loop", "x"))
    assert staticmem.analyze(BLOCKS, batch=4, optimizer="adam", let_go="batch@loop").peak.live_bytes
    with pytest.raises(UsageError, match="--let-go NAME@loop needs training"):
        staticmem.analyze(BLOCKS, batch=4, let_go="batch@loop")


def test_reports_have_the_lines_to_write() -> None:
    one = study(document_of("Listed"))
    report = with_owners(one, one.report)
    assert f"{report.let_go[0].does}: the peak falls by 448 KiB" in render(report, View(explain=True)).replace(
        "\n    ", " "
    )
