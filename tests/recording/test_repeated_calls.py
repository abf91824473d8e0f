"""Results of calls that repeat are those of PyTorch's own FakeTensorMode, and files are the same to the byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._dynamo.source import ConstantSource  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental import symbolic_shapes  # noqa: E402
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv  # noqa: E402
from torch.utils._sympy.value_ranges import ValueRanges  # noqa: E402

from staticmem.recording import repeated_calls, tracing, writing  # noqa: E402
from staticmem.recording.record import record  # noqa: E402

pytestmark = pytest.mark.torch
WIDTH = 32


class Block(nn.Module):  # type: ignore[misc]
    """Views with and without an offset, several results, ops in place, a size that is inferred."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.packed, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        query, key, value = self.packed(self.norm(x)).chunk(3, dim=-1)
        turned = torch.cat((-query[..., WIDTH // 2 :], query[..., : WIDTH // 2]), dim=-1)
        heads = [t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in (turned, key.contiguous(), value.contiguous())]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(*x.shape[:2], -1).contiguous()
        most, _ = mixed.max(dim=1, keepdim=True)
        return x + nn.functional.gelu(self.out(mixed)).add_(1).mul_(most)


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, WIDTH, 4, stride=4), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


@pytest.fixture
def net() -> tuple[Any, tuple[Any, ...]]:
    with torch.device("meta"):
        return Net(), (torch.zeros(2, 3, 32, 32),)


def without(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """What `run` gives with PyTorch's own mode."""
    with monkeypatch.context() as patch:
        patch.setattr(repeated_calls, "AVAILABLE", False)
        return run()


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each result that was made again whether it is an argument, a view, or new."""
    made: list[str] = []
    known = repeated_calls._RepeatedCalls._again

    def counted(self: Any, one: Any, args: Any) -> Any:
        made.append("argument" if one.device is None else "view" if one.pattern is not None else "new")
        return known(self, one, args)

    monkeypatch.setattr(repeated_calls._RepeatedCalls, "_again", counted)
    return made


def test_a_recording_is_the_same(net: Any, again: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = net
    document = record(module, inputs)
    assert min(again.count("new"), again.count("view")) > 100
    assert "argument" in again
    again.clear()
    assert document == without(monkeypatch, lambda: record(module, inputs))
    assert not again


@pytest.mark.parametrize("train", [True, False])
def test_a_graph_is_the_same(net: Any, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = net
    module.train(train)

    def exported() -> bytes:
        return writing.pt2_bytes(tracing.trace(module, inputs, as_given=False).program, stack_traces=True)

    assert exported() == without(monkeypatch, exported)


def test_a_file_has_no_trace_of_what_is_left_out(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = net
    plain = tracing.trace(module, inputs, as_given=False, stack_traces=False).program
    assert "nn.functional" not in str([node.meta.get("stack_trace") for node in plain.graph.nodes])
    data = writing.pt2_bytes(plain, stack_traces=False)
    whole = tracing.trace(module, inputs, as_given=False).program
    assert "nn.functional" in str([node.meta.get("stack_trace") for node in whole.graph.nodes])
    monkeypatch.setattr(writing, "_without_check", nullcontext)
    assert writing.pt2_bytes(whole, stack_traces=False) == data


# -- one call ------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "new": lambda x, n: x * 2,
    "product": lambda x, n: x @ x.transpose(1, 2),
    "view": lambda x, n: x.view(n, -1),
    "part": lambda x, n: x[:, 2:, 1:3],
    "several": lambda x, n: x.split(2, dim=1),
    "values": lambda x, n: x.max(dim=1),
    "unsafe view": lambda x, n: torch.ops.aten._unsafe_view(x, [n * 6, 4]),
    "in place": lambda x, n: x.mul_(2),
    "conjugate": lambda x, n: torch.view_as_real(torch.view_as_complex(x.view(n, 6, 2, 2)).conj().resolve_conj()),
    "broadcast": lambda x, n: x[:, :1].expand(n, 6, 4),
    "numbers": lambda x, n: x.masked_fill(x > 0, 1.5),
    "type": lambda x, n: x.to(torch.bfloat16),
    "to nothing": lambda x, n: x.new_empty((0, n)),
}


def told(t: Any) -> tuple[Any, ...]:
    sizes = [str(n) for n in (*t.shape, *t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.numel())]
    flags = (t.dtype, t.device, t.is_contiguous(), t.requires_grad, t._version, t._is_view(), t.is_conj())
    return (*sizes, *flags, str(torch._C._dispatch_key_set(t)))


def run(mode: Any, call: Callable[[Any, Any], Any], times: int) -> list[tuple[list[Any], Any]]:
    source = ConstantSource("n")
    symbol = mode.shape_env.create_symbol(5, source, DimDynamic.DYNAMIC)
    n = mode.shape_env.create_symintnode(symbol, hint=5, source=source)
    results = []
    with mode:
        for _ in range(times):
            x = torch.empty((n, 6, 4), device="meta")
            result = call(x, n)
            results.append((list(result) if isinstance(result, (tuple, list)) else [result], x))
    return results


@pytest.mark.parametrize("name", CALLS)
def test_a_result_is_that_of_the_first_call(name: str, again: list[str]) -> None:
    own = run(repeated_calls.fake_mode(shape_env=ShapeEnv()), CALLS[name], 4)
    first = run(FakeTensorMode(shape_env=ShapeEnv()), CALLS[name], 1)[0]
    assert again
    for results, x in own:
        assert [told(t) for t in results] == [told(t) for t in first[0]]
        shares = [t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in results]
        assert shares == [t.untyped_storage()._cdata == first[1].untyped_storage()._cdata for t in first[0]]
    storages = {results[0].untyped_storage()._cdata for results, _ in own}
    assert len(storages) == len(own)  # each has one of its own, or that of its own input


def test_versions_are_of_one_tensor() -> None:
    mode = repeated_calls.fake_mode(shape_env=ShapeEnv())
    results = [results[0] for results, _ in run(mode, CALLS["new"], 4)]
    with mode:
        results[2].add_(1)
    assert [t._version for t in results] == [0, 0, 1, 0]


def test_calls_with_other_arguments_are_told_apart() -> None:
    mode = repeated_calls.fake_mode(shape_env=ShapeEnv())
    with mode:
        x = torch.empty((3, 4), device="meta")
        for _ in range(3):
            assert (x + 1).dtype is torch.float32
            assert (x.to(torch.int32) + 1).dtype is torch.int32
            assert (x.to(torch.int32) + 1.0).dtype is torch.float32
            assert [tuple(x.sum(axis).shape) for axis in (0, 1)] == [(4,), (3,)]
            assert [x.t().contiguous().stride(), x.t().clone().stride()] == [(3, 1), (1, 4)]


# -- questions about sizes -----------------------------------------------------------------------------------------


def size_of(env: Any, hint: int) -> Any:
    source = ConstantSource("n")
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=True)
    return env.create_symintnode(symbol, hint=hint, source=source)


@pytest.mark.parametrize("hint", [1, 2, 6])
def test_what_an_example_answers_is_what_a_proof_gives(hint: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    def answers() -> list[bool]:
        n = size_of(ShapeEnv(), hint)
        questions = [n == 1, n != 1, n == 6, n != 6, n < 3, n >= 2, n % 2 == 0, n + 1 > n, n * 2 == 2]
        with tracing.oblivious():
            return [ask(question) for question in questions for ask in (guard_or_false, guard_or_true)]

    assert answers() == without(monkeypatch, answers)


def test_bounds_of_sizes_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition on sizes makes PyTorch forget them; with another range of a size they are other ones."""
    env, asked = ShapeEnv(), []
    size = size_of(env, 5).node.expr
    own = symbolic_shapes.bound_sympy

    def counted(expr: Any, ranges: Any = None) -> Any:
        asked.append(expr)
        return own(expr, ranges)

    monkeypatch.setattr(symbolic_shapes, "bound_sympy", counted)
    with repeated_calls.known_sizes():
        ranges = [{size: ValueRanges(least, 9)} for least in (2, 2, 4)]
        bounds = [symbolic_shapes.bound_sympy(2 * size + 1, some) for some in ranges]
    assert [int(bound.lower) for bound in bounds] == [5, 5, 9]
    assert len(asked) == 2
    assert bounds[2] == own(2 * size + 1, ranges[2])


def test_an_example_with_a_size_of_1_answers_nothing() -> None:
    env = ShapeEnv()
    size_of(env, 6)
    assert repeated_calls._holds_example(env)
    size_of(env, 1)
    assert not repeated_calls._holds_example(env)


def test_arithmetic_that_repeats_is_done_once() -> None:
    n = size_of(ShapeEnv(), 6)
    with repeated_calls.known_arithmetic():
        assert (n * 4).node is (n * 4).node
        assert str(n * 4 + 1) == str(n + n * 3 + 1)
        others = size_of(ShapeEnv(), 5)
        assert (others * 4).node.hint == 20
    assert (n * 4).node is not (n * 4).node
