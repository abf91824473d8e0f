"""The profile: what it says of known cards and versions, and the errors of a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from staticmem.devices import gpus, profile
from staticmem.errors import UsageError
from staticmem.units import MIB, Band

DEFAULT = Path(profile.__file__).parent / "profiles" / "pytorch.yaml"
PROFILE = profile.load()


def test_a_reading_of_the_card_is_taken_as_it_is() -> None:
    assert PROFILE.context(gpus.find("rtx-3090")) == Band(256 * MIB, 256 * MIB, 256 * MIB)


@pytest.mark.parametrize(("processors", "threads", "read"), [(82, 1536, 256), (142, 1536, 426), (80, 2048, 320)])
def test_the_formula_agrees_with_the_readings(processors: int, threads: int, read: int) -> None:
    """RTX 3090, RTX 6000 Ada, Titan V."""
    formula = (PROFILE.fixed + PROFILE.per_thread * processors * threads) / MIB
    assert formula == pytest.approx(read, rel=0.03)


@pytest.mark.parametrize("slug", gpus.cards())
def test_a_context_is_of_a_plausible_size(slug: str) -> None:
    gpu = gpus.cards()[slug]
    low, expected, high = PROFILE.overhead(gpu)
    assert 48 * MIB < low <= expected <= high < 1024 * MIB  # the smallest has ten multiprocessors
    assert high < gpu.usable / 8


@pytest.mark.parametrize(
    ("torch", "architecture", "nbytes"),
    [
        ("2.6", "sm_80", 8519680), ("2.6", "sm_90", 32 << 20), ("2.8", "sm_100", 8519680), ("2.13", "sm_100", 32 << 20),
        ("2.13.1+cu130", "sm_86", 8519680), ("2.0", "sm_90", 32 << 20), ("1.13", "sm_90", 0), ("1.6", "sm_70", 0),
        ("2.20", "sm_90", 32 << 20),
    ],
)  # fmt: skip
def test_cublas_workspace(torch: str, architecture: str, nbytes: int) -> None:
    assert PROFILE.cublas(torch).workspace(architecture) == nbytes


def test_2_15_gives_the_workspace_back() -> None:
    assert PROFILE.cublas("2.14").kept
    assert not PROFILE.cublas("2.15").kept


@pytest.mark.parametrize(
    ("torch", "cudnn"),
    [
        ("1.6", "7.6.5"),
        ("1.12+cu102", "7.6.5"),
        ("1.12.1+cu113", "8.3.2"),
        ("1.8+cu111", "8.0.5"),
        ("1.10+cu111", "8.0.5"),
        ("1.10+cu113", "8.2.0"),
        ("1.13+cu116", "8.3.2"),
        ("1.13+cu117", "8.5.0"),
        ("2.0.1", "8.5.0"),
        ("2.5", "9.1.0"),
        ("2.9.1", "9.10.2"),
        ("2.13", "9.20.0"),
        ("3.0", "9.26.0"),
    ],
)
def test_cudnn_of_a_torch(torch: str, cudnn: str) -> None:
    assert PROFILE.cudnn(torch) == cudnn


def test_a_version_that_is_none() -> None:
    with pytest.raises(UsageError, match="newest"):
        PROFILE.cublas("newest")


def edited(tmp_path: Path, **changes: object) -> Path:
    """The package's profile with top-level keys replaced; None takes one out."""
    document = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    for key, value in changes.items():
        if value is None:
            del document[key]
        else:
            document[key] = value
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_a_users_profile(tmp_path: Path) -> None:
    libraries = {"low_mib": 1, "expected_mib": 2, "high_mib": 3, "source": "read on my card"}
    found = profile.load(edited(tmp_path, name="mine", libraries=libraries))
    assert found.libraries == Band(1 * MIB, 2 * MIB, 3 * MIB)
    assert found.assumed == ()
    assert ("libraries", "read on my card") in found.sources


