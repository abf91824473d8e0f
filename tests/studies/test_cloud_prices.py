"""Prices of clouds by the hour, on offers as gpuhunt has them; nothing is fetched here."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from staticmem.cli.main import main
from staticmem.devices import gpus
from staticmem.errors import UsageError
from staticmem.studies.prices import current, lowest, prices_of

SEED = Path(__file__).parents[2] / "models" / "seed.pt2"
DAY = "2026-11-23"


def offer(name: str | None, memory: float | None, price: float, count: int = 1, provider: str = "cloud") -> Any:
    return SimpleNamespace(gpu_name=name, gpu_memory=memory, price=price, gpu_count=count, provider=provider)


def hours(*offers: Any) -> dict[str, float | None]:
    return {slug: price.hour for slug, price in lowest(offers, gpus.cards(), DAY).items()}


def test_the_lowest_price_of_one_gpu() -> None:
    eight, one = offer("L4", 24, 8.0, 8, "large"), offer("L4", 24, 1.1, 1, "small")
    assert hours(eight, one) == hours(one, eight) == {"l4": 1.0}
    price = lowest([one, eight], gpus.cards(), DAY)["l4"]
    assert (price.currency, price.buy, price.source) == ("USD", None, f"large, {DAY}")


@pytest.mark.parametrize(
    ("name", "memory", "slugs"),
    [
        ("A100", 80, {"a100-pcie-80gb", "a100-sxm-80gb"}),
        ("A100", 40, {"a100-pcie-40gb", "a100-sxm-40gb"}),
        ("H100", 80, {"h100-pcie-80gb", "h100-sxm-80gb"}),
        ("H100NVL", 94, {"h100-nvl"}),
        ("B300", 270, {"b300"}),
        ("RTX4060Ti", 16, {"rtx-4060-ti-16gb"}),
        ("RTX4060Ti", 8, set()),  # a card that is not in the catalogue
        ("RTX4090", 24, {"rtx-4090"}),
        ("RTX6000Ada", 48, {"rtx-6000-ada"}),
        ("RTXPRO6000", 96, {"rtx-pro-6000"}),
        ("A6000", 48, {"a6000"}),
        ("MI300X", 192, {"mi300x"}),
        ("V100", 16, {"v100-16gb"}),
    ],
)
def test_names_of_offers(name: str, memory: float, slugs: set[str]) -> None:
    assert hours(offer(name, memory, 2.0)).keys() == slugs


def test_offers_without_a_price_a_name_or_memory_are_none() -> None:
    assert hours(offer(None, None, 1.0), offer("L4", None, 1.0), offer("L4", 24, 0.0), offer("L4", 24, 1.0, 0)) == {}


def test_the_word_asks_gpuhunt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict[str, Any]] = []

    def query(**filters: Any) -> list[Any]:
        asked.append(filters)
        return [offer("L4", 24, 0.81, provider="runpod"), offer("T4", 16, 0.4)]

    monkeypatch.setitem(sys.modules, "gpuhunt", SimpleNamespace(query=query))
    assert prices_of("gpuhunt", gpus.cards())["t4"].hour == 0.4
    assert asked == [{"min_gpu_count": 1, "spot": False}]
    assert main(["size", str(SEED), "--batch", "1", "--gpu", "l4", "--prices", "gpuhunt", "--no-batches"]) == 0
    assert f"0.81 USD/h (runpod, {datetime.date.today().isoformat()})" in capsys.readouterr().out


def test_it_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(UsageError, match="needs the package gpuhunt") as error:
        current(gpus.cards())
    assert error.value.code == "SM408"
    assert "pip install gpuhunt" in error.value.hint


def test_a_network_that_is_down_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(**filters: Any) -> list[Any]:
        raise OSError("Failed to load catalogs\nof all providers")

    monkeypatch.setitem(sys.modules, "gpuhunt", SimpleNamespace(query=query))
    with pytest.raises(UsageError, match="gpuhunt gives no prices") as error:
        current(gpus.cards())
    assert error.value.why == "Failed to load catalogs of all providers."
