"""`--quantize int8wo|int4wo`: what torchao stores and makes. Peaks are those of torchao 0.18 on fake CUDA tensors of
PyTorch 2.15 (`quantize_` of the model below in its type, one forward under `no_grad`, storages rounded up to 512)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import staticmem
from staticmem.errors import UsageError

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

BATCH = 4


@cache
def program(tied: bool, width: int, tokens: int, words: int = 1001) -> Any:
    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(words, width)
            self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width, bias=False)
            self.head = torch.nn.Linear(width, words, bias=False)
            if tied:
                self.head.weight = self.tokens.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.down(torch.relu(self.up(self.tokens(ids)))))

    with torch.device("meta"):
        return torch.export.export(Net().train(), (torch.zeros(BATCH, tokens, dtype=torch.int64),), strict=False)


def analyzed(quantize: str, tied: bool = False, width: int = 512, tokens: int = 700, **options: Any) -> Any:
    options = {"mode": "infer", "dtype": "bf16", "outputs": "dropped", **options}
    return staticmem.analyze(program(tied, width, tokens), quantize=quantize, **options)


# weights, tied, width, tokens, type -> live peak in bytes
MEASURED: dict[tuple[str, bool, int, int, str], int] = {
    ("int8wo", False, 512, 700, "bf16"): 16_961_536,
    ("int8wo", False, 512, 700, "fp32"): 32_322_560,
    ("int8wo", False, 1152, 16, "bf16"): 14_547_456,
    ("int8wo", False, 1152, 16, "fp32"): 22_608_896,
    ("int8wo", True, 512, 700, "bf16"): 16_961_536,
    ("int4wo", False, 512, 700, "bf16"): 16_769_536,
    ("int4wo", False, 1152, 16, "bf16"): 8_630_784,
    ("int4wo", True, 512, 700, "bf16"): 16_769_536,
}


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_peaks_are_those_of_torchao(case: tuple[str, bool, int, int, str]) -> None:
    *settings, dtype = case
    assert analyzed(*settings, dtype=dtype).peak.live_bytes == MEASURED[case]  # type: ignore[arg-type]


def stored(report: Any) -> dict[str, int]:
    names = ("up.", "down.", "head.", "tokens.")
    return {t.name: t.bytes for t in report.alive if t.name.startswith(names)}


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def test_int8_has_a_float_and_a_zero_point_for_each_row() -> None:
    names = stored(analyzed("int8wo"))
    assert names["up.weight"] == 512 * 1024
    assert (names["up.weight.scale"], names["up.weight.zero_point"]) == (4 * 1024, 1024)
    assert names["head.weight"] == rounded(512 * 1001)
    assert names["up.bias"] == 2 * 1024


def test_int4_is_padded_to_whole_tiles() -> None:
    """1,152 columns become 2,048 and 1,001 rows 1,008; 16 groups of 128."""
    report = analyzed("int4wo", width=1152, tokens=16)
    names = stored(report)
    assert names["head.weight"] == 1008 * 2048 // 2
    assert names["head.weight.scale_and_zero"] == rounded(16 * 1008 * 2 * 2)
    assert report.parameters.count == analyzed("none", width=1152, tokens=16).parameters.count


def test_a_tied_embedding_stays_beside_the_packed_head() -> None:
    names = stored(analyzed("int8wo", tied=True))
    assert rounded(2 * 512 * 1001) in names.values()
    assert rounded(512 * 1001) in names.values()


def test_rows_without_whole_groups_stay() -> None:
    """Of 96 and 192 columns none has whole groups of 128; of 64 and 128 `down` alone has."""
    with pytest.raises(UsageError, match="finds no weight"):
        analyzed("int4wo", width=96, tokens=16)
    report = analyzed("int4wo", width=64, tokens=16)
    assert report.parameters.by_dtype["int32"].count == 64 * 128
    assert any("2 linear weights stay" in note.text for note in report.assumptions)


WRONG: dict[str, dict[str, Any]] = {
    "training": {"mode": "train", "lora": "r=8,targets=up"},
    "adapters": {"lora": "r=8,targets=up"},
    "compiled code": {"compile": "all"},
    "autocast": {"amp": "bf16", "dtype": None},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_covered_is_refused(case: str) -> None:
    with pytest.raises(UsageError) as error:
        analyzed("int8wo", **WRONG[case])
    assert error.value.code == "SM188"
    assert error.value.hint


def test_int4_needs_bfloat16() -> None:
    with pytest.raises(UsageError, match="needs a model in bfloat16"):
        analyzed("int4wo", dtype="fp16")
