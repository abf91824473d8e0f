"""Every published reading beside the prediction: `docs/generated/hardware-readings.md`, for `compare_readings.py`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

MIB = 2**20

INTRODUCTION = """\
# Readings of GPUs beside predictions

`python scripts/readings/compare_readings.py --page docs/generated/hardware-readings.md` writes this page. Each
reading was published by somebody else: the tables name the source, the card and what was read. Settings are what the
source states; where it has no version of PyTorch, one is inferred from the date. Networks are in `models/` and
`tests/data/graphs/`, the figures in `tests/data/measured/`; [readings](../internals/readings.md) says how to add yours.

- **Error**: prediction / reading - 1. It counts as none where the two differ by no more than the source rounds to; such
  a reading is "exact". Medians and percentiles are of its absolute value.
- **In band**: the reading lies within the band of the prediction. **Above**: it lies above its upper end, which is what
  somebody who fills a card has to fear.
- **Held out**: a random half of the readings, which was not looked at while we searched the other half for causes.
- **Decoders** and vision transformers that have a name in the table (`llama-2-7b`) are predicted from all layers where
  it says `whole`, else from two and four, and each phase of the step grown by what a layer adds. Sizes are in the file
  of the source.
- **First**: lit-gpt of October 2023 has its longest sample in the first micro-batch of all. Its prediction has no state
  of the optimizer and no logits of a step before, and the replay of the first step alone.
- **Between steps**: Qwen3's readings are no peaks. In all 21 rows with prompts from 6,144 tokens on, what they have
  beside the weights and a cache of prompt + 2,047 tokens is 33 to 48 MiB, for each model the same within 2 MiB:
  neither the activations of the prompt, which Qwen2.5's readings have, nor a second copy of one layer's keys. So
  they are compared with what is allocated between two decode steps. The peak of these runs is predicted up to 20 %
  higher, and the script in their repository reads a peak: it is not the one that was used.
- **Cards**: the sum over several cards has the peak of each, so layers' activations count once for each card.
- **Without a reading**: cuDNN's benchmark mode, TF32 switched off, channels_last, several processes on one card.
"""


OFF = 0.1  # errors beyond it have a section of their own


@dataclass(frozen=True)
class Comparison:
    """One meter of one reading, in bytes. `precision`: what the source rounds to; a smaller difference is none."""

    source: str
    network: str
    settings: str
    gpu: str
    torch: str
    meter: str
    read: int
    predicted: int
    low: int
    high: int
    precision: int = 1
    held_out: bool = False
    explained: str = ""  # why it is off, where that is known

    @property
    def error(self) -> float:
        """The prediction's error as a share of the reading; 0 where the source's rounding explains it."""
        return 0.0 if self.exact else self.predicted / self.read - 1

    @property
    def exact(self) -> bool:
        return abs(self.predicted - self.read) <= self.precision

    @property
    def in_band(self) -> bool:
        return self.low - self.precision <= self.read <= self.high + self.precision


def page(compared: Sequence[Comparison], not_tried: Sequence[tuple[str, str, int, str]] = ()) -> str:
    """The page, as Markdown. `not_tried`: source, rows, how many, and why there is no prediction."""
    cards = sorted({c.gpu for c in compared})
    parts = [
        INTRODUCTION,
        f"{len(compared)} readings of {len(cards)} cards: {', '.join(cards)}.\n",
        "## By source\n",
        _summary(compared, ("source", "meter"), lambda c: (c.source, c.meter)),
        "## Explored and held out\n",
        _summary(compared, ("meter", "half"), lambda c: (c.meter, "held out" if c.held_out else "explored")),
        "## By card\n",
        _summary(compared, ("card", "PyTorch", "meter"), lambda c: (c.gpu, c.torch, c.meter)),
        "## By network\n",
        _summary(compared, ("network", "meter"), lambda c: (c.network, c.meter)),
        f"## Off by more than {OFF:.0%}, or explained\n",
        _off([c for c in compared if abs(c.error) > OFF or (c.explained and not c.in_band)]),
        "## Not tried\n",
        _untried(not_tried),
        "## Every reading\n",
        _every(compared),
    ]
    return "\n".join(parts)


def _summary(
    compared: Iterable[Comparison], titles: Sequence[str], key: Callable[[Comparison], tuple[Hashable, ...]]
) -> str:
    groups: dict[tuple[Hashable, ...], list[Comparison]] = {}
    for comparison in compared:
        groups.setdefault(key(comparison), []).append(comparison)
    head = [*titles, "readings", "exact", "median", "95 % within", "largest", "in band", "above"]
    lines = [_row(head), "|" + "---|" * len(titles) + "---:|" * (len(head) - len(titles))]
    for values, group in groups.items():
        errors = sorted(abs(c.error) for c in group)
        signed = max((c.error for c in group), key=abs)
        within = errors[min(int(len(errors) * 0.95), len(errors) - 1)]
        lines.append(
            _row([
                *map(str, values), str(len(group)), _share(sum(c.exact for c in group), len(group)),
                f"{median(errors):.2%}", f"{within:.2%}", f"{signed:+.2%}",
                _share(sum(c.in_band for c in group), len(group)),
                _share(sum(not c.in_band and c.read > c.high for c in group), len(group)),
            ])
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _off(compared: Sequence[Comparison]) -> str:
    """Readings with a cause, one table for each cause; those without come last."""
    causes: dict[str, list[Comparison]] = {}
    for comparison in sorted(compared, key=lambda c: not c.explained):
        causes.setdefault(comparison.explained or "Not explained.", []).append(comparison)
    parts = []
    for cause, rows in causes.items():
        head = "network and settings;card;meter;read, MiB;predicted, MiB;error".split(";")
        lines = [cause, "", _row(head), "|---|---|---|---:|---:|---:|"]
        for c in rows:
            what = f"{c.network}: {c.settings}"
            lines.append(_row([what, c.gpu, c.meter, _mib(c.read), _mib(c.predicted), f"{c.error:+.1%}"]))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) or "None.\n"


def _untried(rows: Sequence[tuple[str, str, int, str]]) -> str:
    lines = [_row(["source", "rows", "readings", "why"]), "|---|---|---:|---|"]
    lines += [_row([source, what, str(count), why]) for source, what, count, why in rows]
    return "\n".join(lines) + "\n"


def _every(compared: Iterable[Comparison]) -> str:
    head = "network and settings;card;PyTorch;meter;read, MiB;predicted, MiB;error;band, MiB;".split(";")
    lines = [_row(head), "|---|---|---|---|---:|---:|---:|---|---|"]
    for c in compared:
        band = f"{_mib(c.low)} to {_mib(c.high)}" if c.low != c.high else "a point"
        error = "exact" if c.exact else f"{c.error:+.2%}"
        half = "held out" if c.held_out else ""
        what = f"{c.network}: {c.settings}"
        lines.append(_row([what, c.gpu, c.torch, c.meter, _mib(c.read), _mib(c.predicted), error, band, half]))
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.2f}"
