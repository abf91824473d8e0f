"""The columns of holds give back what was put in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from staticmem.eager.reasons import Reason
from staticmem.eager.trace import OPEN, Hold, Holds

TICKS = st.integers(0, 2**32 - 2)
HOLDS = st.builds(
    Hold, st.integers(0, 2**31), st.sampled_from(["value", "saved"]), st.text(max_size=4), TICKS,
    st.none() | TICKS, st.integers(-1, 2**31 - 1),
)  # fmt: skip


@given(st.lists(HOLDS))
def test_what_was_appended_is_read_back(holds: list[Hold]) -> None:
    columns = Holds()
    for hold in holds:
        columns.append(hold)
    assert len(columns) == len(holds)
    assert list(columns) == holds
    if holds:
        assert columns[-1] == holds[-1]


def test_a_hold_is_open_until_it_ends() -> None:
    columns = Holds()
    index = columns.take(3, Reason.FRAME, "layer1", 7, 2)
    assert columns.ends[index] == OPEN
    assert columns[index] == Hold(3, Reason.FRAME, "layer1", 7, None, 2)
    columns.ends[index] = 9
    assert columns[index].end == 9
