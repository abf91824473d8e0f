"""What the recorder sees of code that runs, and the module afterwards."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import coded_models  # noqa: E402
import real_steps  # noqa: E402
from coded_models import WIDTH, Coded, on_meta  # noqa: E402
from recorded_programs import bases, graph_of, let_go_after, ops_named, program, recorded  # noqa: E402
from torch import nn  # noqa: E402
from torch._decomp import decomposition_table  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import staticmem  # noqa: E402
from staticmem.errors import DimensionError, ModelFileError  # noqa: E402
from staticmem.frontends import recording_format as written  # noqa: E402
from staticmem.frontends.recorded import RecordedModel  # noqa: E402
from staticmem.ir import dtypes  # noqa: E402
from staticmem.ir.graph import Ref  # noqa: E402
from staticmem.recording import gpu  # noqa: E402
from staticmem.recording.record import record  # noqa: E402
from staticmem.scenario.request import request_of  # noqa: E402
from staticmem.studies.study import Study  # noqa: E402

pytestmark = pytest.mark.torch


# -- ops -------------------------------------------------------------------------------------------------------------


def test_ops_in_place_are_recorded_as_such() -> None:
    assert bases(program(coded_models.InPlace)) == ["linear", "linear", "mul_", "add_", "relu_", "linear"]


def test_ops_without_gradient() -> None:
    graph = program(coded_models.Frozen)
    inside = {op.target: op.grad for op in graph.ops if op.target in ("aten::sigmoid", "aten::relu")}
    assert inside == {"aten::sigmoid": False, "aten::relu": True}
    assert {p.fqn for p in graph.parameters if not p.trainable} == {"stem.weight", "stem.bias"}
    assert not any(op.grad for op in program(coded_models.Frozen, training=False).ops)


def test_regions_of_autocast() -> None:
    """Without autocast of the step only the region with a dtype casts; with it the region that is off does not."""
    plain, amp = program(coded_models.Halves), program(coded_models.Halves, amp=dtypes.float16)
    assert [op.amp for op in ops_named(plain, "linear")] == [True, True, dtypes.bfloat16, True]
    assert [op.amp for op in ops_named(amp, "linear")] == [True, False, True, True]


def test_buffers_that_code_changes() -> None:
    graph = program(coded_models.Counted)
    (update,) = ops_named(graph, "mul_")
    assert [b.fqn for b in graph.buffers] == ["total"]
    assert update.args[0] == Ref("b:total")
    assert len(graph.ops) == len(program(coded_models.Counted, training=False).ops)


@pytest.mark.parametrize("training", [True, False])
def test_heads_in_training_alone(training: bool) -> None:
    assert bases(program(coded_models.Auxiliary, training)).count("relu") == (2 if training else 1)


def test_modules_of_ops() -> None:
    graph = program(coded_models.Tied)
    assert [op.modules[-1].path for op in graph.ops if op.target == "aten::linear"] == [
        "stem", "inner", "twin", "head",
    ]  # fmt: skip
    second = program(coded_models.Skips)
    assert [op.modules[-1].call for op in ops_named(second, "linear")] == [0, 0, 1, 2, 0]


# -- what Python holds -----------------------------------------------------------------------------------------------


def test_variables_hold_until_the_function_returns() -> None:
    (held,) = ops_named(graph := program(coded_models.Held), "cat")
    assert let_go_after(graph, held) == "add"
    (dropped,) = ops_named(graph := program(coded_models.Dropped), "cat")
    assert let_go_after(graph, dropped) == "sum"


def test_lists_hold_what_is_in_them() -> None:
    """All three until the first sum; `pop` gives one of them away at each."""
    graph = program(coded_models.Skips, training=False)
    assert graph.recorded is not None
    ends = [graph.recorded.last_held[op.outputs[0]] for op in ops_named(graph, "relu")]
    adds = [k for k, base in enumerate(bases(graph)) if base == "add"]
    assert ends == [adds[2], adds[1], adds[0]] or ends == sorted(ends, reverse=True)
    assert min(ends) >= adds[0]


def test_attributes_live_until_the_next_call() -> None:
    graph = program(coded_models.Kept)
    assert graph.recorded is not None
    ((kept, base),) = graph.recorded.kept
    (made,) = ops_named(graph, "mul")
    assert (kept.shape, base) == ((2, 256), "")
    assert set(graph.recorded.lasting) == {made.outputs[0]}
    assert made.outputs[0] not in graph.recorded.last_held
    assert bases(graph)[graph.recorded.last_held[kept.name]] == "mul"  # the assignment comes after the new value
    assert program(coded_models.Coded).recorded.kept == ()  # type: ignore[union-attr]


def test_a_tensor_that_the_forward_assigns_again_is_kept_once() -> None:
    module, inputs = on_meta(coded_models.Moved)
    model = recorded(module, *inputs)
    graph = graph_of(model)
    assert graph.recorded is not None
    assert [(value.shape, base) for value, base in graph.recorded.kept] == [((1, 256), "")]
    assert graph.recorded.lasting == ops_named(graph, "type_as")[0].outputs
    assert "type_as" in bases(graph_of(model, training=False))
    assert Study(model, request_of({"optimizer": "adam", "loss": "mean"})).report.peak.live_bytes > 0


def test_tensors_in_a_tuple_on_ctx_are_kept_as_others_are() -> None:
    of_tuple, plain = (
        Study(recorded(*on_meta(cls)[:1], *on_meta(cls)[1]), request_of({"optimizer": "adam", "loss": "mean"})).report
        for cls in (coded_models.OnCtxInTuple, coded_models.OnCtx)
    )
    assert of_tuple.peak.live_bytes == plain.peak.live_bytes > 0
    graph = program(coded_models.OnCtxInTuple)
    assert graph.recorded is not None
    assert all(len(function.attributes) == 1 for function in graph.recorded.functions.values())


# -- functions and checkpoints -----------------------------------------------------------------------------------------


def test_autograd_in_a_backward_is_an_op() -> None:
    graph = program(coded_models.Reversible)
    assert graph.recorded is not None
    first, _ = graph.recorded.functions.values()
    assert first.backward is not None
    targets = [op.target for op in first.backward.ops]
    assert targets.count(written.BACKWARD) == targets.count(written.REQUIRES_GRAD) == 2
    names = {name for name in first.gradients if name}
    assert len(names) == 2  # parameters get their gradients from the backward within

    (call,) = program(coded_models.Nested).recorded.functions.values()  # type: ignore[union-attr]
    assert call.backward is not None
    assert [op.outputs for op in call.backward.ops if op.target == written.GRAD] == [call.gradients]


def test_a_backward_that_makes_a_graph_is_an_error_of_training() -> None:
    module, inputs = on_meta(coded_models.NotRepeated)
    model = recorded(module, *inputs)
    with pytest.raises(ModelFileError, match=r"coded_models\.OfGradients has a backward that was not recorded"):
        Study(model, request_of({"optimizer": "adam", "loss": "mean"})).report  # noqa: B018
    assert Study(model, request_of({"mode": "infer"})).report.peak.live_bytes > 0


def test_gradients_that_are_differentiated_again_are_an_error_of_training() -> None:
    module, inputs = on_meta(coded_models.TrainedForces)
    model = recorded(module, *inputs)
    with pytest.raises(ModelFileError, match=r"differentiates gradients \(aten::gelu_backward\)") as error:
        Study(model, request_of({"optimizer": "adam", "loss": "mean"})).report  # noqa: B018
    assert error.value.code == "SM176"
    assert Study(model, request_of({"mode": "infer"})).report.peak.live_bytes > 0


@pytest.mark.parametrize("way", ["torch.func", "no leaves"])
def test_gradients_that_are_not_recorded_are_refused_with_the_way_that_is(way: str) -> None:
    class Takes(coded_models.Coded):
        def middle(self, x: Any) -> Any:
            if way == "torch.func":
                return torch.func.grad(lambda t: self.inner(t).tanh().sum())(x)
            with torch.enable_grad():
                x = (x.detach().requires_grad_() * 2).tanh()
                return torch.autograd.grad(self.inner(x).sum(), x)[0]

    with pytest.raises(ModelFileError, match=way) as error:
        staticmem.analyze(on_meta(Takes)[0], (torch.empty(2, WIDTH, device="meta"),), mode="infer")
    assert error.value.code == "SM175"
    assert "create_graph=True" in error.value.hint


def test_indices_on_the_cpu_take_no_memory() -> None:
    module, inputs = on_meta(coded_models.Looked)
    model = recorded(module, *inputs)
    (index,) = ops_named(graph_of(model), "index")
    (made,) = ops_named(graph_of(model), "cpu_tensor")
    assert index.args == (Ref("p:table"), (Ref(made.outputs[0]),))
    trace = Study(model, request_of({"optimizer": "sgd", "loss": "mean"})).result.trace
    names = [trace.kernels.names[k] for k in trace.buffers.kernels]
    assert [n for n, name in zip(trace.buffers.nbytes, names, strict=True) if name == "staticmem.cpu_tensor"] == [0]
    assert "aten.index.Tensor" in names


def test_sizes_that_pytorch_takes_as_integers_stay_open() -> None:
    class Pooled(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            line = torch.linspace(-1, 1, x.shape[2], device=x.device)
            return nn.functional.avg_pool2d(x + line[:, None], x.shape[2:])[..., 0, 0]

    model = recorded(Pooled(), torch.zeros(2, 3, 8, 12, device="meta"))
    graph = graph_of(model, batch=5, height=16, width=20)
    (line,) = ops_named(graph, "linspace")
    (pool,) = ops_named(graph, "avg_pool2d")
    assert line.args == (-1, 1, 16)
    assert pool.args[1] == (16, 20)


def test_a_slice_with_open_bounds() -> None:
    class Trimmed(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any) -> Any:
            delta = x.shape[1] - y.shape[1]
            return x[:, delta // 2 : -(delta - delta // 2)].reshape(-1) + y.reshape(-1)

    model = recorded(Trimmed(), torch.zeros(2, 64, device="meta"), torch.zeros(2, 40, device="meta"))
    graph = graph_of(model, batch=3, axis1=50, axis1_2=40)
    assert [op.args[2:] for op in ops_named(graph, "slice")][-1] == (5, -5)
    assert model.sizes.refusal({"batch": 3, "axis1": 30, "axis1_2": 40}) is not None  # the slice would be another one


def test_what_training_asks_of_sizes_is_no_condition_of_inference() -> None:
    class Normed(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8, device="meta")

        def forward(self, x: Any) -> Any:
            return self.norm(x)

    model = recorded(Normed(), torch.zeros(2, 8, device="meta"))
    assert Study(model, request_of({"batch": 1, "mode": "infer"})).report.peak.live_bytes > 0
    with pytest.raises(DimensionError, match=r"x\[0\]"):  # PyTorch's own error: more than 1 value per channel
        Study(model, request_of({"batch": 1, "optimizer": "sgd", "loss": "mean"})).report  # noqa: B018


def test_modes_have_nothing_of_each_other() -> None:
    class Caches(nn.Module):  # type: ignore[misc]
        cache: Any = None

        def forward(self, x: Any) -> Any:
            if self.cache is None:
                self.cache = x * 2
            return x + self.cache

    model = recorded(Caches(), torch.zeros(2, 8, device="meta"))
    assert bases(graph_of(model, training=False)) == ["add"]  # of the second call: the first has made the cache
    assert bases(graph_of(model)) == ["add"]  # of the second step


def test_containers_within_attributes_are_put_back() -> None:
    """A deque, a list in a dictionary, and what a plain object has: other modes found in them what inference left."""

    class Log:
        def __init__(self) -> None:
            self.seen: list[Any] = []

    class Remembers(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.recent: deque[Any] = deque(maxlen=2)
            self.named: dict[str, list[list[Any]]] = {"all": [[]]}
            self.log = Log()

        def forward(self, x: Any) -> Any:
            for past in (*self.recent, *self.named["all"][0], *self.log.seen):
                x = x + past
            self.recent.append(x.detach())
            self.named["all"][0].append(x.detach())
            self.log.seen.append(x.detach())
            return x

    module = Remembers()
    recent, inner, seen = module.recent, module.named["all"][0], module.log.seen
    model = recorded(module, torch.zeros(2, 8, device="meta"))
    assert bases(graph_of(model)).count("add") == bases(graph_of(model, training=False)).count("add") == 3
    assert (module.recent, module.named, module.log.seen) == (deque(), {"all": [[]]}, [])
    assert module.recent is recent
    assert module.named["all"][0] is inner
    assert module.log.seen is seen


def test_hooks_that_the_first_call_installs_are_installed_once() -> None:
    """As transformers has it: outputs of layers are collected by hooks, which the first forward puts on them."""

    class Collects(nn.Module):  # type: ignore[misc]
        hooked = False

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8, device="meta"), nn.Linear(8, 4, device="meta")
            self.kept: list[Any] = []

        def forward(self, x: Any) -> Any:
            if not self.hooked:
                self.layer.register_forward_hook(lambda module, args, result: self.kept.append(result * 2))
                self.hooked = True
            self.layer(x)
            features = torch.cat(self.kept, -1)
            self.kept.clear()
            return self.head(features)

    module = Collects()
    handle = module.head.register_forward_hook(lambda module, args, result: None)
    model = recorded(module, torch.zeros(2, 8, device="meta"))
    for training in (False, True):
        assert bases(graph_of(model, training=training)).count("mul") == 1
    assert not module.layer._forward_hooks
    handle.remove()  # it knows the container of its hook
    assert not module.head._forward_hooks


def test_convolutions_have_the_layout_of_cudnn() -> None:
    """`contiguous` copies what a convolution of channels-last input gives, and is recorded where nothing is to copy."""

    class Copies(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1, device="meta")

        def forward(self, x: Any) -> Any:
            y = self.conv(x.to(memory_format=torch.channels_last))
            return y.contiguous().contiguous() + (1 if y.is_contiguous() else x)

    graph = graph_of(recorded(Copies(), torch.zeros(2, 4, 8, 8, device="meta")), batch=2, height=8, width=8)
    assert bases(graph) == ["to", "conv2d", "contiguous", "contiguous", "add"]
    assert ops_named(graph, "add")[0].args[1] == Ref(graph.inputs[0].name)


def test_custom_functions() -> None:
    graph = program(coded_models.Custom)
    assert graph.recorded is not None
    swish, mask = [
        next(f for f in graph.recorded.functions.values() if f.name.endswith(name)) for name in ("Swish", "Mask")
    ]
    assert len(graph.recorded.functions) == 3
    assert swish.saved == swish.inputs
    assert swish.attributes == ()
    assert swish.backward is not None
    assert [op.target for op in swish.backward.ops].count("aten::sigmoid") == 1
    assert mask.saved == ()
    assert len(mask.attributes) == 1
    assert len(mask.gradients) == 2
    assert mask.gradients[1] == ""
    assert mask.backward is not None
    assert [op.target for op in mask.backward.ops] == ["aten::mul.Tensor"]
    assert program(coded_models.Custom, training=False).recorded.functions == {}  # type: ignore[union-attr]


@pytest.mark.parametrize("cls", [coded_models.Checkpointed, coded_models.Reentrant], ids=lambda cls: cls.__name__)
def test_checkpoints(cls: Any) -> None:
    graph = program(cls)
    assert graph.recorded is not None
    first, second = graph.recorded.regions
    assert {first.reentrant, second.reentrant} == {cls.reentrant}
    for region in (first, second):
        assert bases(graph)[region.start : region.end] == ["linear", "relu", "linear", "relu"]
    assert program(cls, training=False).recorded.regions == ()  # type: ignore[union-attr]


def test_checkpoints_that_the_code_does_not_make() -> None:
    assert program(coded_models.NotCheckpointed).recorded.regions == ()  # type: ignore[union-attr]


def test_what_calls_are_given_and_do_not_read() -> None:
    graph = program(coded_models.Unread)
    assert graph.recorded is not None
    assert graph.recorded.unread == {
        op.modules[-2]: tuple(o.outputs[0] for o in ops_named(graph, "repeat"))
        for op in graph.ops
        if len(op.modules) > 1 and op.modules[-2].path.startswith("blocks")
    }
    assert len(graph.recorded.unread) == 4
    assert program(coded_models.Coded).recorded.unread == {}  # type: ignore[union-attr]


def test_what_checkpoints_of_functions_are_given_and_do_not_read() -> None:
    graph = program(coded_models.UnreadInFunctions)
    assert graph.recorded is not None
    first, second, *short = (op.outputs[0] for op in ops_named(graph, "repeat"))
    assert [region.unread for region in graph.recorded.regions] == [(first, short[0]), (second, short[1])]


@pytest.mark.parametrize(("every", "cls"), [(1, coded_models.UnreadInCheckpoints), (2, coded_models.UnreadInPairs)])
def test_checkpoints_keep_what_calls_are_given_and_do_not_read(every: int, cls: type[Coded]) -> None:
    """As where the code calls the checkpoints: two tensors of three times the width that no op of a block reads."""
    module, inputs = on_meta(coded_models.Unread)
    document = record(module, inputs)
    options = {"batch": 700, "optimizer": "sgd", "loss": "mean", "outputs": "dropped", "checkpoint": ["Given"]}
    options["checkpoint_every"] = every
    peak = Study(RecordedModel("<m>", document, "pt2"), request_of(options)).report.peak.live_bytes
    for row in document["programs"]:  # as an earlier version wrote it
        del row["unread_of_calls"]
    lacking = Study(RecordedModel("<m>", document, "pt2"), request_of(options)).report.peak.live_bytes
    assert peak == real_steps.peak(cls, [(700, WIDTH)], optimizer="sgd")
    assert peak - lacking > 700 * 3 * 256 * 4


def test_tied_parameters_are_one() -> None:
    graph = program(coded_models.Tied)
    assert {p.fqn: p.alias_of for p in graph.parameters if p.alias_of} == {"twin.weight": "p:inner.weight"}


# -- the module ------------------------------------------------------------------------------------------------------


class Stateful(coded_models.Counted):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, ["built"]
        self.features: Any = None
        self.rnn = nn.LSTM(256, 256, batch_first=True)
        self.plain: Any = torch.zeros(256)
        self.head.eval()

    def middle(self, x: Any) -> Any:
        self.calls += 1
        self.log.append("called")
        self.features = super().middle(x)
        self.total = self.total * 1
        return self.rnn(self.features[:, None])[0][:, 0] + self.plain


def state(module: Any) -> dict[str, Any]:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {
        "tensors": {name: (id(t), t._version) for name, t in tensors.items()},
        "attributes": [
            {k: list(v) if isinstance(v, list) else id(v) for k, v in vars(m).items() if k[0] != "_"}
            for m in module.modules()
        ],
        "training": [m.training for m in module.modules()],
        "flat": [id(w) for w in module.rnn._flat_weights],
        "grad": [p.grad for p in module.parameters()],
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_module_is_as_it_was(device: str) -> None:
    with torch.device(device):
        module, x = Stateful(), torch.zeros(2, WIDTH)
    before, call = state(module), nn.Module.__call__
    recorded(module, x)
    assert state(module) == before
    assert (module.calls, module.log) == (0, ["built"])
    assert nn.Module.__call__ is call
    if device == "cpu":
        assert module(x).device.type == "cpu"


class Reads(Coded):
    def middle(self, x: Any) -> Any:
        return x + 1 if x.abs().sum() > 0 else x


def test_weights_that_wrap_others_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    module = torch.nn.Linear(4, 4, device="meta")
    module.weight = torch.nn.Parameter(TwoTensor(module.weight.detach(), module.weight.detach()))
    with pytest.raises(ModelFileError, match="weight is a TwoTensor") as error:
        record(module, (torch.empty(2, 4, device="meta"),))
    assert error.value.code == "SM175"
    assert isinstance(module.weight, TwoTensor)


class Breaks(Coded):
    def middle(self, x: Any) -> Any:
        self.features = x
        raise RuntimeError("no luck\nat all")


@pytest.mark.parametrize(("cls", "why"), [(Reads, "data-dependent|DataDependent"), (Breaks, "no luck")])
def test_code_that_cannot_run_without_data(cls: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staticmem.recording.record.MOST_WEIGHTS", 0)
    module, inputs = on_meta(cls)
    before = {name: id(p) for name, p in module.named_parameters()}
    with pytest.raises(ModelFileError, match=why) as error:
        record(module, inputs)
    assert error.value.code == "SM175"
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert not hasattr(module, "features")


# -- what stands for the GPU -------------------------------------------------------------------------------------------


class Attends(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]


def test_the_fast_path_of_attention() -> None:
    with torch.device("meta"):
        module, x = Attends(), torch.zeros(2, 5, WIDTH)
    model = recorded(module, x)
    assert bases(graph_of(model, training=False)) == ["_native_multi_head_attention"]
    assert "scaled_dot_product_attention" in bases(graph_of(model))


class FromCPU(Coded):
    def middle(self, x: Any) -> Any:
        aside = torch.ones(1000, 1000, device="cpu").sum()
        scale = torch.tensor(2.0, device="cpu")
        return super().middle(x) * scale + float(aside.dim())


def test_tensors_on_the_cpu_take_no_memory() -> None:
    assert bases(program(FromCPU)) == ["linear", "linear", "relu", "mul", "add", "linear"]


def test_the_document_is_text_of_one_shape() -> None:
    module, inputs = on_meta(coded_models.Custom)
    document = record(module, inputs)
    assert written.unpack(written.pack(document), "m") == document
    modes = [mode for program in document["programs"] for mode in program["modes"]]
    assert sorted(modes, key=str) == [[False, "bfloat16"], [False, None], [True, "bfloat16"], [True, None]]


class Plain(Coded):
    """A tensor that is neither a parameter nor a buffer, and a view of a parameter, both kept by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.turned = torch.ones(256), None

    def middle(self, x: Any) -> Any:
        if self.turned is None:
            self.turned = self.inner.weight.t()
        return F.relu(x @ self.turned) * self.plain


