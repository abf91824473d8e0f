"""`--lora` against modules whose forward is that of PEFT's (peft/tuners/lora/layer.py, `Linear` and `Embedding`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

import staticmem
from staticmem.errors import UsageError
from staticmem.scenario.adapters import lora_of, lora_text
from staticmem.studies import Request, Study

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

WIDTH, WORDS = 64, 96


def block() -> Any:
    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.v_proj = torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH)
            self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
            self.norm = torch.nn.LayerNorm(WIDTH)

        def forward(self, x: Any) -> Any:
            normed = self.norm(x)
            x = x + torch.softmax(self.q_proj(normed), dim=-1) * self.v_proj(normed)
            return x + self.down(torch.relu(self.up(x)))

    return Block()


def decoder() -> Any:
    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(WORDS, WIDTH)
            self.blocks = torch.nn.ModuleList([block(), block()])
            self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids)
            for one in self.blocks:
                x = one(x)
            return self.head(x)

    return Decoder()


def magnitudes(rows: int) -> Any:
    """peft/tuners/lora/dora.py, `DoraLinearLayer`."""

    class Dora(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(rows))

        def norms(self, weight: Any, update: Any, scaling: float) -> Any:
            weight = weight + scaling * update
            return torch.linalg.norm(weight, dim=1).to(weight.dtype)

        def update(self, lora_a: Any, lora_b: Any) -> Any:
            eye = torch.eye(lora_a.weight.shape[1], device=lora_a.weight.device, dtype=lora_a.weight.dtype)
            return lora_b(lora_a(eye)).T

        def forward(self, x: Any, lora_a: Any, lora_b: Any, scaling: float, base: Any, base_result: Any) -> Any:
            update = self.update(lora_a, lora_b).to(x.dtype)
            weight = base.weight.to(x.dtype)
            norms = self.norms(weight, update.detach(), scaling)
            norms = norms.detach()
            factor = (self.weight / norms).view(1, -1)
            result = lora_b(lora_a(x))
            if base_result is not None:
                if base.bias is not None:
                    base_result = base_result - base.bias
            else:
                base_result = torch.nn.functional.linear(x, weight)
            return (factor - 1) * base_result + factor * result * scaling

    return Dora()


def wrapped(base: Any, r: int, alpha: float, dropout: float = 0.0, dora: bool = False) -> Any:
    """The layer as PEFT's module has it."""
    embedding = isinstance(base, torch.nn.Embedding)

    class Linear(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.scaling = base, alpha / r
            self.lora_dropout = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
            if embedding:
                self.lora_embedding_A = torch.nn.Parameter(torch.zeros(r, base.num_embeddings))
                self.lora_embedding_B = torch.nn.Parameter(torch.zeros(base.embedding_dim, r))
            else:
                self.lora_A = torch.nn.Linear(base.in_features, r, bias=False)
                self.lora_B = torch.nn.Linear(r, base.out_features, bias=False)
                if dora:
                    self.magnitude = magnitudes(base.out_features)

        def with_magnitude(self, x: Any, result: Any) -> Any:
            """peft/tuners/lora/variants.py, `DoraLinearVariant.forward`."""
            if dropout and self.training:
                x, base_result = self.lora_dropout(x), None
            else:
                base_result = result
            return result + self.magnitude(x, self.lora_A, self.lora_B, self.scaling, self.base_layer, base_result)

        def forward(self, x: Any) -> Any:
            result = self.base_layer(x)
            if embedding:
                first, second = self.lora_embedding_A.T, self.lora_embedding_B.T
                after = torch.nn.functional.embedding(x, first)
                return result + (after @ second) * self.scaling
            dtype = result.dtype
            x = x.to(self.lora_A.weight.dtype)
            if dora:
                result = self.with_magnitude(x, result)
                return result.to(dtype)
            return result + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling

    return Linear()


def with_adapters(model: Any, targets: Sequence[str], *settings: Any) -> Any:
    for p in model.parameters():
        p.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] in targets:
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], wrapped(module, *settings))
    return model


@cache
def program(targets: tuple[str, ...] = (), r: int = 8, alpha: float = 16, *settings: Any) -> Any:
    with torch.device("meta"):
        model = decoder()
        if targets:
            model = with_adapters(model, targets, r, alpha, *settings)
        return torch.export.export(model.train(), (torch.zeros(4, 16, dtype=torch.int64),), strict=False)


def live(exported: Any, **options: Any) -> tuple[int, str]:
    peak = staticmem.analyze(exported, **options).peak
    return peak.live_bytes, peak.phase


