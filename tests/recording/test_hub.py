"""Models by their names on the Hugging Face Hub, which is a server on the loopback here."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import staticmem
from staticmem.cli.main import main
from staticmem.errors import StaticmemError
from staticmem.frontends import checkpoint
from staticmem.frontends.architectures import Architecture, architecture_of, below, whole
from staticmem.frontends.packing import Packing
from staticmem.recording import hub
from staticmem.recording.architectures import exported_file

pytest.importorskip("huggingface_hub")

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 500}
COMMIT, TOKEN = "0123456789abcdef" * 2 + "01234567", "hf_secretsecret"
WEIGHTS = {"model.embed_tokens.weight": ("BF16", [500, 64]), "lm_head.weight": ("BF16", [500, 64])}


def safetensors(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """A file with a header, and weights that nobody may ask for."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = checkpoint.Tensor(name, dtype, tuple(shape)).size
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(rows).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


class Hub(ThreadingHTTPServer):
    """Repositories by their names: files by theirs; a number is a status, a text beside it the code of the error."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, str | None]] = []  # path, range, token

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("range", ""), self.headers.get("authorization")))
        repository, _, rest = self.path.strip("/").partition("/resolve/")
        found = self.server.repositories.get(repository)
        if found is None:
            self._refuse(401, "RepoNotFound")
            return
        content = found.get(rest.partition("/")[2], (404, "EntryNotFound"))
        if isinstance(content, str):
            self.send_response(307)
            self.send_header("location", content)
            self.end_headers()
        elif isinstance(content, tuple):
            self._refuse(*content)
        elif isinstance(content, float):
            time.sleep(content)
        else:
            self._send(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()

    def _send(self, content: bytes) -> None:
        first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        self.send_response(206)
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("content-length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub._fetched.clear()
    with Hub() as served:
        threading.Thread(target=served.serve_forever, args=(0.05,), daemon=True).start()
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.chdir(tmp_path)
        yield served
        served.shutdown()
    hub._fetched.clear()


def asked(given: str) -> Architecture:
    found = architecture_of(given)
    assert found is not None
    return found


def files(**more: Any) -> dict[str, Any]:
    return {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": safetensors(WEIGHTS), **more}


def test_a_config_and_headers_are_fetched_and_no_weights(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.repositories["Owner/Net"] = files()
    found = hub.describe(asked("hf:Owner/Net,seq=32"))
    assert found.config == {**CONFIG, "dtype": "bfloat16"}  # no word on it in the config: that of the weights
    assert [(t.name, t.dtype, t.shape) for t in found.tensors] == [(n, d, tuple(s)) for n, (d, s) in WEIGHTS.items()]
    assert found.place == f"{server.address} at {COMMIT[:12]}"
    paths = [path for path, _, _ in server.asked]
    assert paths == [f"/Owner/Net/resolve/main/{name}" for name in ("config.json", "model.safetensors")]
    assert {token for _, _, token in server.asked} == {f"Bearer {TOKEN}"}
    assert hub.describe(asked("hf:Owner/Net")) == found
    assert len(server.asked) == 2  # once in a process


def test_a_checkpoint_in_parts_at_a_revision(server: Hub) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"metadata": {}, "weight_map": dict(zip(WEIGHTS, names, strict=True))}
    parts = {file: safetensors({name: WEIGHTS[name]}) for name, file in index["weight_map"].items()}
    dtype = {**CONFIG, "dtype": "float32"}
    content = {"config.json": json.dumps(dtype).encode(), checkpoint.INDEX: json.dumps(index).encode(), **parts}
    server.repositories["Owner/Net"] = content
    found = hub.describe(asked("hf:Owner/Net@v1.0"))
    assert [t.name for t in found.tensors] == list(WEIGHTS)
    assert found.config["dtype"] == "float32"  # the library takes the word of the config
    assert all(path.startswith("/Owner/Net/resolve/v1.0/") for path, _, _ in server.asked)
    assert not any("BF16" in note.text for note in hub.notes_of(ARCHITECTURE, found, DOCUMENT))


ARCHITECTURE = Architecture("transformers", "config.json", "config.json")
DOCUMENT: dict[str, Any] = {
    "parameters": [
        [0, "model.embed_tokens.weight", [500, 64], "bfloat16"],
        [0, "lm_head.weight", [500, 64], "bfloat16"],
    ],
    "buffers": [],
}


def test_a_long_header_takes_a_second_request_of_its_length(server: Hub) -> None:
    many = {f"model.layers.{i}.weight": ("F32", [2]) for i in range(3000)}
    data = safetensors(many)
    (length,) = struct.unpack("<Q", data[:8])
    server.repositories["Owner/Net"] = files(**{"model.safetensors": data})
    assert len(hub.describe(asked("hf:Owner/Net")).tensors) == len(many)
    assert length > 100_000
    assert server.asked[-1][1] == f"bytes=8-{length + 7}"


def test_redirects_are_followed_and_the_token_stays(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as other:
        threading.Thread(target=other.serve_forever, args=(0.05,), daemon=True).start()
        other.repositories["store"] = {"blob": safetensors(WEIGHTS)}
        elsewhere = f"http://localhost:{other.server_address[1]}/store/resolve/main/blob"
        server.repositories["Owner/Net"] = files(**{"model.safetensors": elsewhere})
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        assert len(hub.describe(asked("hf:Owner/Net")).tensors) == len(WEIGHTS)
        assert other.asked[0][2] is None  # another server has no business with it
        other.shutdown()


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        ((403, "GatedRepo"), "is gated", "Accept its conditions"),
        ((401, "GatedRepo"), "is gated", "Accept its conditions"),
        ((404, "RevisionNotFound"), "is not on the Hub", "Check the name"),
        ((404, "EntryNotFound"), "has no config.json", "diffusers"),
        ((503, ""), "cannot be read", "HF_ENDPOINT"),
        (3.0, "cannot be read", "HF_HUB_DOWNLOAD_TIMEOUT"),
    ],
)
def test_errors_say_what_to_do(
    server: Hub, content: Any, what: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.repositories["Owner/Net"] = {"config.json": content}
    with pytest.raises(StaticmemError) as error:
        hub.describe(asked("hf:Owner/Net"))
    assert error.value.code == "SM415"
    assert what in error.value.what
    assert hint in error.value.hint
    assert TOKEN not in str(error.value)


def test_a_repository_that_is_not_there(server: Hub) -> None:
    with pytest.raises(StaticmemError, match="is not on the Hub") as error:
        hub.describe(asked("hf:Owner/Absent"))
    assert "without a token" in error.value.why


def test_a_server_that_is_not_there_and_one_without_network(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StaticmemError, match="cannot be read") as error:
        hub.describe(asked("hf:Owner/Net"))
    assert "127.0.0.1:1 cannot be reached" in error.value.why
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StaticmemError, match="cannot be read") as error:
        hub.describe(asked("hf:Owner/Net"))
    assert "HF_HUB_OFFLINE is set" in error.value.why
    folder = Path(os.environ["HF_HOME"], "hub", "models--Owner--Net")
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, content in files().items():
        (snapshot / name).write_bytes(content)
    found = hub.describe(asked("hf:Owner/Net"))
    assert len(found.tensors) == len(WEIGHTS)
    assert found.place.startswith("the cache of huggingface_hub")
    assert not server.asked


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff" * 100, struct.pack("<Q", 5) + b"[1,2]", struct.pack("<Q", 9) + b'{"a": {}}',
        safetensors({"a": ("F32", [2])}).replace(b"[0, 8]", b"[0, 9]"),
        safetensors({"a": ("F32", [2])}).replace(b"F32", b"F99"), (500, ""), 3.0,
    ],
)  # fmt: skip
def test_headers_that_cannot_be_read_leave_the_config(server: Hub, content: Any) -> None:
    server.repositories["Owner/Net"] = files(**{"model.safetensors": content})
    found = hub.describe(asked("hf:Owner/Net"))
    assert (found.config, list(found.tensors)) == (CONFIG, [])
    assert found.unread
    (note,) = [note for note in hub.notes_of(ARCHITECTURE, found, DOCUMENT) if note.code == "SM416"]
    assert "could not be read" in note.text


def test_a_config_without_end_is_refused(server: Hub) -> None:
    server.repositories["Owner/Net"] = {"config.json": b'{"model_type": "' + b"a" * (5 << 20)}
    with pytest.raises(StaticmemError, match="no JSON") as error:
        hub.describe(asked("hf:Owner/Net"))
    assert error.value.code == "SM145"


def test_a_name_without_hf_is_asked_where_no_path_is(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.repositories["Owner/Net"] = files()
    found = asked("Owner/Net,seq=8")
    assert (found.name, found.revision, found.path) == ("Owner/Net", "main", "Owner/Net,seq=8")
    hub.describe(found)
    assert "is no path here: the Hugging Face Hub is asked for hf:Owner/Net" in capsys.readouterr().err
    (note,) = hub.notes_of(found, hub.describe(found), DOCUMENT)
    assert note.text.startswith("Owner/Net,seq=8 is no path here")
    assert "64,000 BF16 (125 KiB)" in note.text
    assert (whole("Owner/Net"), below("folder", "hf:Owner/Net")) == ("Owner/Net", "hf:Owner/Net")
    for path in ("models/resnet.onnx", "a/b/c", "net", "../net", "Owner/"):
        assert architecture_of(path) is None
    (tmp_path / "Owner").mkdir()  # a path that is mistyped
    assert architecture_of("Owner/Net") is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert architecture_of("Other/Net") is None
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert architecture_of("Other/Net") is None
    with pytest.raises(StaticmemError, match="does not exist") as error:
        staticmem.analyze("Other/Net")
    assert "hf:Other/Net" in error.value.hint
    with pytest.raises(StaticmemError, match="huggingface_hub is not installed") as error:
        hub.describe(asked("hf:Other/Net"))
    assert "staticmem[hub]" in error.value.hint


@pytest.mark.parametrize("given", ["hf:", "hf:a/b/c", "hf:../x", "hf:a--b/c", "hf:Owner/Net@", "hf:Owner/Net@../x"])
def test_names_that_are_none_of_the_hub(given: str) -> None:
    with pytest.raises(StaticmemError, match="no name of the Hub"):
        architecture_of(given)


def test_the_checkpoint_is_compared_with_what_is_built() -> None:
    tensors = [checkpoint.Tensor(name, dtype, tuple(shape)) for name, (dtype, shape) in WEIGHTS.items()]
    assert not hub.notes_of(ARCHITECTURE, hub.Described(CONFIG, tensors), DOCUMENT)
    tied = {
        **DOCUMENT,
        "parameters": [DOCUMENT["parameters"][0], [0, "lm_head.weight", [500, 64], "bfloat16", True, 0]],
    }
    for some in (tensors, tensors[:1]):  # a tied weight may be there twice
        assert not hub.notes_of(ARCHITECTURE, hub.Described(CONFIG, some), tied)
    (note,) = hub.notes_of(ARCHITECTURE, hub.Described(CONFIG, tensors[:1]), DOCUMENT)
    assert (note.kind, note.code) == ("warning", "SM416")
    more = [*tensors, checkpoint.Tensor("visual.proj", "BF16", (7, 7))]
    (note,) = hub.notes_of(ARCHITECTURE, hub.Described(CONFIG, more), DOCUMENT)
    assert "visual.proj [7, 7], which is not built" in note.text


def test_a_checkpoint_beside_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(safetensors(WEIGHTS))
    found = hub.describe(asked(str(tmp_path)))
    assert found.config["dtype"] == "bfloat16"
    assert len(found.tensors) == len(WEIGHTS)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert hub.describe(asked(str(tmp_path))).unread


def test_every_verb_takes_a_name_of_the_hub(server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Without transformers the verbs say what to install; with it the name is that of the report."""
    server.repositories["Owner/Net"] = files()
    find = mock.Mock(side_effect=lambda name, *rest: None if name == "transformers" else object())
    with mock.patch("importlib.util.find_spec", find):
        for verb in (["analyze"], ["levers"], ["size"], ["sweep", "--what-if", "batch=1,2", "-j", "1"]):
            assert main([verb[0], "hf:Owner/Net", "--no-config", "--optimizer", "adam", *verb[1:]]) == 2
            assert "transformers is not installed [SM146]" in capsys.readouterr().err


