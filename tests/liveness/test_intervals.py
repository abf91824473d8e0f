"""Intervals, the live curve and the peak: by hand, on real exports, and on random traces."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import run_step

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import OPEN, Buffer, Trace, round_up
from staticmem.frontends import open_model
from staticmem.ir import dtypes
from staticmem.ir.model_file import resolve
from staticmem.liveness import Lifetimes, arrays, intervals
from staticmem.passes.pipeline import bind
from staticmem.scenario.step import Scenario

MODELS = Path(__file__).parents[2] / "models"
CATEGORIES = ("parameter", "activation", "temporary")


class Recorder:
    """Builds a trace as the engine does: one tick for each allocation and each release."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.owners: dict[int, list[int]] = {}

    def allocate(self, nbytes: int, category: str = "activation", held: bool = True) -> int:
        trace = self.trace
        number = len(trace.buffers)
        kernel = trace.kernel(f"aten.op{number}.default")
        buffer = Buffer(number, nbytes, (nbytes,), dtypes.uint8, category, f"b{number}", kernel, trace.ticks)
        trace.buffers.append(buffer)
        trace.ticks += 1
        if held:
            self.hold(number)
        return number

    def hold(self, number: int) -> None:
        hold = self.trace.holds.take(number, Reason.VALUE, f"owner{len(self.trace.holds)}", self.trace.ticks)
        self.owners.setdefault(number, []).append(hold)

    def let_go(self, number: int) -> None:
        """One owner lets go; the last one frees the buffer, and so does the end of the scope of one without owners."""
        owners = self.owners.get(number, [])
        if owners:
            self.trace.holds.ends[owners.pop()] = self.trace.ticks
        if not owners:
            self.trace.buffers.died[number] = self.trace.ticks
            self.trace.ticks += 1


def example() -> Trace:
    """A parameter for ever, two activations that overlap, a temporary inside the second."""
    r = Recorder()
    r.trace.begin("setup")
    r.allocate(1000, "parameter")  # tick 0: 1024
    r.trace.begin("forward")
    a = r.allocate(512)  # tick 1
    r.hold(a)  # a second owner
    r.let_go(a)
    b = r.allocate(1024)  # tick 2
    t = r.allocate(100, "temporary", held=False)  # tick 3: the peak
    r.let_go(t)  # tick 4
    r.trace.begin("backward")
    r.let_go(a)  # tick 5
    r.let_go(b)  # tick 6
    return r.trace


def test_by_hand() -> None:
    lifetimes = Lifetimes(example())
    assert list(lifetimes.live) == [1024, 1536, 2560, 3072, 2560, 2048, 1024]
    assert (lifetimes.peak_bytes, lifetimes.peak_tick) == (3072, 3)
    assert list(lifetimes.died) == [7, 5, 6, 4]
    assert lifetimes.by_category(3) == {"parameter": 1024, "activation": 1536, "temporary": 512}
    assert [b.name for b in lifetimes.alive(5)] == ["b0", "b2"]
    assert [h.who for h in lifetimes.holds(3)[1]] == ["owner1"]  # the one that has not let go yet
    assert 3 not in lifetimes.holds(3)


def test_phases() -> None:
    phases = Lifetimes(example()).phases
    assert (phases["forward"].nbytes, phases["forward"].buffer) == (3072, 3)
    # the backward only releases: its peak is what it starts with, and no allocation reached it
    assert (phases["backward"].nbytes, phases["backward"].buffer) == (2560, None)


def test_empty_trace() -> None:
    lifetimes = Lifetimes(Trace())
    assert (lifetimes.peak_bytes, lifetimes.peak_tick, lifetimes.phases) == (0, 0, {})


def test_curve_is_numpy() -> None:
    ticks, live = Lifetimes(example()).curve()
    assert live.tolist() == [1024, 1536, 2560, 3072, 2560, 2048, 1024]
    assert (len(ticks), str(live.dtype)) == (7, "int64")


def by_owners(trace: Trace) -> dict[int, tuple[int, int]]:
    """The intervals once more, buffer by buffer: to the end of the last hold, else to the end of the kernel's scope."""
    ends: dict[int, list[int]] = {buffer.id: [] for buffer in trace.buffers}
    for hold in trace.holds:
        ends[hold.buffer].append(trace.ticks if hold.end is None else hold.end)
    for buffer in trace.buffers:
        if not ends[buffer.id]:
            ends[buffer.id].append(trace.ticks if buffer.died is None else buffer.died)
    return {buffer.id: (buffer.born, max(ends[buffer.id])) for buffer in trace.buffers}


