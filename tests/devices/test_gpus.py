"""The list of cards: invariants of every entry, lookup by name and by size, errors of a bad file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import urlparse

import pytest

from staticmem.devices import documents, gpus, profile
from staticmem.devices.cudnn import ARCHITECTURES
from staticmem.errors import UsageError
from staticmem.units import GIB, MIB

CARDS = gpus.cards()


@pytest.mark.parametrize("slug", CARDS)
def test_memory_is_ordered_and_sourced(slug: str) -> None:
    gpu = CARDS[slug]
    assert 0 < gpu.usable <= gpu.nvml <= gpu.nominal
    assert gpu.usable >= (0.75 if gpu.unified else 0.9) * gpu.nominal  # a typing mistake would be far off
    sourced = {figure for figure, url in gpu.sources if url.startswith("https://")}
    known = {name for name in ("bandwidth", "tdp", "link") if getattr(gpu, name) is not None} | set(dict(gpu.tflops))
    assert sourced | set(gpu.assumed) - {"architecture"} == {"nominal", "nvml", "usable"} | (known - set(gpu.unread))
    assert set(gpu.unread) <= known
    assert gpu.architecture in ARCHITECTURES
    assert ("architecture" in gpu.assumed) == (gpu.chip != gpu.architecture)


VENDORS_AND_CLOUDS = ("nvidia.com", "amd.com", "intel.com", "aws.amazon.com", "github.com")


@pytest.mark.parametrize("slug", CARDS)
def test_no_figure_is_from_a_shop_or_a_blog(slug: str) -> None:
    pages = [page for _, listed in CARDS[slug].sources for page in listed.split(", ")]
    for page in pages:
        host = urlparse(page).hostname or ""
        assert any(f".{host}".endswith(f".{known}") for known in VENDORS_AND_CLOUDS), page


@pytest.mark.parametrize(("slug", "usable"), [
    ("a2", 15049), ("a10g", 22568), ("l20", 45598), ("rtx-8000", 48599), ("rtx-4000-ada", 20066),
    ("rtx-pro-4500", 31971), ("rtx-pro-5000-72gb", 72836), ("rx-7900-xtx", 24069),
])  # fmt: skip
def test_cards_whose_driver_was_read_give_less_than_they_are_sold_with(slug: str, usable: int) -> None:
    assert CARDS[slug].usable == usable * MIB


@pytest.mark.parametrize("slug", CARDS)
def test_specifications_are_plausible(slug: str) -> None:
    """Bounds that hold for every card since 2016; a wrong unit or a figure with sparsity breaks them."""
    gpu = CARDS[slug]
    tflops = dict(gpu.tflops)
    assert gpu.year is not None
    assert 2016 <= gpu.year <= int(gpus.checked()[:4])
    assert gpu.price_class in gpus.CLASSES
    assert gpu.form
    assert gpu.bandwidth is None or 150 <= gpu.bandwidth <= 10_000
    assert gpu.tdp is None or 50 <= gpu.tdp <= 1500
    assert list(tflops) == [name for name in gpus.TYPES if name in tflops]
    assert all(1 <= number <= 10_000 for number in tflops.values())
    half = tflops.get("bf16", tflops.get("fp16"))
    if half is not None and "fp32" in tflops:
        assert 1.9 <= half / tflops["fp32"] <= 29  # B200: 28; with sparsity it would be twice as much
    if "tf32" in tflops and half is not None:
        assert half == pytest.approx(2 * tflops["tf32"], rel=0.06)
    if "fp8" in tflops and half is not None:
        assert half <= tflops["fp8"] <= 2.05 * half
    # a card reads its own memory in 4 to 120 ms
    assert gpu.bandwidth is None or 4 <= gpu.nominal / (gpu.bandwidth * 1e6) <= 120


@pytest.mark.parametrize(("small", "large"), [
    ("h100-sxm-80gb", "h200"), ("a100-sxm-40gb", "a100-sxm-80gb"), ("l40", "l40s"), ("rtx-4090", "rtx-5090"),
    ("mi300x", "mi325x"), ("rtx-3090", "rtx-3090-ti"), ("a100-pcie-80gb", "a100-sxm-80gb"),
])  # fmt: skip
def test_a_successor_is_no_slower(small: str, large: str) -> None:
    one, other = CARDS[small], CARDS[large]
    assert (one.bandwidth or 0) <= (other.bandwidth or 0)
    assert all(dict(other.tflops).get(name, number) >= number for name, number in one.tflops)


def test_other_vendors_say_what_stands_in_for_them() -> None:
    card = CARDS["mi300x"]
    assert (card.vendor, card.chip, card.architecture) == ("AMD", "gfx942", "sm_90")
    assert card.resident_threads == CARDS["h100-sxm-80gb"].resident_threads


def test_a_file_of_your_own_comes_over_the_package(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nchecked: 2026-01-01\ncards:\n"
        "  my-card: {name: Mine, arch: sm_90, processors: 100, nominal: 1000, source: s, class: workstation,"
        " specs: {bandwidth: 500, tflops: {bf16: 10}, source: s, read: [bf16]}}\n"
        "  l4: {name: L4 of ours, arch: sm_89, processors: 58, nominal: 20000, source: s}\n",
        encoding="utf-8",
    )
    found = gpus.catalog(str(path))
    assert len(found) == len(CARDS) + 1
    assert found["my-card"].unread == ("bandwidth",)
    assert gpus.find("l4", file=str(path)).nominal == 20000 * MIB
    assert gpus.find("l4").nominal == 24576 * MIB


def test_the_cards_that_people_ask_for_are_there() -> None:
    asked = "rtx-3060 rtx-3090 rtx-4090 rtx-5090 t4 l4 a10 a10g l40s a40 a6000 rtx-6000-ada v100-16gb v100-32gb"
    asked += " a100-pcie-40gb a100-sxm-40gb a100-sxm-80gb a100-pcie-80gb h100-pcie-80gb h100-sxm-80gb h200 b200"
    asked += (
        " gb200 gb300 rtx-pro-4000 rtx-pro-4500 rtx-pro-5000-48gb rtx-pro-5000-72gb rtx-5060-ti-16gb rtx-4070-super"
    )
    asked += " rtx-4080-super rtx-8000 l20 a2 rtx-4000-ada rtx-4500-ada mi300a w7900 rx-7900-xtx arc-b580 arc-pro-b60"
    asked += " dgx-spark jetson-thor jetson-agx-orin-64gb"
    assert set(asked.split()) <= set(CARDS)


def test_unified_memory_is_not_all_usable() -> None:
    """Half of the difference is taken by nobody knows what: the report says so, and a size may be given instead."""
    shared = {slug for slug, card in CARDS.items() if card.unified}
    assert shared == {"dgx-spark", "jetson-thor", "jetson-agx-orin-64gb", "mi300a"}
    assert CARDS["dgx-spark"].usable == 102 * GIB
    assert CARDS["jetson-thor"].usable == pytest.approx(102 * GIB, abs=MIB)
    assert "usable" in CARDS["jetson-thor"].assumed


def test_a_card_without_a_figure_gives_less_than_nvidia_smi_shows() -> None:
    assert gpus.held_back(12288) == 245
    assert gpus.held_back(81559) == 768
    a40 = CARDS["a40"]
    assert "usable" in a40.assumed
    assert a40.nvml - a40.usable == 768 * MIB


def test_the_rule_is_seldom_more_generous_than_cards_are() -> None:
    """Cards with both figures read: what the rule would have given, against what they give."""
    known = [gpu for gpu in CARDS.values() if not {"nvml", "usable"} & set(gpu.assumed)]
    too_much = [g.slug for g in known if g.nvml - gpus.held_back(g.nvml // MIB) * MIB > g.usable + 2 * MIB]
    assert len(known) >= 8
    assert {"t4", "a10"} <= set(too_much)  # with ECC on GDDR6, which takes more
    assert len(too_much) <= len(known) / 4


@pytest.mark.parametrize("query", ["rtx-4090", "RTX 4090", "rtx_4090", " rtx-4090 ", "rtx4090", "4090"])
def test_names(query: str) -> None:
    assert gpus.find(query) is CARDS["rtx-4090"]
    assert gpus.variants(query) == []


@pytest.mark.parametrize(
    ("query", "meant", "others"),
    [
        ("h100", "h100-sxm-80gb", ["h100-nvl", "h100-pcie-80gb"]),
        ("A100", "a100-sxm-80gb", ["a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-40gb"]),
        ("a100 80gb", "a100-sxm-80gb", ["a100-pcie-80gb"]),
        ("a100-sxm-80gb", "a100-sxm-80gb", []),
        ("3090", "rtx-3090", []),  # not the Ti, which has a name of its own
        ("v100", "v100-16gb", ["v100-32gb"]),
        ("5060ti", "rtx-5060-ti-16gb", []),
        ("7900 XTX", "rx-7900-xtx", []),
        ("RX7900XTX", "rx-7900-xtx", []),
        ("orin", "jetson-agx-orin-64gb", []),
        ("rtx pro 5000", "rtx-pro-5000-48gb", ["rtx-pro-5000-72gb"]),
    ],
)
def test_the_name_of_a_chip_means_its_usual_card(query: str, meant: str, others: list[str]) -> None:
    assert gpus.find(query).slug == meant
    assert gpus.variants(query) == others


@pytest.mark.parametrize(
    ("query", "usable"),
    [("24GB", 24 * GIB - 491 * MIB), ("24 gb", 24 * GIB - 491 * MIB), ("16GiB", 16 * GIB), ("512MiB", 512 * MIB)],
)
def test_sizes(query: str, usable: int) -> None:
    found = gpus.find(query)
    assert found.usable == usable
    assert found.architecture == gpus.DEFAULT_ARCHITECTURE
    assert "usable" in found.assumed


def test_a_size_does_not_say_the_chip() -> None:
    """It is an H100 of that memory; its context may be that of any card of NVIDIA, its workspaces those of others."""
    card, h100 = gpus.find("24GB"), CARDS["h100-sxm-80gb"]
    assert (card.architecture, card.resident_threads) == (h100.architecture, h100.resident_threads)
    assert card.alternatives == ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
    context = profile.load().context(card)
    for gpu in CARDS.values():
        assert context.low <= profile.load().context(gpu).expected <= context.high, gpu.slug
    assert "only the memory of the GPU" in " ".join(card.unsaid)
    assert h100.unsaid == ()


def test_a_size_is_no_part_of_a_name() -> None:
    """There is a V100 with 16 GB, and a card of 16 GB is not it."""
    for query in ("16GB", "40gb", "48 GB", "64gb", "72GB"):
        assert gpus.find(query).slug not in CARDS
        assert gpus.variants(query) == []


@pytest.mark.parametrize("query", ["rtx-490", "0GB", "24", "24TB", "", "-1GB"])
def test_what_is_no_card_and_no_size(query: str) -> None:
    with pytest.raises(UsageError) as error:
        gpus.find(query)
    assert error.value.code == "SM402"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("rtx-4091", ["rtx-4090"]),
        ("a100-40gb", ["a100-pcie-40gb", "a100-sxm-40gb"]),  # 80 GB are the usual ones
        ("GH200", ["gh200-96gb", "gh200-144gb"]),
        ("l4s", ["l4", "l40s"]),
    ],
)
def test_near_misses_are_named(query: str, named: list[str]) -> None:
    with pytest.raises(UsageError, match="unknown GPU") as error:
        gpus.find(query)
    assert error.value.hint.startswith("Did you mean '")
    assert all(f"'{name}'" in error.value.hint for name in named)
    assert error.value.hint.count("'") <= 2 * gpus.NEAR + 2
    assert error.value.hint.endswith("'staticmem gpus' lists all names.")


def test_the_catalog_is_not_listed_in_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        gpus.find("foo")
    assert error.value.hint == "'staticmem gpus' lists the names."
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"version: 1\nchecked: 2026-01-01\ncards: {{ours: {GOOD}}}\n", encoding="utf-8")
    with pytest.raises(UsageError) as error:
        gpus.find("foo", file=str(mine))
    assert error.value.hint == f"'staticmem gpus --gpus-file {mine}' lists the names."


GOOD = "{name: X, arch: sm_80, processors: 10, nominal: 1000, source: 'https://x'}"


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("{name: X, arch: sm_81, processors: 1, nominal: 1, source: s}", "sm_81"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1}", "lacks 'source'"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1.5, source: s}", "nominal is 1.5"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1000, nvml: 1001, source: s}", "nvml 1001"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1000, usabel: 1, source: s}", "unknown key 'usabel'"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1000, usable: {mib: 1}, source: s}", "lacks 'source'"),
        ("7", "not a mapping"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1, source: s, class: cheap}", "cheap"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1, source: s, specs: {source: s, tdp: 0}}", "tdp is 0"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1, source: s, specs: {source: s, read: [tdp]}}", "tdp"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1, source: s, specs: {tdp: 5}}", "lacks 'source'"),
        ("{name: X, arch: sm_80, processors: 1, nominal: 1, source: s, specs: {source: s, tflops: {fp9: 1}}}", "fp9"),
    ],
)
def test_a_bad_card_is_an_error_that_says_where(tmp_path: Path, card: str, said: str) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(f"version: 1\nchecked: 2026-01-01\ncards:\n  good: {GOOD}\n  bad: {card}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"cards\.bad") as error:
        gpus.load(path)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["cards: [", "- 1", "", "version: 1\n"])
def test_a_file_that_is_no_list_of_cards(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"gpus\.yaml"):
        gpus.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        gpus.load(tmp_path / "none.yaml")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder's YAML files, as a build makes it."""
    for name in YAML:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(Path(documents.__file__).parent / name, tmp_path / name)
    documents.write_json(tmp_path)
    monkeypatch.setattr(documents, "_HERE", tmp_path)
    return tmp_path


