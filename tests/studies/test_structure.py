"""A step taken apart and put together again is the step: every figure of a row is that of a report of its own."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from pt2_files import write_without_recording

from staticmem.errors import StaticmemError
from staticmem.studies import Request, Study
from staticmem.studies.evaluate import Row, evaluate
from staticmem.studies.structure import Affine, Core, curves, take_apart

MODELS = Path(__file__).parents[2] / "models"
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad")


def rows(study: Study, requests: list[Request]) -> list[Row]:
    found = evaluate(study, requests)
    assert all(isinstance(row, Row) for row in found)
    return [row for row in found if isinstance(row, Row)]


def check(study: Study, row: Row) -> None:
    """Against a run of the request alone, through none of the code under test."""
    one = study.ask(row.request)
    lifetimes = one.lifetimes
    assert row.live == lifetimes.peak_bytes, row.request
    phase = [name for name, tick in lifetimes.trace.phases if tick <= lifetimes.peak_tick][-1]
    assert row.phase == phase
    expected = lifetimes.by_category(lifetimes.peak_tick)
    assert {name: size for name, size in row.by_category.items() if size} == {k: v for k, v in expected.items() if v}
    assert sum(row.by_category.values()) == row.live
    assert row.forward == lifetimes.phases["forward"].nbytes
    if row.backward is not None:
        assert row.backward == lifetimes.phases["backward"].nbytes
    if row.optimizer is not None:
        assert row.optimizer == lifetimes.phases["optimizer"].nbytes


def test_a_thousand_configurations_are_those_of_analyze() -> None:
    """20 batches x 10 resolutions x 5 optimizers of ResNet-50; a sample is run on its own."""
    study = Study.open(MODELS / "resnet50_hw.pt2", Request())
    requests = [
        Request(batch=batch, resolution=size, optimizer=optimizer)
        for batch in range(4, 84, 4)
        for size in range(160, 480, 32)
        for optimizer in OPTIMIZERS
    ]
    found = rows(study, requests)
    assert [row.request for row in found] == requests
    assert all(row.method == "arrays" for row in found)
    chosen = random.Random(5).sample(found, 12)
    for row in [found[0], found[-1], *chosen]:
        check(study, row)


@pytest.mark.parametrize("name", ["seed.onnx", "mobilenet_v2.pt2", "vgg16.pt2"])
def test_batches_from_one_on(name: str) -> None:
    study = Study.open(MODELS / name, Request())
    requests = [
        Request(batch=b, optimizer=o, amp=a) for b in range(1, 9) for o in ("sgd", "adam") for a in (None, "bf16")
    ]
    for row in rows(study, requests)[:: 3 if "seed" in name else 7]:
        check(study, row)


@pytest.mark.parametrize(
    "words",
    [
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "adam", "optimizer_impl": "fused"},
        {"optimizer": "adagrad", "optimizer_impl": "for-loop"},
        {"optimizer": "adamw", "amsgrad": True},
        {"optimizer": "adam", "freeze": "^layer[12]"},
        {"optimizer": "adam", "accumulate": 3},
        {"optimizer": "adam", "clip_grad_norm": True},
        {"optimizer": "adam", "set_to_none": False},
        {"optimizer": "adam", "checkpoint": ("BasicBlock",)},
        {"optimizer": "adam", "offload_optimizer": True},
        {"optimizer": "adam", "grad_scaler": True, "amp": "fp16"},
        {"mode": "train"},
        {"mode": "infer"},
    ],
    ids=str,
)
def test_levers(words: dict[str, object]) -> None:
    """Whatever a step does, its rows are those of runs: what cannot be taken apart is run whole."""
    study = Study.open(MODELS / "resnet18.pt2", Request())
    requests = [Request(batch=batch, **words) for batch in (2, 3, 4, 6, 7)]  # type: ignore[arg-type]
    requests += [Request(batch=batch, optimizer="sgd") for batch in (3, 6)]
    found = rows(study, requests)
    for row in (found[1], found[3], found[-1]):
        check(study, row)


def test_a_request_that_fails_is_an_error_among_rows() -> None:
    study = Study.open(MODELS / "resnet18.pt2", Request())
    requests = [
        Request(batch=2, optimizer="adam"),
        Request(batch=2, optimizer="adam", resolution=3),
        Request(batch=2, optimizer="adam", momentum=0.9),
        Request(batch=3, optimizer="adam"),
    ]
    good, small, wrong, other = evaluate(study, requests)
    assert isinstance(good, Row)
    assert isinstance(other, Row)
    assert good.live < other.live
    assert isinstance(wrong, StaticmemError)
    assert wrong.code == "SM132"
    del small  # a 3 x 3 image may pass through adaptive pooling; what matters is that the others stand


def core_of(batch: int, **words: object) -> object:
    study = Study.open(MODELS / "resnet18.pt2", Request(batch=batch, **words))  # type: ignore[arg-type]
    return take_apart(study.lifetimes)


def test_affine_is_exact_between_and_refuses_other_structures(tmp_path: Path) -> None:
    study = Study.open(write_without_recording(MODELS / "resnet18.pt2", tmp_path / "plain.pt2"), Request())
    cores = {b: take_apart(study.ask(Request(batch=b, optimizer="adam")).lifetimes)[0] for b in (2, 5, 9, 13)}
    affine = Affine.through([(b, cores[b]) for b in (2, 5, 13)])
    assert affine is not None
    assert np.array_equal(affine.constant + affine.slope * 9, cores[9].nbytes)
    inference, _ = take_apart(study.ask(Request(batch=13)).lifetimes)
    assert Affine.through([(2, cores[2]), (13, inference)]) is None
    bent = take_apart(study.ask(Request(batch=5, optimizer="adam", resolution=256)).lifetimes)[0]
    assert bent.structure == cores[5].structure
    assert Affine.through([(2, cores[2]), (5, bent), (13, cores[13])]) is None, "one buffer is off the line"
    assert Affine.through([(2, cores[2]), (2, cores[2])]) is None


def test_optimizers_part(tmp_path: Path) -> None:
    """Adam: two states of the parameters' size, and one more for a moment (foreach's square roots)."""
    plain_file = write_without_recording(MODELS / "resnet18.pt2", tmp_path / "plain.pt2")
    study = Study.open(plain_file, Request(batch=2, optimizer="adam"))
    _, part = take_apart(study.lifetimes)
    assert part is not None
    parameters = sum(b.size for b in study.result.trace.buffers if b.category == "parameter")
    assert (part.state, part.peak) == (2 * parameters, parameters)
    _, plain = take_apart(study.ask(Request(batch=2, optimizer="sgd")).lifetimes)
    assert plain is not None
    assert (plain.state, plain.peak) == (0, 0)
    _, elsewhere = take_apart(study.ask(Request(batch=7, resolution=96, optimizer="adam")).lifetimes)
    assert elsewhere == part
    assert take_apart(study.lifetimes, apart=False)[1] is None


def test_a_step_without_tensors(tmp_path: Path) -> None:
    """A model whose result is a constant holds nothing: its peak is of nothing, at any batch."""
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor("value", TensorProto.FLOAT, [2], [1.0, 2.0])
    node = helper.make_node("Constant", [], ["y"], value=value)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    path = tmp_path / "constant.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [], [result])), path)
    study = Study.open(path, Request())
    core, _ = take_apart(study.lifetimes, apart=False)
    empty = Core(0, 0, *(np.zeros(0, dtype=np.int64),) * 4, core.names, core.category_names)
    found = curves(empty, np.zeros((3, 0), dtype=np.int64))
    assert found.peak.tolist() == found.end.tolist() == [0, 0, 0]
    assert found.by_category.sum() == found.phase_peak.sum() == 0
    assert found.take([1]).peak_phase == [core.names[0]]