CUBLAS = {"torch": "2.6", "bytes": 1, "lt_bytes": 1, "kept": True, "lt_kept": True, "source": "s"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"libraries": None}, "lacks 'libraries'"),
        ({"contexts": {}}, "unknown key 'contexts'"),
        ({"libraries": {"low_mib": 5, "expected_mib": 2, "high_mib": 3, "source": "s"}}, "5, 2, 3"),
        ({"libraries": {"low_mib": "5", "expected_mib": 2, "high_mib": 3, "source": "s"}}, "libraries.low_mib is '5'"),
        ({"context": {"fixed_mib": 1, "kib_per_thread": 1, "low": 2, "high": 3, "source": "s"}}, "context.low is 2"),
        (
            {"context": {"fixed_mib": 1, "kib_per_thread": -1, "low": 1, "high": 3, "source": "s"}},
            "kib_per_thread is -1",
        ),
        ({"cublas": []}, "cublas is not a list"),
        ({"cublas": [CUBLAS | {"kept": 1}]}, "kept is 1"),
        ({"cublas": [CUBLAS | {"by_architecture": {"sm_9": 1}}]}, "unknown key 'sm_9'"),
        ({"cublas": [CUBLAS | {"torch": "2.9"}, CUBLAS]}, "not in the order"),
        ({"cudnn": [{"torch": "2.6"}]}, "lacks 'cudnn'"),
    ],
)
def test_a_bad_profile_is_an_error_that_says_where(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=r"profile\.yaml") as error:
        profile.load(edited(tmp_path, **changes))
    assert said in str(error.value)


EAGER = "1.12"  # the last version that loads all kernels with the context


@pytest.mark.parametrize(
    ("torch", "loading", "mib"),
    [
        ("1.13", None, (0, 0, 0)), ("2.13", "lazy", (0, 0, 0)), ("1.12", "lazy", (0, 0, 0)),
        ("1.12", None, (1020, 1230, 1429)), ("2.13", "eager", (1020, 1230, 1429)), ("1.6", None, (630, 685, 733)),
    ],
)  # fmt: skip
def test_eager_loading_adds_the_modules_that_were_read(torch: str, loading: str | None, mib: tuple[int, ...]) -> None:
    """Of the readings in the file by hand: what a process has above its bare context."""
    more = PROFILE.loaded(torch, loading).libraries.minus(PROFILE.libraries)
    assert tuple(n / MIB for n in more) == mib


@pytest.mark.parametrize(
    ("reading", "processors", "threads"), [("rtx-2080-ti", 68, 1024), ("gtx-1080", 20, 2048), ("v100", 80, 2048)]
)
def test_contexts_taken_off_a_reading_are_those_of_the_formula(reading: str, processors: int, threads: int) -> None:
    entries = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))["modules"]["eager"]
    found = next(entry["readings"][reading] for entry in entries if reading in entry["readings"])
    formula = (PROFILE.fixed + PROFILE.per_thread * processors * threads) / MIB
    assert found["context_mib"] == pytest.approx(formula, abs=1)


def test_a_process_that_was_read_lies_in_the_band() -> None:
    """RTX 3090 with torch 1.7.1 and 1.8.2: 1,486 and 1,685 MiB beside the tensor's segment."""
    low, _, high = PROFILE.loaded(EAGER).overhead(gpus.find("rtx-3090"))
    assert low < 1486 * MIB < high
    assert low < 1685 * MIB < high


def test_a_profile_without_modules_has_nothing_to_load(tmp_path: Path) -> None:
    document = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    del document["modules"]
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert profile.load(own).loaded("1.12", "eager").libraries == PROFILE.libraries


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"readings": {}}, "readings is empty"),
        ({"readings": {"a": {"mib": 5, "context_mib": 9, "torch": "1.9", "source": "x"}}}, "at least 10"),
        ({"readings": {"a": {"mib": 5}}}, "lacks 'context_mib'"),
    ],
)
def test_modules_that_cannot_be_used(change: dict[str, object], says: str, tmp_path: Path) -> None:
    document = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    document["modules"]["eager"][0].update(change)
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        profile.load(own)
    assert says in f"{raised.value} {raised.value.why}"