SETTINGS: dict[str, Mapping[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "autocast": {"optimizer": "adamw", "amp": "bf16"},
    "checkpoints": {"optimizer": "sgd", "checkpoint": ("Block",)},
    "checkpoints under autocast": {"optimizer": "adamw", "checkpoint": ("Block",), "amp": "bf16"},
    "micro-batches": {"optimizer": "adamw", "accumulate": 2},
    "inference": {"mode": "infer"},
    "inference under autocast": {"mode": "infer", "amp": "bf16"},
}
ALL = ("q_proj", "v_proj", "up", "down", "head")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("dropout", "targets"), [(0.1, ("q_proj", "v_proj")), (0.0, ALL), (0.1, ("tokens", "down"))])
def test_steps_are_those_of_modules_that_run_the_same(setting: str, dropout: float, targets: tuple[str, ...]) -> None:
    asked = {"r": 8, "alpha": 16, "dropout": dropout, "targets": targets}
    here = live(program(), lora=asked, **SETTINGS[setting])
    assert here == live(program(targets, 8, 16, dropout), **SETTINGS[setting])


def written_out(model: Any) -> Any:
    """The model with the linear layers of Falcon (transformers/models/falcon/modeling_falcon.py, `FalconLinear`) in
    its blocks."""

    class FalconLinear(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            hidden_states = x @ self.weight.T
            if self.bias is None:
                return hidden_states
            return hidden_states + self.bias

    for module in model.blocks.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = FalconLinear
    return model


@cache
def recorded_falcon(targets: tuple[str, ...], dropout: float) -> Any:
    with torch.device("meta"):
        model = written_out(decoder()).train()
        model = with_adapters(model, targets, 8, 16, dropout) if targets else model
        return recorded(model, torch.zeros(4, 16, dtype=torch.int64))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("dropout", "targets"), [(0.1, ("q_proj", "v_proj")), (0.0, ("up", "down"))])
def test_products_that_are_written_out_are_linear_layers(
    setting: str, dropout: float, targets: tuple[str, ...]
) -> None:
    asked = {"r": 8, "alpha": 16, "dropout": dropout, "targets": targets}
    options: dict[str, Any] = {"batch": 4, "dims": {"axis1": 16}, **SETTINGS[setting]}
    expected = Study(recorded_falcon(targets, dropout), Request(**options)).report.peak
    here = Study(recorded_falcon((), 0.0), Request(lora=lora_text(asked), **options)).report.peak
    assert (here.live_bytes, here.phase) == (expected.live_bytes, expected.phase)


def test_products_that_are_written_out_are_not_packed_by_torchao() -> None:
    request = Request(batch=4, dims={"axis1": 16}, mode="infer", quantize="int8wo")
    with pytest.raises(UsageError, match="multiplies by its transpose itself") as error:
        _ = Study(recorded_falcon((), 0.0), request).report
    assert error.value.code == "SM188"


def test_a_module_of_another_kind_with_such_a_product_is_no_layer() -> None:
    class Scores(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(WORDS, WIDTH))

        def forward(self, x: Any) -> Any:
            return x @ self.weight.T

    with torch.device("meta"):
        exported = torch.export.export(torch.nn.Sequential(Scores()), (torch.zeros(4, WIDTH),), strict=False)
    with pytest.raises(UsageError) as error:
        live(exported, optimizer="sgd", lora="r=4,targets=all-linear")
    assert error.value.code == "SM187"


@cache
def recorded_dora(targets: tuple[str, ...], dropout: float) -> Any:
    with torch.device("meta"):
        model = with_adapters(decoder().train(), targets, 8, 16, dropout, True)
        return recorded(model, torch.zeros(4, 16, dtype=torch.int64))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_magnitudes_of_dora(setting: str, dropout: float) -> None:
    """Beside a recording: an export drops casts that do nothing in float32, but do under autocast."""
    targets = ("q_proj", "v_proj", "up")
    asked = {"r": 8, "alpha": 16, "dropout": dropout, "targets": targets, "dora": True}
    options = SETTINGS[setting]
    here = live(program(), lora=asked, **options)
    peak = Study(recorded_dora(targets, dropout), Request(batch=4, dims={"axis1": 16}, **options)).report.peak
    assert here == (peak.live_bytes, peak.phase)


