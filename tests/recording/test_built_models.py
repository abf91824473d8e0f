"""Architectures that a package builds, with a package of one model in place of timm: the process, what is kept."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import staticmem
from staticmem.child import FailedError, RunError, environment
from staticmem.cli.main import main
from staticmem.errors import StaticmemError
from staticmem.frontends import open_model, recording_format
from staticmem.frontends.architectures import Architecture
from staticmem.frontends.recorded import RecordedModel
from staticmem.recording import architecture_child, architectures, example_inputs, hub, kept, labels, model_inputs
from staticmem.studies import Request, Study, workers

torch = pytest.importorskip("torch")

PACKAGE = '''
"""A package with the functions of timm that are called."""
import time
import torch

class Net(torch.nn.Module):
    default_cfg = {"input_size": (3, 32, 32)}

    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Conv2d(3, width, 3, padding=1)
        self.rate = [x.item() for x in torch.linspace(0, 0.1, 3)]
        self.last = torch.nn.Linear(width, 10)

    def forward(self, x):
        x = self.first(x).relu()
        if x.shape[2] > 64:
            x = torch.nn.functional.avg_pool2d(x, 2)
        return self.last(x.mean((2, 3)))

def is_model(name):
    return name != "absent"

def create_model(name, pretrained, **more):
    if more:
        raise TypeError("img_size")
    if name == "slow":
        time.sleep(1000)
    if name == "crash":
        import os
        os._exit(3)
    if name == "ended":
        import os
        os.kill(os.getpid(), 15)
    if name == "huge":
        return Net(1 << 44)
    return Net(16)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "cache_folder", lambda: str(tmp_path / "cache" / "staticmem"))


def own_net() -> Any:
    names: dict[str, Any] = {}
    exec(PACKAGE, names)
    rates = torch.zeros(3)
    with torch.device("meta"), mock.patch.object(torch, "linspace", return_value=rates):
        return names["Net"](16)


def test_sets_of_texts_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    command = [sys.executable, "-c", "print({str(n) for n in range(20)})"]
    orders = [subprocess.run(command, env=environment(), capture_output=True, check=True).stdout for _ in range(2)]
    assert len(set(orders)) == 1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("package")
def test_the_figures_of_the_module(tmp_path: Path) -> None:
    """Recorded on demand, kept, recorded again where the code takes another way, and exported."""
    words: dict[str, Any] = {"batch": 5, "optimizer": "adam"}
    small, large = (torch.empty(5, 3, side, side, device="meta") for side in (48, 96))
    expected = staticmem.analyze(own_net(), (small,), **words).peak.live_bytes
    report = staticmem.analyze("timm:net", resolution=48, **words)
    assert report.peak.live_bytes == expected
    assert (report.model.path, report.model.format, report.model.sha256) == ("timm:net", "timm", None)
    beyond = staticmem.analyze("timm:net", resolution=96, **words).peak.live_bytes
    assert beyond == staticmem.analyze(own_net(), (large,), **words).peak.live_bytes
    with mock.patch("staticmem.child.run", side_effect=AssertionError("it was kept")):
        assert staticmem.analyze("timm:net", resolution=48, **words).peak.live_bytes == expected
        assert staticmem.analyze("timm:net", resolution=96, **words).peak.live_bytes == beyond
        study = Study.open("timm:net", Request(**words))
        by_size = [study.ask(Request(**words, resolution=side)).lifetimes.peak_bytes for side in (48, 96, 48)]
    assert by_size == [expected, beyond, expected]
    file = tmp_path / "net.pt2"
    assert main(["export", "timm:net", "-o", str(file)]) == 0
    assert staticmem.analyze(file, resolution=48, **words).peak.live_bytes == expected


@pytest.mark.exhaustive
@pytest.mark.usefixtures("package")
def test_an_export_has_the_recording_beside_the_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "net.pt2")
    assert main(["export", "timm:net", "-o", file]) == 0
    assert isinstance(open_model(file), RecordedModel)
    with mock.patch("staticmem.recording.architectures.document_of", side_effect=RunError("it failed", "Why", "")):
        assert main(["export", "timm:net", "-o", file, "--force"]) == 0  # the graph alone, and a line that says so
    assert not isinstance(open_model(file), RecordedModel)
    assert "Without a recording of the code: it failed. Why" in capsys.readouterr().err


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("absent", "SM145", "no such model"),
        ("huge", "SM147", "parameters"),
        ("crash", "SM148", "exit code 3"),
        ("ended", "SM148", "run the command again"),
    ],
)
def test_what_cannot_be_built(name: str, code: str, words: str) -> None:
    with pytest.raises(StaticmemError, match=r"\w") as error:
        staticmem.analyze(f"timm:{name}")
    assert error.value.code == code
    assert words in f"{error.value.what} {error.value.why} {error.value.hint}"
    assert error.value.hint


def test_a_graph_that_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint says what needs no graph."""
    refused = StaticmemError("torch.export cannot export Net", "RuntimeError: a constant", "Another way")
    monkeypatch.setattr("staticmem.recording.export.graph_file", mock.Mock(side_effect=refused))
    built = example_inputs.Built(own_net())
    job = {"kind": "pt2", "train": True, "file": str(tmp_path / "net.pt2")}
    with pytest.raises(FailedError) as error:
        architecture_child._written(job, built)
    assert error.value.kind == "graph"
    assert "staticmem analyze" in architectures.FAILURES["graph"].hint


