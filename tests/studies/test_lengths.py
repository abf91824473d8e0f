"""Batches of many lengths: how they are drawn, and that steps which were not run are those that would have run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import staticmem
from staticmem.allocators.band import Replays
from staticmem.allocators.from_trace import Builder
from staticmem.config.config import of_node
from staticmem.devices.kernels import KernelWorkspaces
from staticmem.documents import of_plain
from staticmem.errors import StaticmemError, UsageError
from staticmem.report.run import LengthsInfo, RunReport
from staticmem.studies import Request, Study
from staticmem.studies import plan as plans
from staticmem.studies.largest_lengths import Replayed, search
from staticmem.studies.lengths import Lengths, Shape, ShapedBuilders
from staticmem.studies.plan import study_of_config

ROOT = Path(__file__).parents[2]


def test_batches_are_padded_to_their_longest_in_buckets_and_the_longest_of_the_data_comes_last() -> None:
    shapes = Lengths("uniform(10, 99)", bucket=16, seed=3).shapes(50, 4)
    assert len(shapes) == 52
    assert {batch for batch, _ in shapes} == {4}
    assert all(length % 16 == 0 for _, length in shapes)
    assert shapes[-1] == (4, 112)  # 98 or 99, rounded up
    assert max(length for _, length in shapes) == 112


def test_a_budget_of_tokens_holds_with_padding() -> None:
    shapes = Lengths("normal(300, 100)", rule="tokens", tokens=4096, most=1024).shapes(200, 1)
    assert all(batch * length <= 4096 for batch, length in shapes)
    assert len({batch for batch, _ in shapes}) > 3
    assert shapes[-1] == (4, 1024)


def test_the_chance_of_the_longest_batch(tmp_path: Path) -> None:
    def chance(lengths: Lengths, steps: int, batch: int) -> float:
        return lengths.chance_of_longest(lengths.shapes(steps, batch))

    (tmp_path / "lengths.txt").write_text("\n".join(map(str, range(1, 101))))
    of_file = Lengths(str(tmp_path / "lengths.txt"))
    assert chance(of_file, 10, 5) == pytest.approx(0.5)  # 50 of 100 samples, of which one is the longest
    assert chance(Lengths(of_file.source, bucket=50), 1, 2) == pytest.approx(1 - 50 * 49 / (100 * 99))
    assert chance(of_file, 20, 5) == 1.0
    assert chance(Lengths("normal(512, 256)", most=1024), 1, 1) == pytest.approx(0.02275, abs=1e-5)  # two deviations
    assert chance(Lengths("lognormal(0, 1)", most=10), 1, 2) == pytest.approx(1 - (1 - 0.010651) ** 2, abs=1e-5)
    assert chance(Lengths("uniform(0, 100)", most=90), 3, 2) == pytest.approx(1 - 0.9**6)
    assert chance(Lengths("uniform(1, 9)", rule="packed", most=64), 1, 1) == 1.0


def test_sorted_batches_have_less_padding() -> None:
    def padded(rule: str) -> int:
        return sum(length for _, length in Lengths("uniform(1, 1000)", rule=rule).shapes(500, 16))

    assert padded("sorted") < 0.6 * padded("padded")


def test_packed_rows_have_one_length() -> None:
    assert set(Lengths("uniform(1, 10)", rule="packed", most=512).shapes(5, 2)) == {(2, 512)}


FILES = {
    "lengths.txt": ("3\n9\n4\n", ""),
    "lengths.csv": ("name,n\na,3\nb,9\nc,4\n", "n"),
    "lengths.jsonl": ('{"n": 3}\n{"n": 9}\n\n{"n": 4}\n', "n"),
}


@pytest.mark.parametrize("name", FILES)
def test_lengths_of_a_file(name: str, tmp_path: Path) -> None:
    text, column = FILES[name]
    (tmp_path / name).write_text(text)
    shapes = Lengths(str(tmp_path / name), column=column).shapes(3, 1)
    assert sorted(length for _, length in shapes[:3]) == [3, 4, 9]
    assert shapes[3:] == [(1, 9)] * 2


BAD = {"a.csv": "n\nx\n", "b.csv": "m\n1\n", "c.jsonl": "[1]\n", "d.txt": "0\n", "e.txt": "", "f.jsonl": "{" * 50}


@pytest.mark.parametrize("name", BAD)
def test_files_without_lengths_are_errors(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(BAD[name])
    with pytest.raises(UsageError) as caught:
        Lengths(str(tmp_path / name), column="n").shapes(1, 1)
    assert caught.value.code == "SM443"
    assert caught.value.hint


def test_a_source_that_is_neither_says_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"'normal.5' is neither a distribution nor a file") as caught:
        Lengths("normal(5", most=9).shapes(1, 1)
    assert "normal(mean, deviation)" in caught.value.why


@pytest.mark.parametrize(
    "wrong",
    [{"source": "normal(5, 1)"}, {"source": "nowhere.csv"}, {"source": "uniform(1, 9)", "rule": "tokens"}],
    ids=str,
)
def test_what_is_missing_is_an_error(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        Lengths(**wrong).shapes(1, 1)  # type: ignore[arg-type]
    assert caught.value.code == "SM443"


def attention(path: Path) -> str:
    """Products of a sequence with itself, whose scores grow with the square of the length."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], "transpose", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["s"], "scores"),
        helper.make_node("Softmax", ["s"], ["p"], "softmax", axis=-1),
        helper.make_node("MatMul", ["p", "x"], ["h"], "mix"),
        helper.make_node("MatMul", ["h", "w"], ["y"], "out"),
    ]
    sizes: list[int | str] = ["batch", "seq", 64]
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes)],
        [helper.make_tensor("w", TensorProto.FLOAT, [64, 64], [0.0] * 4096)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return str(path)


def builder_of(study: Study) -> Builder:
    trace = study.result.trace
    return Builder(trace, KernelWorkspaces(trace, study.device.setup))


def test_steps_between_those_that_were_run_have_their_bytes(tmp_path: Path) -> None:
    opened = Study.open(attention(tmp_path / "attention.onnx"), Request(batch=2, dims={"seq": 8}, optimizer="sgd"))
    ran: list[Shape] = []

    def make(shape: Shape) -> Builder:
        ran.append(shape)
        return builder_of(opened.ask(Request(batch=shape[0], dims={"seq": shape[1]}, optimizer="sgd")))

    shapes = Lengths("uniform(16, 1200)", rule="tokens", tokens=4800).shapes(300, 1)
    builders = ShapedBuilders(make, shapes)
    assert not builders.rounds_up
    assert len(ran) < 30 < builders.count
    others = sorted(set(shapes) - set(ran))
    for shape in others[:: len(others) // 8]:
        assert list(builders.at(shape).trace.buffers.nbytes) == list(make(shape).trace.buffers.nbytes)


def test_reserved_memory_of_many_lengths_is_more_than_that_of_the_longest(tmp_path: Path) -> None:
    model = attention(tmp_path / "attention.onnx")

    def run_of(step: dict[str, Any]) -> Any:
        config = {"version": 1, "model": model, "gpus": ["l4"], "plan": {"instants": [{"step": step}]}}
        return staticmem.plan(config)

    options: dict[str, Any] = {"batch": 16, "optimizer": "sgd", "times": 40}
    many = run_of({**options, "lengths": {"dim": "seq", "source": "uniform(200, 900)", "seed": 1}})
    one = run_of({**options, "dims": {"seq": many.instants[0].lengths.worst_length}})
    info = many.instants[0].lengths
    assert (info.worst_batch, info.dim, info.rounds_up) == (16, "seq", False)
    assert info.least <= info.median <= info.most <= info.worst_length
    assert many.live_bytes == one.live_bytes
    assert many.reserved_bytes > one.reserved_bytes
    assert "seq of" in str(many)
    assert (
        many.to_json()
        == run_of({**options, "lengths": {"dim": "seq", "source": "uniform(200, 900)", "seed": 1}}).to_json()
    )


@pytest.mark.parametrize("source", ["uniform(200, 900)", "lognormal(5, 0.6)"])
def test_the_band_of_a_long_run_is_that_of_all_its_steps(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replays have a fifth of the steps: the first, the last, and those in which reserved memory grows."""
    lengths = {"dim": "seq", "source": source, "most": 1024, "seed": 2}
    step = {"batch": 16, "optimizer": "adam", "times": 150, "lengths": lengths}
    node = {"version": 1, "model": attention(tmp_path / "attention.onnx"), "plan": {"instants": [{"step": step}]}}
    study = study_of_config(of_node(of_plain(node, "test", ""), ""), "l4")
    played = study.play(study.plan.instants)
    monkeypatch.setattr(plans, "LONG", 1)
    monkeypatch.setattr(plans, "SHORT", len(played.process.calls) // 10)
    meters = plans._Meters(study, played, study.device)
    short = meters._shortened()
    assert len(short.moments[0].steps) < 40
    whole = Replays(played.process, None)
    (low, high), (reserved, _) = whole.reserved, whole.nominal_reserved
    assert meters.nominal.reserved == reserved
    assert meters._ends == (reserved - low, high - reserved)
    assert high > reserved > low


def test_shapes_whose_sizes_lie_on_no_line_have_those_of_larger_ones() -> None:
    model = str(ROOT / "models" / "resnet18.pt2")
    step = {"batch": 2, "optimizer": "sgd", "times": 20, "dims": {"width": 64}}
    lengths = {"dim": "height", "source": "uniform(64, 200)"}
    config = {"version": 1, "model": model, "plan": {"instants": [{"step": {**step, "lengths": lengths}}]}}
    [instant] = staticmem.plan(config).instants
    assert instant.lengths is not None
    assert instant.lengths.rounds_up or instant.lengths.rounded_bytes > 0


def test_an_unknown_dimension_is_an_error() -> None:
    model = str(ROOT / "models" / "resnet18.pt2")
    lengths = {"dim": "seq", "source": "uniform(64, 200)"}
    config = {"version": 1, "model": model, "plan": {"instants": [{"step": {"lengths": lengths}}]}}
    with pytest.raises(StaticmemError) as caught:
        staticmem.plan(config)
    assert caught.value.code == "SM111"


@pytest.mark.parametrize("first", [1, 500, 100_000])
def test_the_search_for_a_size_takes_few_replays(first: int) -> None:
    """Memory of 300 + 7 bytes for each of a size: 1,385 are within 10,000."""
    info = LengthsInfo("seq", 1, 1, 1, 1, 1, False, 0, 1, 1)
    tried = search(lambda size: Replayed(300 + 7 * size <= 10_000, 300 + 7 * size, 10_000, info), first, 1 << 24)
    assert max(size for size, one in tried.items() if one.fits) == 1385
    assert min(size for size, one in tried.items() if not one.fits) == 1386
    assert len(tried) <= 8
    none = search(lambda size: Replayed(False, 20_000 + size, 10_000, info), first, 100)
    assert not any(one.fits for one in none.values())
    assert min(none) == 1


BUDGETS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"batch": 4}, {}),
    ({}, {"rule": "tokens", "tokens": 2048, "seed": 3}),
]


@pytest.mark.parametrize(("options", "rule"), BUDGETS, ids=["batch", "tokens"])
def test_the_largest_budget_is_the_one_with_which_the_run_fits(
    options: dict[str, Any], rule: dict[str, Any], tmp_path: Path
) -> None:
    lengths = {"dim": "seq", "source": "normal(400, 200)", "most": 1024, **rule}
    model = attention(tmp_path / "attention.onnx")

    def run_at(size: int) -> RunReport:
        sized = {**options, "batch": size} if options else options
        of = {**lengths, "tokens": size} if rule else lengths
        step = {"optimizer": "adam", "times": 60, **sized, "lengths": of}
        return staticmem.plan({"version": 1, "model": model, "plan": {"instants": [{"step": step}]}}, "2GiB")

    step = {"optimizer": "adam", "times": 60, **options, "lengths": lengths}
    node = {"version": 1, "model": model, "plan": {"instants": [{"step": step}]}}
    report = staticmem.plan(node, gpu="2GiB", max_budget=True)
    largest = report.largest
    assert largest is not None
    assert f"that fits is {largest.size:,}" in str(report)
    at_it, above = run_at(largest.size), run_at(largest.fails_at)
    assert at_it.gpu is not None
    assert above.gpu is not None
    assert (at_it.gpu.fit, at_it.device.high) == ("fits", largest.device_high_bytes)
    assert above.gpu.fit != "fits"
    info = at_it.instants[0].lengths
    assert info is not None
    assert (info.worst_batch, info.worst_chance) == (largest.worst_batch, largest.worst_chance)
    assert largest.fails_at - largest.size <= max(1, largest.size // 100)
    assert largest.seed == rule.get("seed", 0)


def test_a_budget_is_that_of_a_gpu_and_of_lengths(tmp_path: Path) -> None:
    step = {"optimizer": "adam", "batch": 2, "lengths": {"dim": "seq", "source": "uniform(20, 99)"}}
    config = {"version": 1, "model": attention(tmp_path / "attention.onnx"), "plan": {"instants": [{"step": step}]}}
    plain = {**config, "plan": {"instants": [{"step": {"optimizer": "adam", "batch": 2, "dims": {"seq": 9}}}]}}
    for wrong, gpu in ((config, None), (plain, "l4")):
        with pytest.raises(UsageError) as caught:
            staticmem.plan(wrong, gpu=gpu, max_budget=True)
        assert caught.value.code == "SM449"