YAML = ("gpus.yaml", "profiles/pytorch.yaml")


@pytest.mark.parametrize("name", YAML)
def test_the_json_that_a_build_makes_says_what_the_yaml_says(
    built: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = documents.read_yaml(Path(documents.__file__).parent / name)
    monkeypatch.setattr(documents, "_parse", None)  # the JSON is enough
    assert documents.read_yaml(built / name) == json.loads(json.dumps(plain, default=str))


def test_json_of_another_text_does_not_count(built: Path) -> None:
    path = built / "gpus.yaml"
    assert documents._built_json(path, path.read_bytes()) is not None
    assert documents._built_json(path, path.read_bytes() + b"\n") is None


def test_a_switch_is_true_or_false(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    card = "name: A, arch: sm_90, processors: 1, nominal: 9, source: s, usual: perhaps"
    path.write_text(f"version: 1\nchecked: 2026-11-21\ncards:\n  a: {{{card}}}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"cards\.a\.usual is 'perhaps'"):
        gpus.load(path)


DRIVERS = {
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "GeForce RTX 4060 Ti 16 GB": "rtx-4060-ti-16gb",
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100": "v100-16gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "AMD Instinct MI300X": "mi300x",
}


@pytest.mark.parametrize("name", DRIVERS)
def test_names_of_drivers_and_shops_are_found(name: str) -> None:
    assert gpus.find(name).slug == DRIVERS[name]


@pytest.mark.parametrize("name", ["NVIDIA", "GeForce", "rtx", "GeForce RTX 4090 Laptop GPU"])
def test_a_brand_or_another_card_is_no_card_of_the_catalog(name: str) -> None:
    with pytest.raises(UsageError, match="unknown GPU"):
        gpus.find(name)