def test_a_limit_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_child, "MOST_MODULES", 10)
    with pytest.raises(FailedError, match="more than 10 modules"), architecture_child._bounded():
        torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(20)))
    torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(20)))


@pytest.mark.usefixtures("package")
def test_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "TIMEOUT", 0.5)
    with pytest.raises(StaticmemError, match=r"longer than 0\.5 seconds") as error:
        staticmem.analyze("timm:slow")
    assert error.value.code == "SM148"


class _Labelled(torch.nn.Module):  # type: ignore[misc, name-defined]
    """As models of transformers: a mapping with the loss first, whose scores are cast to float32 for it."""

    class Output(dict):  # type: ignore[type-arg]
        loss = property(lambda self: self["loss"])

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 500)

    def forward(self, x: Any, labels: Any) -> Any:
        logits = self.head(x)
        return self.Output(loss=torch.nn.functional.cross_entropy(logits.float(), labels), logits=logits)


def test_a_loop_holds_the_outputs_beside_the_loss_of_the_model() -> None:
    """In bfloat16 the scores are no part of autograd's graph: only `outputs` has them in the backward."""
    from staticmem.recording.record import record

    with torch.device("meta"):
        model = _Labelled().to(torch.bfloat16)
        inputs = torch.zeros(32, 64, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.int64)
        document = record(model, inputs, loss=labels.loss_of)

    def peak(outputs: str) -> int:
        request = Request(batch=32, mode="train", optimizer="sgd", outputs=outputs)
        return Study(RecordedModel("<m>", document, "pt2"), request).report.peak.live_bytes

    logits = 32 * 500 * 2
    assert peak("held") - peak("dropped") == -(-logits // 512) * 512


class _Decoder(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Scores of tokens, and a loss by the library where there are labels."""

    loss_type: str | None = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(500, 64), torch.nn.Linear(64, 500, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Any, labels: Any = None) -> Any:
        scores = self.head(self.table(ids))
        return scores if labels is None else self.loss_function(scores, labels)

    def get_output_embeddings(self) -> Any:
        return self.head

    def get_input_embeddings(self) -> Any:
        return self.table


class _Unnamed(_Decoder):
    """As GPT2LMHeadModel: its name has no key of a loss, and the library takes that of causal models."""

    loss_type = None


class _OwnLoss(_Decoder):
    """As T5: the code has a loss of its own, whatever the library would take."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        scores = self.head(self.table(ids))
        return scores if labels is None else torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def test_a_model_of_transformers_trains_with_its_own_loss() -> None:
    """Without a word on it the loss is the one that its code computes from labels; `--loss` has another."""
    from staticmem.recording.record import record

    reports = {}
    for cls in (_Decoder, _Unnamed, _OwnLoss):
        with torch.device("meta"):
            module = cls().to(torch.bfloat16)
            document = record(module, (torch.zeros(4, 32, dtype=torch.int64),))
        document |= labels.loss_function(module)
        model = RecordedModel("<m>", document, "transformers")
        for loss in ("auto", "transformers", "cross-entropy"):
            reports[cls, loss] = Study(model, Request(batch=4, optimizer="sgd", loss=loss)).report
    assert reports[_Decoder, "auto"].peak == reports[_Decoder, "transformers"].peak
    assert reports[_Decoder, "auto"].scenario.loss == "causal-lm"
    assert reports[_Unnamed, "auto"].peak == reports[_Decoder, "auto"].peak
    assert reports[_Decoder, "auto"].peak.live_bytes > reports[_Decoder, "cross-entropy"].peak.live_bytes
    (said,) = [note.text for note in reports[_Decoder, "auto"].assumptions if note.code == "SM330"]
    assert said.startswith("loss: transformers, which is causal-lm")
    assert reports[_OwnLoss, "auto"].peak == reports[_OwnLoss, "cross-entropy"].peak


def document_of_decoder() -> dict[str, Any]:
    """The recording of `_Decoder` in bfloat16, without labels."""
    from staticmem.recording.record import record

    with torch.device("meta"):
        module = _Decoder().to(torch.bfloat16)
        document: dict[str, Any] = record(module, (torch.zeros(4, 32, dtype=torch.int64),))
    return document | labels.loss_function(module)


def test_a_loss_that_cannot_be_recorded_casts_the_scores_all_the_same() -> None:
    """The step of a model whose recording lacks its own loss is that of `causal-lm`, and both facts are said."""
    document = document_of_decoder()
    of_library = Study(RecordedModel("<m>", document, "transformers"), Request(batch=4, optimizer="sgd")).report
    without = RecordedModel("<m>", {**document, "unlabelled": "it reads values"}, "transformers")
    report = Study(without, Request(batch=4, optimizer="sgd")).report
    assert report.scenario.loss == "causal-lm"
    assert report.peak == of_library.peak
    said = [note.text for note in report.assumptions if note.code == "SM330"]
    assert [text.split(" ")[1] for text in said] == ["not", "transformers,"]


@pytest.mark.parametrize("words", [{"compile_optimizer": True}, {"optimizer": "torchao-adamw-8bit"}])
def test_a_compiled_optimizer_leaves_the_loss_of_transformers(words: dict[str, Any]) -> None:
    """The model's code runs as it is: its scores are cast to float32."""
    model = RecordedModel("<m>", document_of_decoder(), "transformers")
    asked = Request(batch=4, **{"optimizer": "adamw", **words})
    assert Study(model, asked).scenario.loss == "causal-lm"
    assert Study(model, replace(asked, optimizer="adamw", compile=("all",))).scenario.loss == "auto"


def test_a_head_that_the_config_does_not_tie_has_its_own_weight() -> None:
    with torch.device("meta"):
        module = _Decoder()
        assert sum(p.numel() for p in module.parameters()) == 500 * 64
        architecture_child._give_head_its_own_weight(module)
    assert sum(p.numel() for p in module.parameters()) == 2 * 500 * 64


def test_parts_that_loading_keeps_in_float32_have_it() -> None:
    """Patterns of the class are searched in names, buffers that are saved included; a tied weight stays one."""
    with torch.device("meta"):
        module = _Decoder().to(torch.float16)
    module.second = module.head
    module.register_buffer("bias_of_head", torch.zeros(4, dtype=torch.float16, device="meta"))
    module.register_buffer("head_of_none", torch.zeros(4, dtype=torch.float16, device="meta"), persistent=False)
    module._get_dtype_plan = lambda dtype: {"h*d": torch.float32} if dtype == torch.float16 else {}
    architecture_child._widen_as_loading_does(module, torch.float32)
    assert {p.dtype for p in module.parameters()} == {torch.float16}
    architecture_child._widen_as_loading_does(module, torch.float16)
    assert module.head.weight is module.second.weight is module.table.weight
    assert (module.head.weight.dtype, module.bias_of_head.dtype) == (torch.float32, torch.float32)
    assert module.head_of_none.dtype == torch.float16
    assert isinstance(module.head.weight, torch.nn.Parameter)


def test_a_part_of_a_config_has_the_type_that_stands_beside_it() -> None:
    """Of a model that reads images too the type is often said once, for the whole."""

    class Config:
        def __init__(self, dtype: Any, text: Any = None) -> None:
            self.dtype, self.text = dtype, text

        def get_text_config(self) -> Any:
            return self.text or self

    half, wide = torch.bfloat16, torch.float32
    for own, of_all, expected in ((None, half, half), (wide, half, wide), (half, None, half), (None, None, None)):
        text = Config(own)
        assert architecture_child._dtype_of(text, Config(of_all, text)) == expected
    assert architecture_child._dtype_of(whole := Config(None, Config(half)), whole) == half


def test_what_a_config_does_not_say_of_images_and_embeddings() -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv2d(5, 8, 3))
    assert model_inputs.channels(module) == 5
    module.get_output_embeddings = lambda: None  # and as a network of images it has no get_input_embeddings
    architecture_child._give_head_its_own_weight(module)


def test_constructors_that_read_numbers_from_tensors() -> None:
    """As RegNet's of torchvision; positions that are added to a weight stay on the meta device."""

    class Stages(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            depths = torch.diff(torch.tensor([0, 1, 3])).tolist()
            widths = (torch.arange(2) * 8 + 8).int().tolist()
            self.stages = torch.nn.ModuleList(torch.nn.Linear(4, widths[i]) for i in (0, 1) for _ in range(depths[i]))

    class Positions(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(4, 2) + torch.arange(4)[:, None])

    stages = architecture_child._on_meta(Stages)
    assert [tuple(p.shape) for p in stages.parameters() if p.dim() == 2] == [(8, 4), (16, 4), (16, 4)]
    for module in (stages, architecture_child._on_meta(Positions)):
        assert {p.device.type for p in module.parameters()} == {"meta"}
    with pytest.raises(RuntimeError, match="own"):
        architecture_child._on_meta(mock.Mock(side_effect=RuntimeError("its own")))


def test_the_side_of_images_of_torchvision() -> None:
    class Package:
        def get_model_weights(self, name: str) -> list[Any]:
            made = mock.Mock(crop_size=[518], resize_size=[518])
            return [] if name == "new" else [mock.Mock(transforms=lambda: made)]

    built = torch.nn.Identity()
    assert architecture_child._image_side(Package(), "net", built) == 518
    assert architecture_child._image_side(Package(), "new", built) == 224
    built.image_size = 384
    assert architecture_child._image_side(Package(), "net", built) == 384


def test_spectrograms_have_the_sizes_of_the_config() -> None:
    """As of the Audio Spectrogram Transformer, whose input has the name that others have for samples."""

    class Config:
        is_encoder_decoder = False

        def __init__(self, **sizes: int) -> None:
            vars(self).update(sizes)

        def get_text_config(self) -> Any:
            return self

    class Model:
        main_input_name, dtype = "input_values", torch.float16

        def forward(self, input_values: Any) -> Any:
            return input_values

    example = example_inputs.Example({"sizes": None, "options": {}})
    for config, shape, axes in (
        (Config(num_mel_bins=128, max_length=1024), (2, 1024, 128), {0: "batch"}),
        (Config(), (2, 16000), {0: "batch", 1: "samples"}),
    ):
        built = model_inputs.ModelInputs(Model(), config, example, {}).make()
        assert tuple(built.kwargs["input_values"].shape) == shape
        assert built.axes == [axes]


def test_sound_beside_text_goes_in() -> None:
    """The text alone would be told as the whole; what the code asks for is added, as its text or its lines name it."""

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        main_input_name, dtype = "input_ids", torch.float32

        def forward(self, input_ids: Any, input_features: Any, bbox: Any = None, second_mask: Any = None) -> Any:
            """
            Args:
                input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
                second_mask (`torch.BoolTensor` of shape `(batch_size, config.slots)`, *optional*):
            Returns:
                input_ids (`torch.FloatTensor` of shape `(1,)`)
            """
            if bbox is None:
                raise ValueError("You have to specify bbox")
            return input_features.sum() + bbox.sum() + second_mask.sum()

    config = SimpleNamespace(is_encoder_decoder=False, max_position_embeddings=64, num_mel_bins=80, slots=7)
    config.get_text_config = lambda: config
    inputs = model_inputs.ModelInputs(Model(), config, example_inputs.Example({"sizes": None, "options": {}}), {})
    made = inputs.make()
    document = architecture_child._recorded(made, {})
    shapes = {name: shape for name, _, shape in document["inputs"]}
    assert shapes == {
        "input_ids": ["batch", "seq"],
        "input_features": ["batch", "frames", 80],
        "bbox": ["batch", "seq", 4],
        "second_mask": ["batch", 7],
    }


class _Cache:
    """Keys and values, as an object of its own."""

    def __init__(self, keys: Any) -> None:
        self.layers = [{"keys": keys}]


class _Cached(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A decoder that takes labels, and gives back its keys where its config says so."""

    main_input_name, dtype = "input_ids", torch.float32

    def __init__(self, use_cache: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache, is_encoder_decoder=False)
        self.config.get_text_config = lambda: self.config
        self.table, self.head = torch.nn.Embedding(500, 64), torch.nn.Linear(64, 500, bias=False)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        hidden = self.table(input_ids)
        keys = torch.cat([torch.empty(0, device=hidden.device), hidden * 2], dim=0) if self.config.use_cache else None
        scores = self.head(hidden if keys is None else hidden + keys)
        result = _Labelled.Output(logits=scores)
        if keys is not None:
            result["past_key_values"] = _Cache(keys)
        if labels is not None:
            result["loss"] = torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())
        return result


class _Unlabelled(_Cached):
    """Its loss reads what labels are."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        if labels is not None and labels.sum() > 0:
            raise ValueError("labels")
        return super().forward(input_ids)


def built(module: Any, **options: str) -> example_inputs.Built:
    with torch.device("meta"):
        made = module()
    example = example_inputs.Example({"sizes": {"batch": 4, "seq": 32}, "options": {}})
    inputs = model_inputs.ModelInputs(made, made.config, example, options)
    inputs.make()
    labels.add_labels(inputs, options.get("labels"))
    architecture_child._set_cache(inputs.built, [made.config], options.get("use_cache"))
    return inputs.built


def recorded(module: Any = _Cached, **options: str) -> RecordedModel:
    return RecordedModel(
        "<m>", architecture_child._recorded(built(module, **options), {"options": options}), "transformers"
    )


def test_labels_go_in_in_training_alone() -> None:
    """And the model's own loss comes out. An inference of the same recording has neither."""
    model = recorded()
    report = Study(model, Request(batch=4, optimizer="sgd")).report
    assert (report.scenario.loss, report.model.outputs[0].name) == ("recorded", "loss")
    assert [spec.name for spec in report.model.inputs] == ["input_ids", "labels"]
    (said,) = [note.text for note in report.assumptions if note.code == "SM330"]
    assert said.startswith("loss: that of _Cached itself, from labels")
    assert Study(model, Request(batch=4, optimizer="sgd", loss="transformers")).report.peak == report.peak
    inference = Study(model, Request(batch=4, mode="infer")).report
    assert [spec.name for spec in inference.model.inputs] == ["input_ids"]
    assert [spec.name for spec in inference.model.outputs] == ["logits", "past_key_values.layers.0.keys"]
    with_loss = Study(recorded(labels="yes", use_cache="no"), Request(batch=4, mode="infer")).report
    assert [spec.name for spec in with_loss.model.inputs] == ["input_ids", "labels"]


def test_a_loop_holds_the_cache_that_the_config_asks_for() -> None:
    words: dict[str, Any] = {"batch": 64, "optimizer": "sgd"}
    outputs = {word: Study(recorded(use_cache=word), Request(**words)).report.model.outputs for word in ("yes", "no")}
    assert [spec.name for spec in outputs["yes"]] == ["loss", "logits", "past_key_values.layers.0.keys"]
    assert [spec.name for spec in outputs["no"]] == ["loss", "logits"]
    assert Study(recorded(), Request(**words)).report.model.outputs == outputs["yes"]
    for word, names in ((None, ["logits", "past_key_values.layers.0.keys"]), ("no", ["logits"])):
        options = {} if word is None else {"use_cache": word}
        inferred = Study(recorded(**options), Request(batch=4, mode="infer")).report.model.outputs
        assert [spec.name for spec in inferred] == names


def test_a_loss_that_reads_labels_is_told() -> None:
    """The model is recorded without it then, unless somebody asks for it."""
    report = Study(recorded(_Unlabelled), Request(batch=4, optimizer="sgd")).report
    assert report.scenario.loss == "cross-entropy"
    texts = [note.text for note in report.assumptions if note.code == "SM330"]
    assert any(text.startswith("loss: not that of _Unlabelled itself, which cannot be recorded") for text in texts)
    with pytest.raises(StaticmemError, match="cannot be recorded"):
        recorded(_Unlabelled, labels="yes")


def test_the_step_decides_what_goes_in_and_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loss is of a model without labels; checkpoints and the Trainer switch the cache off. What the name says
    wins, and each is recorded once."""
    asked: list[dict[str, str]] = []

    def document_of(architecture: Architecture, sizes: Any, described: Any, part: str) -> Any:
        asked.append(dict(architecture.options))
        options = dict(architecture.options)
        return architecture_child._recorded(built(_Cached, **options), {"options": options}), []

    monkeypatch.setattr(architectures, "document_of", document_of)
    monkeypatch.setattr(architectures, "_check_installed", lambda architecture: None)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    words: dict[str, Any] = {"batch": 4, "optimizer": "sgd"}
    study = Study.open(str(config), Request(**words))
    steps: tuple[dict[str, Any], ...] = (
        {},
        {"loss": "mean"},
        {"loss": "transformers"},
        {"checkpoint": "Embedding"},
        {"loss": "mean"},
    )
    names = [[spec.name for spec in study.ask(Request(**words, **more)).report.model.inputs] for more in steps]
    study.ask(Request(**words, preset="hf-trainer"))
    assert names == [["input_ids", "labels"], ["input_ids"], *[["input_ids", "labels"]] * 2, ["input_ids"]]
    assert asked == [{}, {"labels": "no"}, {"use_cache": "no"}]
    Study.open(f"transformers:{config},labels=yes", Request(**words, loss="mean"))
    assert asked[3:] == [{"labels": "yes"}]


def test_the_folder_of_a_config_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Architecture] = []
    monkeypatch.setattr(architectures, "_check_installed", lambda architecture: None)
    describe = hub.describe

    def described(architecture: Architecture) -> hub.Described:
        read.append(architecture)
        return describe(architecture)

    monkeypatch.setattr(hub, "describe", described)
    document = architecture_child._recorded(built(_Cached), {})
    monkeypatch.setattr(kept.Kept, "document", lambda self: document)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    assert Study.open(str(config), Request(batch=4, mode="infer")).report.model.inputs
    assert len(read) == 1


def test_other_processes_open_a_name_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of its config alone would be another model; what is in memory alone has none."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    monkeypatch.setattr(architectures, "_check_installed", lambda architecture: None)
    monkeypatch.setattr(architectures, "document_of", lambda *_: (architecture_child._recorded(built(_Cached), {}), []))
    name = f"transformers:{config},seq=64,labels=no"
    assert workers.name_to_reopen(Study.open(name, Request(batch=4)).model) == name
    monkeypatch.chdir(tmp_path)
    assert workers.name_to_reopen(Study.open("transformers:config.json,seq=64", Request(batch=4)).model) == (
        f"transformers:{tmp_path}/config.json,seq=64"
    )
    path = Path(__file__).parents[2] / "models" / "resnet18.pt2"
    assert workers.name_to_reopen(open_model(str(path))) == str(path)
    assert workers.name_to_reopen(RecordedModel("<m>", document_of_decoder(), "pt2")) is None


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ({"mode": "infer"}, [[[False, None]]]),
        ({"optimizer": "sgd"}, [[[True, None]]]),
        ({"optimizer": "sgd", "amp": "bf16"}, [[[True, "bfloat16"]]]),
        ({"optimizer": "sgd", "dtype": "bf16"}, [[[True, None]]]),
        ({"mode": "infer", "dtype": "fp16"}, [[[False, None]]]),
    ],
)
def test_a_question_records_its_mode_alone(words: dict[str, Any], modes: Any) -> None:
    """And has the figures of the whole recording. The loss casts scores, which inference does not tell (SM119 once)."""
    scenario = Request(**words).scenario()[0]
    cast = scenario.dtype is not None
    part = recording_format.part_of(scenario.training, scenario.amp is not None, cast)
    whole, alone = (
        RecordedModel("<m>", architecture_child._recorded(built(_Cached), {"part": name}), "transformers")
        for name in (recording_format.ALL, part)
    )
    assert [program["modes"] for program in alone.document["programs"]] == modes
    assert ("halved" in alone.document) is cast
    expected, given = (Study(model, Request(batch=4, **words)).report for model in (whole, alone))
    assert given.peak.live_bytes == expected.peak.live_bytes
    assert [note.code for note in given.assumptions] == [note.code for note in expected.assumptions]


def test_another_mode_is_recorded_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[str] = []

    def document_of(architecture: Architecture, sizes: Any, described: Any, part: str) -> Any:
        parts.append(part)
        return architecture_child._recorded(built(_Cached), {"part": part}), []

    monkeypatch.setattr(architectures, "document_of", document_of)
    monkeypatch.setattr(architectures, "_check_installed", lambda architecture: None)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    study = Study.open(str(config), Request(batch=4, mode="infer"))
    asked: tuple[dict[str, Any], ...] = ({"optimizer": "sgd"}, {"mode": "infer"}, {"optimizer": "sgd", "amp": "fp16"})
    for words in asked:
        assert study.ask(Request(batch=2, **words)).report.peak.live_bytes
    assert parts == ["inference", "training", "training under autocast"]


def test_code_that_does_not_run_under_autocast_is_recorded_without() -> None:
    class Refuses(_Cached):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            result = super().forward(input_ids, labels)
            if result["logits"].dtype is not torch.float32:
                raise RuntimeError("no autocast")
            return result

    part = recording_format.part_of(True, True, False)
    model = RecordedModel("<m>", architecture_child._recorded(built(Refuses), {"part": part}), "transformers")
    report = Study(model, Request(batch=4, optimizer="sgd", amp="bf16")).report
    assert "SM328" in [note.code for note in report.warnings]