@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
@pytest.mark.parametrize("model", ["seed.pt2", "resnet18.pt2", "mobilenet_v2.pt2", "resnet18.onnx"])
def test_intervals_of_real_exports(model: str, optimizer: str | None) -> None:
    """What follows from the owners is what the engine saw happen."""
    file = open_model(str(MODELS / model))
    graph = bind(file, resolve(file, batch=2))
    scenario = Scenario(mode="train" if optimizer else "infer", optimizer=optimizer)
    trace = run_step(graph, scenario).trace
    lifetimes = Lifetimes(trace)
    seen = {b.id: (b.born, trace.ticks if b.died is None else b.died) for b in trace.buffers}
    assert by_owners(trace) == seen
    assert dict(enumerate(zip(lifetimes.born, lifetimes.died, strict=True))) == seen
    assert lifetimes.peak_bytes == sum(b.size for b in lifetimes.alive(lifetimes.peak_tick))
    assert lifetimes.allocation_at(lifetimes.peak_tick) is not None


def test_peak_needs_every_owner() -> None:
    """The check above can fail: an owner that never lets go keeps its buffer to the end."""
    trace = example()
    before = Lifetimes(trace)
    trace.holds.ends[1] = OPEN
    after = Lifetimes(trace)
    assert (before.died[1], after.died[1]) == (5, trace.ticks)
    assert after.live[-1] == before.live[-1] + 512


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    r = Recorder()
    open_: list[int] = []
    for _ in range(draw(st.integers(0, 40))):
        action = draw(st.sampled_from(["allocate", "allocate", "hold", "let go"]))
        if action == "allocate" or not open_:
            held = draw(st.booleans())
            open_.append(r.allocate(draw(st.integers(0, 5000)), draw(st.sampled_from(CATEGORIES)), held))
        else:
            number = draw(st.sampled_from(open_))
            if action == "let go":
                r.let_go(number)
                if r.trace.buffers[number].died is not None:
                    open_.remove(number)
            elif r.owners.get(number):
                r.hold(number)
    for number in open_:
        if number not in r.owners:  # a scope closes sooner or later
            r.let_go(number)
    return r.trace


def brute_force(trace: Trace, tick: int) -> int:
    return sum(round_up(b.nbytes) for b in trace.buffers if b.born <= tick and (b.died is None or tick < b.died))


@given(traces())
def test_invariants(trace: Trace) -> None:
    lifetimes: Lifetimes = Lifetimes(trace)
    for tick in range(trace.ticks):
        assert lifetimes.live[tick] == brute_force(trace, tick)
        assert sum(lifetimes.by_category(tick).values()) == lifetimes.live[tick]
        assert set(lifetimes.holds(tick)) <= {b.id for b in lifetimes.alive(tick)}
    assert lifetimes.peak_bytes == max(lifetimes.live) >= 0
    assert lifetimes.live[-1] == sum(b.size for b in trace.buffers if b.died is None)
    assert by_owners(trace) == dict(enumerate(zip(lifetimes.born, lifetimes.died, strict=True)))


def answers(trace: Trace) -> object:
    """All that lifetimes say of a trace."""
    found = Lifetimes(trace)
    moments = [
        (
            found.alive_ids(tick),
            found.by_category(tick),
            found.holds(tick),
            found.holds(tick, found.alive_ids(tick)[::3]),
        )
        for tick in range(0, trace.ticks, max(trace.ticks // 40, 1))
    ]
    return found.died, found.live, found.peak_bytes, found.peak_tick, found.phases, moments


@given(traces())
def test_arrays_say_the_same(trace: Trace) -> None:
    expected = answers(trace)
    with mock.patch.object(intervals, "LARGE", 1):
        assert answers(trace) == expected


def test_arrays_say_the_same_of_a_real_export(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(str(MODELS / "resnet18.pt2"))
    scenario = Scenario(mode="train", optimizer="adam")
    trace = run_step(bind(model, resolve(model, batch=2)), scenario).trace
    expected = answers(trace)
    monkeypatch.setattr(intervals, "LARGE", 1)
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "releases", None)
        with pytest.raises(TypeError):  # arrays are what answers now
            answers(trace)
    assert answers(trace) == expected


def test_a_phase_in_which_nothing_happens() -> None:
    """Its peak is what was alive when it began; nothing, where nothing was."""
    r = Recorder()
    r.trace.begin("first")
    r.trace.begin("setup")
    r.allocate(1000)
    r.allocate(1000)
    r.trace.begin("last")
    found = Lifetimes(r.trace)
    assert [(phase.phase, phase.nbytes, phase.tick) for phase in found.phases.values()] == [
        ("first", 0, 0), ("setup", 2048, 1), ("last", 2048, 1),
    ]  # fmt: skip
