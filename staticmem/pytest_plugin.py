"""A pytest plugin: budgets of GPU memory as tests, without a GPU.

    @pytest.mark.gpu_budget("40 GiB", gpu="l40s")
    def test_training_fits(gpu_memory):
        gpu_memory(build_model(), example_inputs, optimizer="adamw", amp="bf16")

`gpu_memory` is `staticmem.analyze`; the test fails where a report of it exceeds the budget. The marker takes the limit,
the `metric` ("live", "allocated", "reserved" or "device"; "device" where `gpu` is given, else "live"), and defaults for
the arguments of `analyze`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from staticmem.report.model import Report


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu_budget(limit, metric=None, **words): most GPU memory that gpu_memory() may report"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A budget that nothing can be held to is an error, as one whose test does not call the fixture."""
    if item.get_closest_marker("gpu_budget") and "gpu_memory" not in getattr(item, "fixturenames", ()):
        pytest.fail("gpu_budget: the test does not take the fixture gpu_memory, so that nothing is checked", False)


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> Iterator[Callable[..., Report]]:
    """`staticmem.analyze` under the budgets of the test's `gpu_budget` markers."""
    budgets = [_budget(mark) for mark in request.node.iter_markers("gpu_budget")]
    used: list[Report] = []

    def analyze(model: object, inputs: Any = None, **options: Any) -> Report:
        from staticmem import analyze

        defaults: dict[str, Any] = {}
        for _, _, more in reversed(budgets):  # the closest marker has the last word
            defaults |= more
        report = analyze(model, inputs, **{**defaults, **options})
        used.append(report)
        for limit, metric, _ in budgets:
            _assert_within(report, limit, metric)
        return report

    yield analyze
    if budgets and not used:
        pytest.fail("gpu_budget: the test did not call gpu_memory(), so that nothing was checked", pytrace=False)


def _budget(mark: pytest.Mark) -> tuple[int, str, dict[str, Any]]:
    from staticmem.report.model import METERS
    from staticmem.units import parse_limit

    options = dict(mark.kwargs)
    given = mark.args[0] if mark.args else options.pop("limit", None)
    limit = parse_limit(given if isinstance(given, int) else str(given))
    if limit is None or len(mark.args) > 1:
        raise pytest.UsageError(f"gpu_budget({given!r}): the limit is a size such as '40 GiB'")
    metric = options.pop("metric", None) or ("device" if "gpu" in options else "live")
    if metric not in METERS:
        raise pytest.UsageError(f"gpu_budget: metric {metric!r} is not one of {', '.join(METERS)}")
    return limit, metric, options


def _assert_within(report: Report, limit: int, metric: str) -> None:
    from staticmem.report.verdict import verdict
    from staticmem.units import format_bytes

    needed = getattr(report.peak, f"{metric}_bytes")
    if needed is None:
        pytest.fail(f"gpu_budget: {metric} memory was not evaluated for a graph of this size", pytrace=False)
    refused = report.gpu is not None and report.gpu.fit in ("does not fit", "cannot run it")
    if needed <= limit and not refused:
        return
    lines = [f"{metric} memory {format_bytes(needed)} exceeds the budget of {format_bytes(limit)}"] * (needed > limit)
    lines += [verdict(report), ""]
    lines += [f"  {format_bytes(t.bytes):>11}  {t.category:<15}  {t.module}: {t.name}" for t in report.top_tensors]
    pytest.fail("\n".join(lines), pytrace=False)
