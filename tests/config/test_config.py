"""Configs: what they say, where they are found, and what is wrong in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from staticmem.config import discover, fields, locate, root
from staticmem.config.config import Budget, Config, load, of_node
from staticmem.config.root import schema as config_schema
from staticmem.config.template import template
from staticmem.documents import DocumentError, parse_yaml
from staticmem.errors import StaticmemError
from staticmem.report.schema import dumps, schema
from staticmem.scenario.request import FIELDS
from staticmem.units import parse_bytes

ROOT = Path(__file__).parents[2]
EXAMPLE = """\
version: 1
model: {path: resnet50.pt2, dims: {}}
train: {optimizer: adam, batch: 32, resolution: 224, loss: auto, amp: none}
gpus: [h100-sxm-80gb, 24GB]
what_if:
  batch: [16, 32, 64]
  resolution: [224, 320x480]
  dims: {seq: [512, 1024]}
  optimizer: [sgd, adam]
  checkpoint: [none, Bottleneck, [layer1.*, layer2.*]]
allocator: {conf: "expandable_segments:True"}
budgets:
  - {metric: device, limit: 40 GiB}
  - {metric: live, limit: 1048576, level: warning}
"""


def parsed(text: str) -> Config:
    return of_node(parse_yaml(text, "staticmem.yaml"), "")


def test_the_example(tmp_path: Path) -> None:
    path = tmp_path / "staticmem.yaml"
    path.write_text(EXAMPLE)
    config = load(str(path))
    assert config.model == str(tmp_path / "resnet50.pt2")
    assert config.options == {
        "mode": "train", "optimizer": "adam", "batch": 32, "resolution": (224, 224), "loss": "auto", "amp": "none",
        "alloc_conf": "expandable_segments:True",
    }  # fmt: skip
    assert config.gpus == ("h100-sxm-80gb", "24GB")
    assert config.axes == {
        "batch": (16, 32, 64), "resolution": ((224, 224), (320, 480)), "dims.seq": (512, 1024),
        "optimizer": ("sgd", "adam"), "checkpoint": ((), ("Bottleneck",), ("layer1.*", "layer2.*")),
    }  # fmt: skip
    assert config.budgets == (Budget("device", 40 << 30), Budget("live", 1 << 20, "warning"))


WRONG: dict[str, tuple[str, str]] = {
    "version: 1\ntrain:\n  optimiser: adam\n": ("yaml:3:3: unknown key 'optimiser'", "Did you mean 'optimizer'?"),
    "version: 1\ntrain: {optimizer: adamm}\n": ("staticmem.yaml:2:20: optimizer is 'adamm'", "Did you mean 'adam'?"),
    "version: 1\ntrain: {batch: -3}\n": ("2:16: batch is -3", "Example: 32"),
    "version: 1\ntrain: {batch: true}\n": ("batch is true", "Example: 32"),
    "version: 1\ntrain: {batch: 1e3}\n": ("batch is '1e3'", "Example: 32"),
    "version: 1\ntrain: {batch: 99999999999999999999999999999999999999999999999999}\n": ("batch is '9999", "Example"),
    "version: 1\nwhat_if: {batch: [1, x]}\n": ("2:22: batch[1] is 'x'", "Example: 32"),
    "version: 1\nwhat_if: {batch: []}\n": ("batch is a list", "[a, b]"),
    "version: 1\ngpus: [h100-sxm-80g]\n": ("2:8: gpus[0] is 'h100-sxm-80g'", "Did you mean 'h100-sxm-80gb', "),
    "version: 1\ninfer: {optimizer: adam}\n": ("unknown key 'optimizer' in 'infer'", "under train"),
    "version: 1\ntrain: {}\ninfer: {}\n": ("3:1: both 'train' and 'infer'", "scenarios"),
    "version: 2\n": ("1:10: version is 2", "version: 1"),
    "model: a.pt2\n": ("'version' is missing", "version: 1"),
    "version: 1\nmodel: {dims: {}}\n": ("'path' is missing", "path: model.pt2"),
    "version: 1\nversion: 1\n": ("2:1: 'version' is given twice", "Keep one"),
    "version: 1\nbudgets: [{metric: live, limit: lots}]\n": ("limit is 'lots'", "40 GiB"),
    "version: 1\nbudgets: [{metric: life, limit: 1 GiB}]\n": ("metric is 'life'", "Did you mean 'live'?"),
    "version: 1\nmodel: !!python/object/apply:os.system [x]\n": ("", ""),
    "version: 1\nmodel: !custom x\n": ("tag", "Leave the tag out."),
    "- 1\n": ("the file is a list", "key: value"),
    "a: [\n": ("staticmem.yaml:2:1: not YAML", "quotes"),
    "a: b: c\n": ("not YAML", "quotes"),
    "version: 1\n? [a]\n: b\n": ("a key is not text", "words"),
    "[" * 5000: ("nested too deeply", "another file"),
    "a: &a [*a]\n": ("too many values", "without aliases"),
    "version: 1\ntrain: {<<: {batch: 1}}\n": ("unknown key '<<'", "docs/config.md"),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:40])
def test_what_is_wrong_has_a_place_and_a_way_out(text: str) -> None:
    what, hint = WRONG[text]
    with pytest.raises(DocumentError) as caught:
        parsed(text)
    error = caught.value
    assert what in error.what
    assert hint in error.hint
    assert error.what.startswith("staticmem.yaml")
    assert error.code.startswith("SM19")


def test_aliases_do_not_multiply() -> None:
    lines = ["version: 1", "a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(DocumentError, match="too many values"):
        parsed("\n".join(lines))


def test_aliases_in_reason_are_fine() -> None:
    config = parsed("version: 1\nwhat_if: {batch: &b [1, 2], accumulate: *b}\n")
    assert config.axes == {"batch": (1, 2), "accumulate": (1, 2)}


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found: Config | str = parsed(text)
    except StaticmemError as error:
        found = error.what and error.hint
    assert isinstance(found, Config) or found


KEYS = ["x", *{**root.ROOT.keys(), **fields.STEP, **fields.SOFTWARE, "name": 0, "metric": 0, "limit": 0, "level": 0}]
JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(root.ROOT.keys())), JSONISH))
@example({"scenarios": [None, {"amp": None}, {"amp": False, "name": 3}], "infer": None, "what_if": {"amp": [None]}})
@example({"budgets": [{"metric": "live", "limit": 1 << 20}], "train": {"parallel": None, "optimizer": "adam"}})
def test_what_the_reader_takes_the_schema_takes(document: dict[str, Any]) -> None:
    """The schema never refuses in an editor what staticmem reads."""
    text = json.dumps({"version": 1, **{k: v for k, v in document.items() if k != "version"}})
    try:
        parsed(text)
    except StaticmemError:
        return
    errors = list(jsonschema.Draft7Validator(config_schema()).iter_errors(json.loads(text)))
    assert not errors, errors


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for name, data, what in (
        ("a.yaml", b"\xff\xfe\x00", "is not text"),
        ("b.yaml", b"#" * ((1 << 20) + 1), "too large"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DocumentError, match=what):
            load(str(tmp_path / name))
    with pytest.raises(DocumentError, match="cannot be read"):
        load(str(tmp_path / "missing.yaml"))
    with pytest.raises(DocumentError, match="is a directory"):
        load(str(tmp_path))


@pytest.mark.parametrize(("kind", "made"), [("config", config_schema()), ("sweep", schema("sweep"))])
def test_schemas_are_fresh_and_draft_07(kind: str, made: dict[str, Any]) -> None:
    jsonschema.Draft7Validator.check_schema(made)
    written = (ROOT / "schemas" / f"{kind}-1.schema.json").read_text(encoding="utf-8")
    assert written == dumps(made), f"staticmem schema {kind} > schemas/{kind}-1.schema.json"


def test_template_is_a_config_with_every_key_in_it() -> None:
    text = template("models/my model.pt2", "./x.json")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=./x.json"
    config = parsed(text)
    assert config.model == "models/my model.pt2"
    assert config.axes["batch"] == (16, 32, 64)
    jsonschema.validate(yaml.safe_load(text), config_schema())
    for name in (*fields.STEP, *fields.SOFTWARE, *root.ROOT.keys()):
        assert f"{name}:" in text, name


def test_commented_lines_of_the_template_are_valid_too() -> None:
    text = template("model.pt2", "./x.json")
    for name in (*fields.TRAINING, *fields.INFERENCE):
        line = next(line for line in text.splitlines() if line.lstrip(" #").startswith(f"{name}:"))
        entry = line.lstrip(" #")
        assert parsed(f"version: 1\ntrain:\n  {entry}\n").options, name


def test_every_word_of_a_request_can_be_written() -> None:
    """What flags can say, configs can: no field of `Request` is forgotten."""
    written = {
        *fields.STEP,
        *fields.GENERATION,
        *fields.SERVING,
        *fields.HOST,
        *fields.SOFTWARE,
        "mode",
        "alloc_conf",
        "gpu",
        "top",
        "method",
    }
    assert set(FIELDS) == written


# -- where it is found -------------------------------------------------------------------------------------------


def test_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "repo" / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "staticmem.yaml").write_text("version: 1\n")
    monkeypatch.chdir(deep)
    assert locate.find() is None, "there is no repository: a file above is somebody else's"
    (tmp_path / "repo" / ".git").mkdir()
    assert locate.find() is None, "the repository ends before it"
    (tmp_path / "repo" / "pyproject.toml").write_text("[tool.staticmem.train]\nbatch = 4\n")
    assert locate.find() == "../../pyproject.toml"
    (tmp_path / "repo" / "staticmem.yaml").write_text("version: 1\n")
    assert locate.find() == "../../staticmem.yaml", "before pyproject.toml"
    (deep / "staticmem.yaml").write_text("version: 1\n")
    assert locate.find() == "staticmem.yaml", "the nearest"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_pyproject(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text('[tool.staticmem]\nmodel = "m.pt2"\ntrain = {optimizer = "sgd", batch = 4}\n')
    assert discover.read(str(path)).options == {"mode": "train", "optimizer": "sgd", "batch": 4}
    path.write_text('[tool.staticmem]\ntrain = {optimizer = "sdg"}\n')
    with pytest.raises(DocumentError) as caught:
        discover.read(str(path))
    assert "tool.staticmem.train.optimizer is 'sdg'" in caught.value.what
    path.write_text("[tool.staticmem\n")
    with pytest.raises(DocumentError, match="is not TOML"):
        discover.read(str(path))


def test_environment() -> None:
    words = discover.from_environment(
        {
            "STATICMEM_BATCH": "8", "STATICMEM_DIMS": "seq=4,x[1]=2", "STATICMEM_NESTEROV": "1",
            "STATICMEM_AMP": "bf16",
            "STATICMEM_RESOLUTION": "224x320", "STATICMEM_CHECKPOINT": "A,b.*", "STATICMEM_VENV": "x", "OTHER": "y",
            "STATICMEM_MODE": "",
        }
    )  # fmt: skip
    assert words == {
        "batch": 8, "dims": {"seq": 4, "x[1]": 2}, "nesterov": True, "amp": "bf16", "resolution": (224, 320),
        "checkpoint": ("A", "b.*"),
    }  # fmt: skip
    with pytest.raises(DocumentError, match="STATICMEM_OPTIMISER"):
        discover.from_environment({"STATICMEM_OPTIMISER": "adam"})
    with pytest.raises(DocumentError, match="STATICMEM_BATCH is 'many'"):
        discover.from_environment({"STATICMEM_BATCH": "many"})


def test_what_belongs_to_another_optimizer_goes_with_it() -> None:
    below = {
        "mode": "train",
        "optimizer": "sgd",
        "momentum": 0.9,
        "nesterov": True,
        "batch": 4,
        "dims": {"a": 1, "b": 2},
    }
    assert discover.combined(below, {"optimizer": "adam"}) == {
        "mode": "train", "optimizer": "adam", "batch": 4, "dims": {"a": 1, "b": 2},
    }  # fmt: skip
    assert discover.combined(below, {"batch": 8, "dims": {"b": 3}})["dims"] == {"a": 1, "b": 3}
    assert discover.combined(below, {"batch": 8})["momentum"] == 0.9
    assert discover.combined(below, {"optimizer": "adam", "momentum": 0.5})["momentum"] == 0.5, "to be refused later"
    assert "optimizer" not in discover.combined(below, {"mode": "infer"})
    assert discover.combined({"mode": "infer"}, {"optimizer": "adam"})["mode"] == "train"
    assert discover.combined(below, {"optimizer": "none"})["optimizer"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40 GiB", 40 << 30),
        ("1.5MiB", 3 << 19),
        ("16GB", 16 * 10**9),
        ("7", 7),
        ("7 b", 7),
        ("x", None),
        ("-1 GiB", None),
    ],
)
def test_sizes(text: str, expected: int | None) -> None:
    assert parse_bytes(text) == expected
