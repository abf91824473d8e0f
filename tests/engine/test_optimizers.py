"""Optimizer state and the temporaries of a step against torch.optim on the CPU; others by what their source says."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.eager.tensor import Owner, Tensor
from staticmem.engine import optimizers
from staticmem.engine.optimizer_steps import FACTS
from staticmem.ir import dtypes
from staticmem.ir.dtypes import DType
from staticmem.scenario.optimizers import LOW_RANK, OPTIMIZERS, TORCH_OPTIMIZERS
from staticmem.scenario.step import Scenario

SHAPES = ((6, 10), (10,), (7, 10), (3, 5, 4))
SCALAR = 8  # bytes: step counters and what a CPU makes of Python numbers
STEPS = 8  # RAdam rectifies from its sixth step on
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TORCH_OPTIMIZERS),
    *((name, {"weight_decay": 0.1}) for name in TORCH_OPTIMIZERS),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "dampening": 0.5}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adam", {"amsgrad": True}),
    ("adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("adamw", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"centered": True}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
]
IDS = [" ".join([name, *options]) for name, options in OPTIONS]
each = pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)


# -- ours --------------------------------------------------------------------------------------------------------


def place(e: Eager, shapes: tuple[tuple[int, ...], ...] = SHAPES, dtype: DType = dtypes.float32) -> list[Tensor]:
    parameters = []
    for k, shape in enumerate(shapes):
        tensor = e.empty(shape, dtype)
        tensor.name = f"p{k}"
        e.hold(tensor, Owner(Reason.MODEL, ""))
        parameters.append(tensor)
    return parameters


def ours(scenario: Scenario, **kwargs: Any) -> list[tuple[int, int]]:
    """(bytes, alive) of each temporary of more than a scalar."""
    e = Eager()
    e.trace.begin("optimizer")
    optimizer = optimizers.make(e, scenario, place(e, **kwargs))
    first = len(e.trace.buffers)
    optimizer.step()
    made = [b for b in e.trace.buffers[first:] if b.nbytes > SCALAR]
    assert all(b.died is not None for b in made)
    return [
        (b.nbytes, sum(o.nbytes for o in made if o.born <= b.born and (o.died is None or o.died > b.born)))
        for b in made
    ]


def states(scenario: Scenario, **kwargs: Any) -> list[dict[str, tuple[tuple[int, ...], int]]]:
    e = Eager()
    e.trace.begin("setup")
    parameters = place(e, **kwargs)
    optimizers.make(e, scenario, parameters).make_state()
    found: dict[str, dict[str, tuple[tuple[int, ...], int]]] = {p.name: {} for p in parameters}
    for hold in e.trace.holds:
        if hold.kind is Reason.OPTIMIZER and hold.who in found:  # not what all parameters share
            buffer = e.trace.buffers[hold.buffer]
            assert (buffer.category, hold.end) == ("optimizer_state", None)
            found[hold.who][buffer.name.split(".")[-1]] = (buffer.shape, buffer.nbytes)
    return list(found.values())


# -- torch's -----------------------------------------------------------------------------------------------------


def build(name: str, impl: str, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    torch: Any = pytest.importorskip("torch")
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for p in parameters:
        p.grad = torch.ones_like(p)
    kwargs: dict[str, Any] = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    optimizer = getattr(torch.optim, TORCH_OPTIMIZERS[name])(parameters, lr=0.1, **kwargs, **options)
    for _ in range(STEPS):
        optimizer.step()
    return optimizer, parameters


def memory(run: Callable[[], object]) -> list[tuple[int, int]]:
    """(bytes, alive) of each allocation of more than a scalar."""
    torch: Any = pytest.importorskip("torch")
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    steps, live = [], 0
    for event in profile.profiler.kineto_results.events():
        nbytes = event.nbytes() if event.name() == "[memory]" else 0
        if abs(nbytes) > SCALAR:
            live += nbytes
            if nbytes > 0:
                steps.append((nbytes, live))
    return steps


def dispatched(run: Callable[[], object]) -> list[tuple[int, int]]:
    """(bytes, alive) of each storage of more than a scalar that the dispatcher sees: products in bfloat16 have buffers
    of their own on a CPU."""
    torch: Any = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    steps: list[tuple[int, int]] = []
    alive: dict[int, int] = {}

    class Storages(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
            out = func(*args, **(kwargs or {}))
            if not isinstance(out, torch.Tensor):
                return out
            storage = out.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in given and nbytes > SCALAR:
                alive[key] = nbytes
                weakref.finalize(storage, alive.pop, key)
                steps.append((nbytes, sum(alive.values())))
            return out

    with Storages():
        run()
    return steps


def has_fused(name: str) -> bool:
    return FACTS[name](Scenario(optimizer=name)).fused


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["foreach", "for-loop"])
@each
def test_temporaries_of_a_step(name: str, options: dict[str, Any], impl: str) -> None:
    scenario = Scenario(mode="train", optimizer=name, optimizer_impl=impl, **options)
    if impl == "foreach" and FACTS[name](scenario).foreach is None:
        pytest.skip("its default is the for-loop")
    optimizer, _ = build(name, impl, options)
    assert ours(scenario) == memory(optimizer.step)


@pytest.mark.torch
@pytest.mark.parametrize("name", [n for n in TORCH_OPTIMIZERS if has_fused(n)])
def test_a_fused_step_makes_nothing(name: str) -> None:
    optimizer, _ = build(name, "fused", {})
    assert ours(Scenario(mode="train", optimizer=name, optimizer_impl="fused")) == memory(optimizer.step) == []


@pytest.mark.torch
def test_fused_is_offered_exactly_where_torch_has_it() -> None:
    torch: Any = pytest.importorskip("torch")
    for name, cls in TORCH_OPTIMIZERS.items():
        supports = "fused" in getattr(torch.optim, cls).__init__.__code__.co_varnames
        assert has_fused(name) == supports, name


@pytest.mark.torch
@pytest.mark.parametrize("impl", ["foreach", "fused"])
@each
def test_state_is_that_of_the_state_dict(name: str, options: dict[str, Any], impl: str) -> None:
    if impl == "fused" and not has_fused(name):
        pytest.skip("torch has no fused implementation")
    optimizer, parameters = build(name, impl, options)
    on_cpu = ("step", "mu_product") if impl != "fused" or name == "sgd" else ()  # also where the parameters are on CUDA
    expected = [
        {key: (tuple(t.shape), t.numel() * t.element_size()) for key, t in optimizer.state.get(p, {}).items()
         if hasattr(t, "element_size") and key not in on_cpu}
        for p in parameters
    ]  # fmt: skip
    assert states(Scenario(mode="train", optimizer=name, optimizer_impl=impl, **options)) == expected


# -- not in torch ------------------------------------------------------------------------------------------------


def test_every_optimizer_of_a_scenario_has_facts() -> None:
    assert {*FACTS, *LOW_RANK} == set(OPTIMIZERS)


def test_adafactor_of_transformers_keeps_rows_and_columns() -> None:
    found = states(
        Scenario(mode="train", optimizer="adafactor-hf"), shapes=((6, 10), (10,), (3, 5, 4)), dtype=dtypes.bfloat16
    )
    assert found == [
        {"exp_avg_sq_row": ((6,), 24), "exp_avg_sq_col": ((10,), 40), "RMS": ((), 4)},
        {"exp_avg_sq": ((10,), 40), "RMS": ((), 4)},
        {"exp_avg_sq_row": ((3, 5), 60), "exp_avg_sq_col": ((3, 4), 48), "RMS": ((), 4)},
    ]


def test_adafactor_of_transformers_has_three_full_tensors_at_most_in_float32() -> None:
    """The squared gradients and their sum with epsilon, while the update of the parameter before is alive."""
    shape = (64, 32)
    assert (
        max(alive for _, alive in ours(Scenario(mode="train", optimizer="adafactor-hf"), shapes=(shape, shape)))
        == 3 * 4 * 64 * 32
    )


# (bytes, alive) of each temporary over SHAPES: recorded with PyTorch 2.13's profiler on the CPU from transformers 5.23
# (Adafactor with its defaults) and timm 1.0.31 (Lion)
RECORDED = {
    ("adafactor-hf", "foreach", dtypes.float32): [
        (240, 240), (240, 480), (24, 264), (40, 280), (24, 264), (40, 304), (240, 544), (240, 480), (40, 280),
        (40, 320), (40, 80), (40, 80), (280, 320), (280, 600), (28, 308), (40, 320), (28, 308), (40, 348), (280, 628),
        (280, 560), (240, 520), (240, 760), (60, 300), (48, 288), (12, 252), (60, 312), (48, 348), (240, 588),
        (240, 480),
    ],
    ("adafactor-hf", "foreach", dtypes.bfloat16): [
        (240, 240), (240, 480), (240, 720), (240, 960), (24, 744), (40, 760), (24, 744), (40, 784), (240, 1024),
        (240, 960), (40, 520), (40, 320), (40, 360), (40, 400), (40, 160), (40, 160), (280, 360), (280, 600),
        (280, 880), (280, 1160), (28, 868), (40, 880), (28, 868), (40, 908), (280, 1188), (280, 1120), (240, 800),
        (240, 760), (240, 1000), (240, 1240), (60, 780), (48, 768), (12, 732), (60, 792), (48, 828), (240, 1068),
        (240, 960),
    ],
    ("lion", "foreach", dtypes.float32): [
        (240, 240), (40, 280), (280, 560), (240, 800),
    ],
    ("lion", "for-loop", dtypes.float32): [
        (240, 240), (40, 280), (280, 320), (240, 520),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "impl", "dtype"), RECORDED, ids=lambda value: str(value))
def test_temporaries_of_other_libraries(name: str, impl: str, dtype: DType) -> None:
    assert ours(Scenario(mode="train", optimizer=name, optimizer_impl=impl), dtype=dtype) == RECORDED[name, impl, dtype]


@pytest.mark.parametrize(("name", "count"), [("adam-8bit", 2), ("adamw-8bit", 2), ("lion-8bit", 1)])
def test_eight_bit_states_are_a_byte_an_element_and_a_maximum_a_block(name: str, count: int) -> None:
    shapes = ((64, 64), (4095,), (64, 65))  # 4,096 elements, one less, and a block that is not full
    large, small, partial = states(Scenario(mode="train", optimizer=name), shapes=shapes)
    assert set(small.values()) == {((4095,), 4 * 4095)}
    assert len(small) == count
    assert sorted(large.values()) == sorted([((64, 64), 4096), ((16,), 64)] * count)
    assert sorted(partial.values()) == sorted([((64, 65), 4160), ((math.ceil(4160 / 256),), 68)] * count)
    assert ours(Scenario(mode="train", optimizer=name), shapes=shapes) == []


@pytest.mark.parametrize(("shapes", "maps"), [(((64, 64), (64, 64)), 2), (((10,),), 0)])
def test_eight_bit_code_books_are_shared_and_made_only_where_needed(
    shapes: tuple[tuple[int, ...], ...], maps: int
) -> None:
    e = Eager()
    e.trace.begin("setup")
    optimizers.make(e, Scenario(mode="train", optimizer="adam-8bit"), place(e, shapes)).make_state()
    books = [b for b in e.trace.buffers if b.name.startswith("qmap")]
    assert [b.nbytes for b in books] == [256 * 4] * maps


# torchao 0.18: (bytes, alive) of each tensor that the wrapper code of Inductor allocates in the second step, with
# PyTorch 2.14.1 on fake CUDA tensors; the same for parameters in float32 and bfloat16
STEPS_OF_TORCHAO = {
    "torchao-adamw-8bit": {
        (1280, 5120): [], (8192,): [], (45, 1280): [], (384, 512): [], (512, 512, 1, 1): [], (2, 128, 256): [],
        (1280,): [], (63, 65): [], (4097,): [], (64, 3, 7, 7): [],  # states as the parameter
        (256, 100): [(400, 400), (400, 800), (102400, 103200), (102400, 205600)],
        (256, 64, 3, 3): [(2304, 2304), (2304, 4608), (589824, 594432), (589824, 1184256)],
        (16, 16, 48): [(192, 192), (192, 384), (49152, 49536), (49152, 98688)],
        (64, 4, 64): [(65536, 65536), (65536, 131072)],
        (32, 8, 16, 2, 1): [(32768, 32768), (32768, 65536)],
    },
    "torchao-adamw-4bit": {
        (1280,): [], (4097,): [],
        (8192,): [(256, 256), (256, 512), (32768, 33280), (32768, 66048), (65536, 131584), (65536, 197120)],
        (64, 1, 64): [(128, 128), (128, 256), (16384, 16640), (16384, 33024), (32768, 65792), (32768, 98560)],
        (300, 128): [(153600, 153600), (153600, 307200), (307200, 614400), (307200, 921600)],
    },
    "torchao-adamw-fp8": {
        (1280,): [], (1001, 257): [],
        (8192,): [(128, 128), (128, 256)],
        (256, 100): [(400, 400), (400, 800)],
        (2, 128, 256): [(1024, 1024), (1024, 2048)],
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, shapes in STEPS_OF_TORCHAO.items() for shape in shapes], ids=str
)
def test_temporaries_of_torchao(name: str, shape: tuple[int, ...], dtype: DType) -> None:
    assert ours(Scenario(mode="train", optimizer=name), shapes=(shape,), dtype=dtype) == STEPS_OF_TORCHAO[name][shape]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchao-adamw-8bit", {"codes": ((64, 128), 8192), "scale": ((32,), 128), "qmap": ((256,), 1024)}),
        ("torchao-adamw-4bit", {"codes": ((4096,), 4096), "scale": ((64,), 256), "qmap": ((16,), 64)}),
        ("torchao-adamw-fp8", {"codes": ((64, 128), 8192), "scale": ((32,), 128)}),
    ],
)
def test_states_of_torchao(name: str, expected: dict[str, tuple[tuple[int, ...], int]]) -> None:
    """What its state has on fake CUDA tensors; small tensors and those that no blocks fill stay as they are."""
    large, small, odd = states(
        Scenario(mode="train", optimizer=name), shapes=((64, 128), (63, 65), (4097,)), dtype=dtypes.bfloat16
    )
    assert large == {f"{s}_{part}": form for s in ("exp_avg", "exp_avg_sq") for part, form in expected.items()}
    assert small == dict.fromkeys(("exp_avg", "exp_avg_sq"), ((63, 65), 8190))
    assert odd == dict.fromkeys(("exp_avg", "exp_avg_sq"), ((4097,), 8194))


def test_lion_keeps_one_moment_and_makes_one_list() -> None:
    assert all(set(s) == {"exp_avg"} for s in states(Scenario(mode="train", optimizer="lion")))
    total = 4 * sum(math.prod(s) for s in SHAPES)
    assert ours(Scenario(mode="train", optimizer="lion"))[-1][1] == total


@pytest.mark.parametrize("name", ["adamw-32bit", "paged-adamw-32bit", "lion-32bit", "paged-lion-32bit"])
def test_states_of_bitsandbytes_are_float32_or_managed(name: str) -> None:
    """From 100,000 elements on a paged optimizer has its states in managed memory (`get_state_buffer`)."""
    large, small = states(
        Scenario(mode="train", optimizer=name), shapes=((1000, 100), (999, 100)), dtype=dtypes.bfloat16
    )
    count = 1 if "lion" in name else 2
    assert sorted(small.values()) == [((999, 100), 4 * 99_900)] * count
    assert sorted(large.values()) == ([] if "paged" in name else [((1000, 100), 400_000)] * count)


def test_a_paged_8bit_optimizer_keeps_its_maxima() -> None:
    (large,) = states(Scenario(mode="train", optimizer="paged-adamw-8bit"), shapes=((1000, 100),))
    assert large == {"absmax1": ((391,), 1564), "absmax2": ((391,), 1564)}


def test_managed_states_are_said() -> None:
    e = Eager()
    e.trace.begin("setup")
    optimizer = optimizers.make(
        e, Scenario(mode="train", optimizer="paged-adamw-32bit"), place(e, ((1024, 1024), (8, 8)))
    )
    (note,) = optimizer.notes()
    assert note.code == "SM284"
    assert note.text.startswith("8.00 MiB")  # two states of 4 MiB
    assert not list(optimizers.make(e, Scenario(mode="train", optimizer="adamw-32bit"), place(e)).notes())


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16])
def test_muon(dtype: DType) -> None:
    torch: Any = pytest.importorskip("torch")
    shapes = ((64, 96), (96, 64), (80, 80))
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype.name))) for shape in shapes]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.Muon(parameters, lr=0.1)
    optimizer.step()
    scenario = Scenario(mode="train", optimizer="muon")
    assert ours(scenario, shapes=shapes, dtype=dtype) == dispatched(optimizer.step)
    theirs = [{key: (tuple(t.shape), t.nbytes) for key, t in optimizer.state[p].items()} for p in parameters]
    assert states(scenario, shapes=shapes, dtype=dtype) == theirs


def test_muon_leaves_the_rest_to_adamw() -> None:
    e = Eager()
    e.trace.begin("setup")
    hidden, embedding, bias = place(e, ((6, 10), (50, 6), (10,)))
    optimizer = optimizers.make(e, Scenario(mode="train", optimizer="muon"), [hidden, embedding, bias], {id(embedding)})
    optimizer.make_state()
    found = [(h.who, e.trace.buffers[h.buffer].name) for h in e.trace.holds if h.kind is Reason.OPTIMIZER]
    adamw = [(p.name, f"{p.name}.{s}") for p in (embedding, bias) for s in ("exp_avg", "exp_avg_sq")]
    assert found == [(hidden.name, f"{hidden.name}.momentum_buffer"), *adamw]
    assert "1 matrices" in next(iter(optimizer.notes())).text


@pytest.mark.parametrize("name", ["adam", "adam-8bit", "adafactor"])
def test_an_offloaded_optimizer_leaves_nothing_on_the_device(name: str) -> None:
    scenario = Scenario(mode="train", optimizer=name, offload_optimizer=True)
    assert not any(states(scenario))
    assert ours(scenario) == []


def test_foreach_works_through_one_dtype_after_the_other() -> None:
    """The variable of the first group keeps its list until the second group has made its own."""
    e = Eager()
    e.trace.begin("optimizer")
    parameters = [*place(e, ((8, 8),)), *place(e, ((8, 8),), dtypes.bfloat16)]
    first = len(e.trace.buffers)
    optimizers.make(e, Scenario(mode="train", optimizer="adam"), parameters).step()
    a, b = e.trace.buffers[first:]
    assert (a.dtype, b.dtype) == (dtypes.float32, dtypes.bfloat16)
    assert a.died is not None
    assert b.born < a.died