@pytest.mark.parametrize("training", [True, False])
def test_tensors_that_the_module_keeps_are_values_of_each_mode(training: bool) -> None:
    """They carry marks of the modes that were recorded before."""
    graph = program(Plain, training)
    made = {name for op in graph.ops for name in op.outputs}
    made |= {p.value.name for p in graph.parameters} | {v.name for v in graph.inputs}
    assert graph.recorded is not None
    made |= {value.name for value, _ in graph.recorded.kept}
    assert all(name in made for op in graph.ops for name in op.refs())
    if training:  # the view of the first step, which leads to the parameter
        (view,) = ops_named(graph, "as_strided")
        assert view.grad
        assert view.args[0] == Ref("p:inner.weight")


def test_reports_name_custom_functions() -> None:
    module, inputs = on_meta(coded_models.Custom)
    report = staticmem.analyze(module, inputs, batch=4000, optimizer="sgd")
    reasons = " ".join(reason for tensor in report.top_tensors for reason in tensor.why)
    assert "saved for the backward of Swish" in reasons
    assert "staticmem::" not in str(report)


class Normed(nn.Module):  # type: ignore[misc]
    """Batch normalisation of tensors in several layouts, with and without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)
        self.flat, self.instance = nn.BatchNorm1d(6), nn.InstanceNorm2d(4)

    def forward(self, x: Any) -> Any:
        y = self.second(self.first(x).transpose(2, 3))
        z = self.flat(y.flatten(2).transpose(1, 2)[:, :6]).reshape(-1)
        return z.sum() + self.first(self.instance(y)[:, :, ::2]).contiguous().flatten().sum()


KEYWORDS: dict[str, Any] = {"decimals": 1, "rounding_mode": "floor"}


def test_functions_of_one_tensor_give_what_pytorchs_decompositions_give() -> None:
    """Sizes, strides and type, also of what lies in memory in another order, or several times."""
    plain = torch.zeros(2, 3, 4, 5, device="meta")
    expanded, last = plain[:1].expand(6, 3, 4, 5), plain.to(memory_format=torch.channels_last)
    tensors = (plain, last, expanded, plain.transpose(1, 3)[:, ::2], plain.half(), plain[0, 0].t())
    tried, aten = 0, torch.ops.aten
    with pytest.raises(ValueError, match="both min and max"):
        gpu.known_results()[aten.clamp.default](plain)
    for op, known in gpu.known_results().items():
        if op in gpu._BATCH_NORMS or op is aten.clamp.default:
            continue
        given = [argument for argument in op._schema.arguments[1:] if not argument.has_default_value()]
        numbers, named = (
            [0.5 for a in given if not a.kwarg_only],
            {a.name: KEYWORDS[a.name] for a in given if a.kwarg_only},
        )
        for tensor in tensors:
            if op._schema.is_mutable and tensor is expanded:
                continue
            known(torch.zeros(2, dtype=tensor.dtype, device="meta"), *numbers, **named)
            inputs = tensor.clone(), tensor.clone()
            makers = zip((known, decomposition_table[op]), inputs, strict=True)
            made = [make(x, *numbers, **named) for make, x in makers]
            assert (made[0] is inputs[0]) is op._schema.is_mutable, str(op)
            forms = [(one.shape, one.stride(), one.dtype) for one in made]
            assert forms[0] == forms[1], (str(op), tensor.stride())
            tried += 1
    assert tried > 300
    assert {aten.hardswish.default, aten.hardtanh_.default, aten.gelu.default} <= gpu.known_results().keys()
    whole = torch.ones(2, dtype=torch.int64, device="meta")
    assert gpu.known_results()[aten.exp.default](whole).dtype is torch.float32  # the decomposition's


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_batch_norms_are_recorded_as_by_pytorchs_decomposition(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    documents = []
    for own in (True, False):
        with torch.device("meta"):
            module, x = Normed(), torch.zeros(2, 4, 8, 6).to(memory_format=getattr(torch, layout))
        if not own:
            monkeypatch.setattr(gpu, "known_results", dict)
        documents.append(record(module, (x,)))
    assert documents[0] == documents[1]
