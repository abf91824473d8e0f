"""Verdicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticmem.devices.sizing import TIGHT, Fit, verdict
from staticmem.units import Band, exactly

sizes = st.integers(0, 10**12)


@pytest.mark.parametrize(
    ("needed", "fit"),
    [
        (exactly(900), Fit.FITS), (Band(800, 900, 950), Fit.FITS), (Band(800, 900, 951), Fit.TIGHT),
        (exactly(1000), Fit.TIGHT), (Band(900, 1000, 1100), Fit.TIGHT), (exactly(1001), Fit.DOES_NOT_FIT),
    ],
)  # fmt: skip
def test_a_card_of_a_thousand_bytes(needed: Band, fit: Fit) -> None:
    assert verdict(needed, 1000).fit is fit


def test_what_is_missing() -> None:
    found = verdict(Band(1000, 1100, 1300), 1000)
    assert (found.missing, found.headroom) == (100, -100)
    assert verdict(exactly(400), 1000).missing == 0


def test_what_fits_by_giving_cached_memory_back_is_tight() -> None:
    assert verdict(exactly(900), 1000, tight=True).fit is Fit.TIGHT
    assert verdict(exactly(1001), 1000, tight=True).fit is Fit.DOES_NOT_FIT


def test_a_step_that_runs_takes_no_more_than_there_is() -> None:
    assert verdict(Band(900, 980, 1100), 1000).needed == (900, 980, 1000)
    assert verdict(Band(900, 1001, 1100), 1000).needed == (900, 1001, 1100)
    assert verdict(Band(800, 900, 950), 1000).widened(10, 60).needed == (790, 900, 1000)


@given(st.lists(sizes, min_size=3, max_size=3), st.integers(1, 10**12), st.integers(0, 10**12))
def test_more_memory_never_makes_it_worse(need: list[int], usable: int, more: int) -> None:
    order = [Fit.DOES_NOT_FIT, Fit.TIGHT, Fit.FITS]
    band = Band(*sorted(need))
    assert order.index(verdict(band, usable).fit) <= order.index(verdict(band, usable + more).fit)


@given(st.lists(sizes, min_size=3, max_size=3), st.integers(1, 10**12))
def test_fits_means_the_whole_band_fits(need: list[int], usable: int) -> None:
    band = Band(*sorted(need))
    found = verdict(band, usable)
    assert (found.fit is Fit.FITS) == (band.high <= usable * TIGHT)
    assert (found.fit is Fit.DOES_NOT_FIT) == (found.missing > 0)


@pytest.mark.parametrize(("needed", "usable"), [(exactly(1), 0), (Band(3, 2, 4), 10)])
def test_nonsense_is_refused(needed: Band, usable: int) -> None:
    with pytest.raises(ValueError, match=r"bytes|band"):
        verdict(needed, usable)
