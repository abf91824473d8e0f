"""`staticmem explain-oom`: messages and snapshots as numbers, and the cause that their figures bear out."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from staticmem.cli.main import main
from staticmem.errors import UsageError
from staticmem.scenario.request import Request
from staticmem.studies import Study
from staticmem.units import GIB, MIB
from staticmem.validate import explain_oom
from staticmem.validate.explain_oom import CONTRADICTED, FORESEEN, LIMIT, OPEN, OTHERS, Explanation, explain

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "seed.pt2"
# the texts of c10/cuda/CUDACachingAllocator.cpp, put together here
NOW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 392.00 MiB. GPU 0 has a total capacity of 22.04 GiB "
    "of which 201.12 MiB is free. Process 71 has 1.50 GiB memory in use. Process 72 has 512.00 MiB memory in use. "
    "Including non-PyTorch memory, this process has 19.83 GiB memory in use. 20.00 GiB allowed; Of the allocated "
    "memory 19.09 GiB is allocated by PyTorch, and 470.50 MiB is reserved by PyTorch but unallocated."
)
BEFORE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 23.70 GiB total capacity; 21.50 GiB already "
    "allocated; 1.69 MiB free; 21.75 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory"
)


def test_the_message_of_today() -> None:
    error = explain_oom.of_message(NOW)
    assert error is not None
    assert (error.tried, error.allocated) == (392 * MIB, int(19.09 * GIB))
    assert error.reserved == error.allocated + int(470.5 * MIB)
    assert (error.total, error.free) == (int(22.04 * GIB), int(201.12 * MIB))
    assert (error.in_use, error.others, error.allowed) == (int(19.83 * GIB), 2 * GIB, 20 * GIB)


def test_the_message_of_pytorch_1() -> None:
    error = explain_oom.of_message(BEFORE)
    assert error is not None
    assert (error.tried, error.allocated, error.reserved) == (2 * MIB, int(21.5 * GIB), int(21.75 * GIB))
    assert (error.total, error.in_use, error.others, error.allowed) == (int(23.7 * GIB), None, 0, None)


def test_the_last_error_of_a_log_counts(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(f"step 1\n{NOW}\n\xff retrying\n{BEFORE}\n".encode("latin-1"))
    assert explain_oom.read(str(log)).tried == 2 * MIB


@pytest.mark.parametrize("text", ["all is well", "CUDA out of memory. Tried to allocate more than 1EB memory.", ""])
def test_logs_without_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(text)
    with pytest.raises(UsageError, match="no out-of-memory error") as error:
        explain_oom.read(str(tmp_path / "train.log"))
    assert error.value.code == "SM239"


def snapshot(tmp_path: Path, last: dict[str, object]) -> str:
    events: list[dict[str, object]] = [
        {"action": "segment_alloc", "addr": 0, "size": 20 * MIB, "stream": 0},
        {"action": "alloc", "addr": 0, "size": 3 * MIB, "stream": 0},
        last,
    ]
    block = {"size": 3 * MIB, "requested_size": 3 * MIB, "state": "active_allocated", "address": 0}
    segment = {"device": 0, "address": 0, "total_size": 20 * MIB, "blocks": [block]}
    (tmp_path / "oom.pickle").write_bytes(pickle.dumps({"device_traces": [events], "segments": [segment]}))
    return str(tmp_path / "oom.pickle")


def test_a_snapshot(tmp_path: Path) -> None:
    error = explain_oom.read(
        snapshot(tmp_path, {"action": "oom", "addr": 0, "size": 7 * MIB, "device_free": 5, "stream": 0})
    )
    assert (error.tried, error.allocated, error.reserved) == (7 * MIB, 3 * MIB, 20 * MIB)
    assert (error.total, error.free) == (None, 5)


def test_a_snapshot_of_another_moment(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no 'oom'") as error:
        explain_oom.read(snapshot(tmp_path, {"action": "snapshot", "addr": 0, "size": 0, "stream": 0}))
    assert error.value.code == "SM239"


# -- causes ------------------------------------------------------------------------------------------------------------


def explained(batch: int, card: str | None = "l4", **known: Any) -> Explanation:
    error = explain_oom.Crash(MIB, 100 * MIB, 120 * MIB, None, 0, None, 0, None, 0)
    request = Request(batch=batch, optimizer="adam", loss="mean", gpu=card)
    return explain(replace(error, **known), Study.open(str(MODEL), request))


def test_a_step_that_was_predicted_not_to_fit_was_foreseen() -> None:
    result = explained(64)
    assert (result.cause, result.meter) == (FORESEEN, "")
    assert max(row.high for row in result.rows) > 22 * GIB
    assert result.flags
    assert result.change_bytes is not None
    assert result.change_bytes < 0.95 * result.room_bytes


def test_more_than_the_step_allocates_contradicts_the_prediction() -> None:
    at_most = explained(2).rows[0].high
    assert explained(2, allocated=at_most - MIB).cause == OPEN
    result = explained(2, allocated=at_most)
    assert (result.cause, result.meter, result.flags) == (CONTRADICTED, "allocated", "")


def test_memory_of_others_and_limits() -> None:
    high = max(row.high for row in explained(2).rows)
    result = explained(2, others=22 * GIB - high)
    assert (result.cause, 0.95 * result.room_bytes < high) == (OTHERS, True)
    assert explained(2, allowed=high).cause == LIMIT
    assert explained(2, allowed=2 * high).cause == OPEN


@pytest.mark.parametrize(("meter", "field"), [("reserved", "reserved"), ("device", "in_use")])
def test_fragmentation_and_libraries(meter: str, field: str) -> None:
    result = explained(2, "l4", **{field: 20 * GIB})
    assert (result.cause, result.meter) == (CONTRADICTED, meter)


def test_the_card_follows_from_its_memory() -> None:
    assert explained(2, None, total=round(9.78 * GIB)).gpu == "GeForce RTX 3080 10 GB"
    for total, names in (
        (3 * GIB, "none of the catalog"),
        (round(23.64 * GIB), "Cards with 23.64 GiB are "),
        (round(14.56 * GIB), "Cards with 14.56 GiB are a16, a2, t4"),
        (None, "does not name it"),
    ):
        with pytest.raises(UsageError) as error:
            explained(2, None, total=total)
        assert (error.value.code, names in str(error.value.why)) == ("SM238", True)


# -- as a user types it ------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(NOW)
    command = ["explain-oom", str(tmp_path / "train.log"), str(MODEL), "--no-config", "--batch", "2", "--gpu", "l4"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("The process held tensors that are not of this step: 19.5 GiB ")
    assert "At the crash: 392 MiB more were asked for" in out
    assert main([*command, "-q"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main([*command, "-f", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "contradicted"
    assert main(["explain-oom", str(tmp_path / "none.log"), str(MODEL)]) == 2
    assert "cannot read" in capsys.readouterr().err
