"""Results and sizes of code that is recorded: what stays a symbol, and what the code fixes."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import coded_models  # noqa: E402
from coded_models import WIDTH, Coded, on_meta  # noqa: E402
from recorded_programs import bases, graph_of, ops_named, program, recorded  # noqa: E402
from torch import nn  # noqa: E402

from staticmem.errors import DimensionError  # noqa: E402
from staticmem.frontends.recorded import RecordedModel  # noqa: E402
from staticmem.ir.graph import Ref  # noqa: E402
from staticmem.recording.record import record  # noqa: E402
from staticmem.recording.sizes import Sizes  # noqa: E402

pytestmark = pytest.mark.torch


def test_results_in_dictionaries() -> None:
    graph = program(coded_models.Named)
    relu, head = graph.ops[-2], graph.ops[-1]
    assert graph.outputs == (head.outputs[0], relu.outputs[0])


def test_a_loss_is_the_first_output() -> None:
    module, inputs = on_meta(coded_models.Named)
    model = recorded(module, *inputs, loss=lambda result: result["out"].square().mean())
    training, inference = graph_of(model), graph_of(model, False)
    assert training.recorded is not None
    assert inference.recorded is not None
    assert (training.recorded.loss, inference.recorded.loss) == (True, False)
    assert training.ops[-1].target == "aten::mean"
    assert inference.ops[-1].target == "aten::linear"


class Resized(nn.Module):  # type: ignore[misc]
    """Sizes that the code computes, and a branch on one."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.conv, self.branches = nn.Conv2d(3, 8, 3, padding=1), branches

    def forward(self, x: Any) -> Any:
        if self.branches and x.shape[2] > 40:
            x = x.half().float()
        y = self.conv(x)
        y = y.reshape(y.shape[0], 4, 2 * y.shape[2], y.shape[3])
        return y.new_zeros(x.shape[0] * 2, x.shape[3] + 1).sum() + y.mean()


@pytest.mark.parametrize(("value", "text"), [(1536 / 27, "Rational(512,9)"), (2.0, "2"), (0.1, "Rational(1,10)")])
def test_what_python_divided_is_the_fraction(value: float, text: str) -> None:
    """Sizes are divided without rounding when a condition is asked, which 56.888… in binary is not equal to."""
    sympy = pytest.importorskip("sympy")
    assert Sizes({}).text(sympy.Float(value)) == text


def test_sizes_stay_symbols() -> None:
    module = Resized()
    model = recorded(module, torch.zeros(2, 3, 32, 32, device="meta"))
    assert model.inputs[0].shape == ("batch", 3, "height", "width")
    assert set(model.symbols) == {"batch", "height", "width"}
    graph = graph_of(model, batch=5, height=20, width=24)
    assert ops_named(graph, "reshape")[0].args[1] == (5, 4, 40, 24)
    assert ops_named(graph, "new_zeros")[0].args[1] == (10, 25)


class Listed(nn.Module):  # type: ignore[misc]
    """Layers in a list, whose parameters are registered by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [[nn.Linear(8, 8)], [nn.Linear(8, 8)]]
        self.own = nn.ParameterList([p for (layer,) in self.layers for p in layer.parameters()])

    def forward(self, x: Any) -> Any:
        for (layer,) in self.layers:
            x = layer(x)
        return x


def test_layers_in_lists() -> None:
    with torch.device("meta"):
        module, x = Listed(), torch.zeros(2, 8)
    weight = module.layers[0][0].weight
    graph = graph_of(recorded(module, x))
    assert bases(graph) == ["linear", "linear"]
    assert graph.ops[0].args[1:] == (Ref("p:own.0"), Ref("p:own.1"))
    assert module.layers[0][0].weight is weight


class Loops(nn.Module):  # type: ignore[misc]
    """A loop as long as the input."""

    def forward(self, x: Any) -> Any:
        total = x[:, 0]
        for step in range(x.shape[1]):
            total = total + x[:, step]
        return total.type(x.type())


def test_sizes_that_the_code_fixed_are_not_changed() -> None:
    model = recorded(Loops(), torch.zeros(2, 5, 8, device="meta"))
    assert model.inputs[0].shape == ("batch", 5, "axis2")
    assert bases(graph_of(model, batch=3, axis2=9)).count("add") == 5
    with pytest.raises(DimensionError, match=r"the code fixed x\[1\]"):
        graph_of(model, True, None, **{"batch": 3, "axis2": 9, "x[1]": 6})


def test_orders_of_contractions_are_those_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        @staticmethod
        def contract_path(equation: str, *shapes: Any, **options: Any) -> Any:
            assert shapes == ((2, 5), (2, 7), (2, 3))
            assert options["shapes"]
            return [(1, 2), (0, 1)], None

    class Product(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any, z: Any) -> Any:
            return torch.einsum("ba,bc,bd->acd", x, y, z)

    from torch.backends import opt_einsum

    monkeypatch.setattr(opt_einsum, "get_opt_einsum", lambda: Package)
    monkeypatch.setattr(opt_einsum, "is_available", lambda: True)
    inputs = [torch.zeros(*shape, device="meta") for shape in ((2, 5), (2, 7), (2, 3))]
    shapes = [spec.shape for spec in recorded(Product(), *inputs).inputs]
    assert shapes == [("batch", "axis1"), ("batch", "axis1_2"), ("batch", "axis1_3")]


class FixedLate(nn.Module):  # type: ignore[misc]
    """Sizes that the code fixes, or finds equal, after ops that have them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x: Any, y: Any) -> Any:
        x = torch.ones(x.shape[0], x.shape[1], device=x.device) + x
        y = torch.ones(y.shape[0], y.shape[1], device=x.device) + y
        return torch.cat([self.inner(x), y @ y.t()], 1)


@pytest.mark.parametrize("training", [False, True])
def test_sizes_that_are_fixed_after_ops_that_have_them(training: bool) -> None:
    model = recorded(FixedLate(), torch.zeros(3, 24, device="meta"), torch.zeros(3, 30, device="meta"))
    assert [spec.shape for spec in model.inputs] == [("batch", 24), ("batch", "axis1_2")]
    graph = graph_of(model, training, batch=5, axis1_2=7)
    assert [op.args[0] for op in ops_named(graph, "ones")] == [(5, 24), (5, 7)]


def test_branches_on_sizes_are_conditions() -> None:
    """Another way of the code is not in the recording: sizes that would take it are refused."""
    model = recorded(Resized(branches=True), torch.zeros(2, 3, 32, 32, device="meta"))
    assert "to" not in bases(graph_of(model, batch=2, height=40, width=64))
    symbols = model.symbols["height"]
    refused = model.sizes.refusal({"batch": 2, "height": 48, "width": 64}) or symbols.high is not None
    assert refused


class One(Coded):
    def middle(self, x: Any) -> Any:
        x = super().middle(x)
        return x.squeeze(0)[None] if x.shape[0] == 1 else x


def test_a_branch_on_a_batch_of_one() -> None:
    with torch.device("meta"):
        module, one, two = One(), torch.zeros(1, WIDTH), torch.zeros(2, WIDTH)
    document = record(module, (one,), as_given=True)
    alone = graph_of(RecordedModel("m", document, "pt2"))
    assert "squeeze" in bases(alone)
    assert "squeeze" not in bases(graph_of(recorded(module, two), batch=4))