def test_packed_weights_of_a_config_are_said(tmp_path: Path) -> None:
    packing = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": packing}))
    described = hub.describe(asked(f"transformers:{tmp_path}"))
    assert (described.config, described.packing) == (CONFIG, Packing(CONFIG, "nf4", "float32"))
    (note,) = hub.notes_of(ARCHITECTURE, described, DOCUMENT)
    assert (note.code, note.text.startswith("its weights are packed by bitsandbytes")) == ("SM393", True)
    assert not hub.describe(asked(f"transformers:{tmp_path},dequantize=yes")).packing.quantize
    if importlib.util.find_spec("transformers") is None:  # which is asked for first
        return
    with pytest.raises(StaticmemError, match="has packed weights") as error:
        exported_file(asked(f"transformers:{tmp_path}"), ".pt2", True)
    assert "dequantize=yes" in error.value.hint


def test_the_dtype_is_that_of_most_bytes() -> None:
    """Not that of a router in float32 which is first, nor of weights in 8 bits, whose scales are in float32."""
    router = checkpoint.Tensor("a.router.weight", "F32", (8, 64))
    whole = checkpoint.Tensor("embed.weight", "BF16", (500, 64))
    packed = [checkpoint.Tensor("q.weight", "F8_E4M3", (4096, 4096)), checkpoint.Tensor("q.scale", "F32", (32, 32))]
    assert checkpoint.loaded_dtype([router, whole, *packed]) == "bfloat16"
    assert checkpoint.loaded_dtype(packed) == "float32"
    assert checkpoint.loaded_dtype(packed[:1]) is None


def test_packed_tensors_of_other_sizes_are_said() -> None:
    """A weight of 512 columns in 4 bits: 64 words a row, and 4 groups of 128."""
    document = {
        **DOCUMENT,
        "packed": {"q.qweight": 262144, "q.qzeros": 0},
        "parameters": [[0, "q.qweight", [64, 512], "int32"], [0, "q.qzeros", [4, 64], "int32"]],
    }
    described = hub.Described(CONFIG, (), packing=Packing(CONFIG, layers={"quant_method": "gptq"}))
    tensors = [checkpoint.Tensor("q.qweight", "I32", (64, 512)), checkpoint.Tensor("q.qzeros", "I32", (4, 64))]
    notes = hub.notes_of(ARCHITECTURE, replace(described, tensors=tensors), document)
    assert [note.code for note in notes] == ["SM393"]
    assert "262,144 numbers in 132,096 bytes" in notes[0].text
    others = [tensors[0], checkpoint.Tensor("q.qzeros", "I32", (16, 64))]
    (_, note) = hub.notes_of(ARCHITECTURE, replace(described, tensors=others), document)
    assert (note.kind, note.code) == ("warning", "SM416")
    assert "135,168 of I32 in its headers, 132,096 of int32 here" in note.text