def test_dora_trains_the_transposed_weight_of_conv1d() -> None:
    """peft/utils/other.py, `transpose`, makes a parameter of the weight of a Conv1D where dropout has the base's
    product computed once more: the graph that the loss holds has its gradient, until the next loss."""

    from staticmem.recording.objects import model_of

    class Conv1D(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(WIDTH, 3 * WIDTH))
            self.bias = torch.nn.Parameter(torch.zeros(3 * WIDTH))

        def forward(self, x: Any) -> Any:
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(4, 16, 3 * WIDTH)

    with torch.device("meta"):
        module, x = torch.nn.Sequential(Conv1D()), torch.zeros(4, 16, WIDTH)
        exported = torch.export.export(module, (x,), strict=False)
    asked = {"r": 4, "targets": "0", "dora": True}

    def gradients(**options: Any) -> int:
        trace = Study(model_of(exported, None)[0], Request(mode="train", **options)).result.trace
        backward = dict(trace.phases)["backward"]
        return sum(
            b.shape in ((WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH)) and b.born > backward and b.died is None
            for b in trace.buffers
        )

    assert gradients(lora={**asked, "dropout": 0.1}) == 1
    assert gradients(lora=asked) == 0
    assert gradients(lora={**asked, "dropout": 0.1}, dtype="bf16") == 0  # a copy in float32 is no parameter


@pytest.mark.parametrize(
    ("targets", "options"),
    [("tokens", {}), ("up", {"compile": True}), ("up", {"parallel": "tp", "devices": 2}), ("up", {"quantize": "nf4"})],
)
def test_dora_is_refused_where_it_is_not_covered(targets: str, options: Mapping[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        live(program(), optimizer="adamw", lora=f"targets={targets},dora=true", **options)
    assert error.value.code == "SM187"


def test_adapters_stay_in_float32_where_the_model_is_cast() -> None:
    """PEFT's `cast_adapter_dtype`; with `autocast_adapter_dtype=False` they have the type of their layers."""
    exported, asked = program(), "r=8,alpha=16,targets=q_proj+v_proj"
    numbers = 2 * 2 * 8 * (WIDTH + WIDTH)

    def of(text: str) -> Any:
        return staticmem.analyze(exported, dtype="bf16", optimizer="adamw", lora=text)

    trained = {"float32": of(asked), "bfloat16": of(f"{asked},dtype=base")}
    for name, report in trained.items():
        assert report.parameters.trainable_count == numbers
        assert report.parameters.by_dtype.keys() == {"bfloat16", name}


def test_nothing_is_saved_for_frozen_weights() -> None:
    """B alone at the end: what leads to it needs no gradient, so no earlier layer saves anything."""
    head = live(program(), optimizer="sgd", lora="r=1,targets=head")[0]
    both = live(program(), optimizer="sgd", lora="r=1,targets=q_proj+head")[0]
    assert head + 2 * 4 * 16 * WIDTH * 4 < both


def test_all_linear_takes_the_head_of_a_model_that_is_not_of_transformers() -> None:
    asked = {"optimizer": "sgd", "lora": "r=4,alpha=4,targets=all-linear"}
    assert live(program(), **asked) == live(program(ALL, 4, 4), optimizer="sgd")


def test_the_head_is_found_behind_embeddings_that_scale() -> None:
    """Gemma's module multiplies what it looks up: it is no plain embedding, and its table has the rows of the head."""
    from staticmem.passes.requested.layers import layers_of, output_head

    class Scaled(torch.nn.Embedding):  # type: ignore[misc]
        def forward(self, ids: Any) -> Any:
            return super().forward(ids) * 8.0

    with torch.device("meta"):
        model = decoder()
        model.tokens = Scaled(WORDS, WIDTH)
    graph = Study(recorded(model, torch.zeros(4, 16, dtype=torch.int64)), Request(batch=4, dims={"axis1": 16})).graph
    assert output_head(graph, layers_of(graph)) == "head"


def test_a_pattern_has_to_match_the_whole_path() -> None:
    by_pattern = live(program(), optimizer="sgd", lora=r"r=4,targets=blocks\.1\..*_proj")
    assert by_pattern < live(program(), optimizer="sgd", lora="r=4,targets=q_proj+v_proj")
    with pytest.raises(UsageError, match="matches no layer") as error:
        live(program(), optimizer="sgd", lora=r"r=4,targets=\w+_proj")
    assert error.value.code == "SM187"


def test_no_match_names_what_is_close() -> None:
    with pytest.raises(UsageError, match="matches no layer") as error:
        live(program(), optimizer="sgd", lora="r=4,targets=qproj")
    assert error.value.code == "SM187"
    assert "q_proj" in error.value.hint


def test_a_module_that_is_no_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="which is LayerNorm") as error:
        live(program(), optimizer="sgd", lora="r=4,targets=norm")
    assert error.value.code == "SM187"


def test_saved_modules_are_trained_in_a_copy() -> None:
    """`modules_to_save`: weight, gradient and two states of the head in float32, beside the frozen weight."""
    plain = live(program(), optimizer="adamw", lora="r=4,targets=q_proj")[0]
    saved = staticmem.analyze(program(), optimizer="adamw", lora="r=4,targets=q_proj,save=head")
    assert saved.parameters.trainable_count == 2 * 4 * 2 * WIDTH + WIDTH * WORDS
    assert saved.peak.live_bytes >= plain + 3 * 4 * WIDTH * WORDS


def test_embeddings_that_require_a_gradient_live_until_the_next_loss() -> None:
    """The leaf, its gradient in the forward of the next step, and the whole way back to it."""
    plain = staticmem.analyze(program(), mode="train", lora="r=4,targets=head")
    asked = staticmem.analyze(program(), mode="train", lora="r=4,targets=head,input_grads=true")
    leaf = 4 * 16 * WIDTH * 4
    assert asked.peak.live_bytes >= plain.peak.live_bytes + 2 * leaf


WRONG = ["", "r=8", "targets=", "r=0,targets=a", "r=1.5,targets=a", "rank=8,targets=a", "r=8,r=8,targets=a"]
WRONG += [
    "dropout=1,targets=a",
    "dtype=int8,targets=a",
    "targets=(",
    "input_grads=maybe,targets=a",
    "targets=a" * 900,
    "dora=2,targets=a",
]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_texts_are_errors_that_say_what_is_allowed(text: str) -> None:
    with pytest.raises(UsageError) as error:
        lora_text(text)
    assert error.value.code == "SM186"
    assert error.value.hint


def test_texts_and_mappings_are_the_same() -> None:
    text = "r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj,save=head,input_grads=true"
    keys = {"r": 16, "alpha": 32, "dropout": 0.05, "targets": ["q_proj", "v_proj"], "save": ["head"]}
    assert lora_text({**keys, "input_grads": True}) == text
    adapters = lora_of(text)
    assert (adapters.scaling, adapters.targets, adapters.input_grads) == (2.0, ("q_proj", "v_proj"), True)


def recorded(module: Any, *inputs: Any) -> Any:
    from staticmem.frontends.recorded import RecordedModel
    from staticmem.recording.record import record

    return RecordedModel("<m>", record(module, inputs), "pt2")


def test_what_views_a_layer_without_adapter_ends_with_its_sum() -> None:
    """transformers' Conv1D gives a view of a product. With an adapter the layer gives a sum, where the product ends,
    however long the recorded code held the view: the same peak as of a file without a recording, and by hand."""
    width, rows = 256, 4 * 64

    class Conv1D(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (
                torch.nn.Parameter(torch.zeros(width, width)),
                torch.nn.Parameter(torch.zeros(width)),
            )

        def forward(self, x: Any) -> Any:
            return torch.addmm(self.bias, x.view(-1, width), self.weight).view(x.shape)

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = Conv1D(), Conv1D(), Conv1D()

        def forward(self, x: Any) -> Any:
            a = self.first(x)
            b = self.second(a)
            return self.last(a * b + a)

    with torch.device("meta"):
        module, x = Net(), torch.zeros(4, 64, width)
    options: dict[str, Any] = {"mode": "infer", "outputs": "dropped", "lora": "r=8,targets=first+second"}
    exported = live(torch.export.export(module.eval(), (x,), strict=False), **options)
    request = Request(batch=4, **options)
    peak = Study(recorded(module, x), request).report.peak
    assert (peak.live_bytes, peak.phase) == exported
    adapters, layer = 2 * 2 * 8 * width, width * width + width
    # x, a, and in the second adapter its product, that of B, and the scaled one
    assert peak.live_bytes == 4 * (3 * layer + adapters + 5 * rows * width)


def test_variables_of_a_recorded_module_end_with_it_where_a_cast_copies() -> None:
    """`cos = angles.cos(); return cos.to(x.dtype)`: in float32 the cast gave the tensor itself, in bf16 a copy."""

    class Rotary(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.zeros(64, WIDTH))

        def forward(self, x: Any) -> Any:
            cos = self.angles.float().cos()
            return cos.to(x.dtype)

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.rotary, self.layer = Rotary(), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            cos = self.rotary(x)
            return self.layer(x) * cos

    with torch.device("meta"):
        model = recorded(Net(), torch.zeros(2, 64, WIDTH))
    for dtype, size in (("bf16", 4), (None, 4)):
        trace = Study(model, Request(mode="infer", batch=2, dtype=dtype)).result.trace
        buffers, names = trace.buffers, [kernel.name for kernel in trace.kernels]
        (cos,) = [k for k, kernel in enumerate(buffers.kernels) if kernel >= 0 and names[kernel] == "aten.cos.default"]
        product = min(k for k, kernel in enumerate(buffers.kernels) if kernel >= 0 and "addmm" in names[kernel])
        assert buffers.nbytes[cos] == size * 64 * WIDTH
        assert (buffers.died[cos] < buffers.born[product]) == (dtype is not None)
